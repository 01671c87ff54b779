//! Tensors in dtypes that candle cannot hold, such as masks of BOOL: rewrites copy their bytes.

use crate::helpers::*;
use candle_core::DType;
use fp8_files::adapter::{AdapterConfig, AdapterFile, Targets, write_adapter};
use fp8_files::rewrite::{self, Merged, QuantizeOptions, Scheme, Shifted, Source};
use fp8_files::rewrite::{Spelling, WriteOptions, WriteReport};
use fp8_files::{Error, Result, SafetensorsFile};
use fp8_test_support::files;
use safetensors::{Dtype, SafeTensors};
use std::fs;
use std::path::Path;

/// Name, dtype and shape of tensors that stay what they are.
const KEPT: [(&str, Dtype, &[usize]); 11] = [
    // Larger than what is copied at a time.
    ("model.layers.0.attn.bias", Dtype::BOOL, &[1, 1, 1100, 1000]),
    // Named as the weight of a linear layer.
    (MASK, Dtype::BOOL, &[6, 32]),
    ("model.layers.1.attn.bias", Dtype::I8, &[3, 5]),
    ("model.counts", Dtype::U16, &[7]),
    ("model.exponents", Dtype::F8_E8M0, &[4, 3]),
    ("model.nothing", Dtype::BOOL, &[0, 4]),
    ("model.number", Dtype::U64, &[]),
    ("model.waves", Dtype::C64, &[2, 2]),
    // candle has these.
    ("model.layers.0.attn.mask", Dtype::U8, &[4, 4]),
    ("model.position_ids", Dtype::I64, &[1, 8]),
    ("model.steps", Dtype::I16, &[5]),
];

const MASK: &str = "model.layers.0.mask.weight";

/// Bytes of a tensor, all of them possible.
fn bytes_of((name, dtype, dims): &(&str, Dtype, &[usize])) -> Vec<u8> {
    let elements: usize = dims.iter().product();
    let bytes = 0..elements * dtype.bitsize() / 8;
    bytes.map(|i| (i * 37 + name.len()) as u8).collect()
}

/// [`plain_model`] with the tensors of [`KEPT`].
fn model(dir: &Path) {
    plain_model(dir, (32, 64), false, DType::BF16);
    let file = dir.join("model.safetensors");
    let stored = fs::read(&file).unwrap();
    let plain = SafeTensors::deserialize(&stored).unwrap().tensors();
    let kept: Vec<Vec<u8>> = KEPT.iter().map(bytes_of).collect();
    let mut entries: Vec<files::Entry<'_>> = plain
        .iter()
        .map(|(name, view)| (name.as_str(), view.dtype(), view.shape(), view.data()))
        .collect();
    for ((name, dtype, dims), bytes) in KEPT.iter().zip(&kept) {
        entries.push((*name, *dtype, *dims, bytes.as_slice()));
    }
    files::write(&file, &entries);
}

/// Checks that all tensors of [`KEPT`] are in `folder` as they were.
fn check(case: &str, folder: &Path, report: &WriteReport) {
    let names = names_in(folder);
    let names = names.iter().filter(|name| name.ends_with(".safetensors"));
    let files: Vec<SafetensorsFile> = names
        .map(|name| SafetensorsFile::open(&folder.join(name)).unwrap())
        .collect();
    assert!(files.len() > 1, "{case}");
    for kept in &KEPT {
        let (name, dtype, dims) = kept;
        let file = files.iter().find(|file| file.dtype(name).is_some());
        let file = file.unwrap_or_else(|| panic!("{case}: {name} is missing"));
        assert_eq!(file.dtype(name), Some(*dtype), "{case}: {name}");
        assert_eq!(file.shape(name), Some(*dims), "{case}: {name}");
        assert!(
            file.bytes(name).unwrap() == bytes_of(kept),
            "{case}: {name}"
        );
    }
    // A mask is no layer.
    let layers = [&report.quantized, &report.ignored];
    assert!(
        !layers
            .iter()
            .any(|paths| paths.iter().any(|path| path.contains("mask")))
    );
    open(folder);
}

#[test]
fn every_rewrite_copies_them() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    model(&at("plain"));
    let write = WriteOptions::new().with_shard_bytes(100_000);
    let options = QuantizeOptions::new(Scheme::ChannelToken).with_write(write.clone());
    let quantize = |source: &dyn Source, to: &str| -> Result<WriteReport> {
        rewrite::quantize(source, at(to), &options, &mut rewrite::quiet)
    };
    let dequantize = |source: &dyn Source, dtype: Option<DType>, to: &str| -> Result<WriteReport> {
        rewrite::dequantize(source, at(to), dtype, &write, &mut rewrite::quiet)
    };
    let plain = open(at("plain"));
    check("quantize", &at("fp8"), &quantize(&plain, "fp8").unwrap());
    let fp8 = open(at("fp8"));
    let spelling = Spelling::ModelOpt;
    let report = rewrite::convert(&fp8, at("modelopt"), spelling, &write, &mut rewrite::quiet);
    check("convert", &at("modelopt"), &report.unwrap());
    let report = dequantize(&fp8, None, "same").unwrap();
    check("dequantize", &at("same"), &report);
    let report = dequantize(&fp8, Some(DType::F32), "f32").unwrap();
    check("dequantize to f32", &at("f32"), &report);

    let config = AdapterConfig::new(2).with_targets(Targets::names(["q_proj"]));
    let matrices = [0, 1].map(|layer: u64| {
        let path = format!("model.layers.{layer}.self_attn.q_proj");
        let [a, b] = [[2, 32], [32, 2]].map(|dims: [usize; 2]| tensor(layer + 50, &dims));
        (path, [a, b])
    });
    write_adapter(at("adapter"), &config, matrices).unwrap();
    let adapter = AdapterFile::open(at("adapter")).unwrap();
    let merged = Merged::new(&plain, &adapter).unwrap();
    let report = dequantize(&merged, None, "merged").unwrap();
    check("merge", &at("merged"), &report);
    let report = quantize(&merged, "merged_fp8").unwrap();
    check("merge into FP8", &at("merged_fp8"), &report);
}

#[test]
fn where_values_are_needed_the_error_names_the_tensor() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    model(&at("plain"));
    let source = open(at("plain"));
    let refused = |error: Error| {
        let is_typed = matches!(&error, Error::TensorDType { tensor, got, .. } if tensor == MASK && got == "BOOL");
        assert!(is_typed, "{error}");
    };
    refused(Source::value(&source, MASK, DType::F32).unwrap_err());
    refused(source.tensor(MASK, &CPU).unwrap_err());
    let shifts = [(MASK.to_string(), vec![2f32; 32])].into();
    let shifted = Shifted::new(&source, &shifts).unwrap();
    let options = WriteOptions::new();
    let to = at("shifted");
    let result = rewrite::dequantize(&shifted, &to, None, &options, &mut rewrite::quiet);
    refused(result.unwrap_err());
    assert!(!to.exists());
    // And bytes only where there are no values.
    assert!(source.raw_dtype("lm_head.weight").is_none());
}
