//! Models in several files.

use crate::helpers::*;
use candle_core::DType;
use fp8_files::rewrite::{self, QuantizeOptions, Scheme, Spelling, WriteOptions};
use fp8_test_support::files;
use serde_json::json;

#[test]
fn shards_hold_the_same_tensors_as_one_file() {
    let source = open_golden("ct_static_tensor");
    let dir = dir();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let one = WriteOptions::new();
    rewrite::convert(
        &source,
        &whole,
        Spelling::AutoFp8,
        &one,
        &mut rewrite::quiet,
    )
    .unwrap();
    let small = WriteOptions::new().with_shard_bytes(100_000);
    let report = rewrite::convert(
        &source,
        &parts,
        Spelling::AutoFp8,
        &small,
        &mut rewrite::quiet,
    )
    .unwrap();
    assert_eq!(report.files, names_in(&parts));
    assert!(report.files.len() > 4, "{:?}", report.files);

    let index = json_file(parts.join("model.safetensors.index.json"));
    assert_eq!(index["metadata"]["total_size"], report.bytes);
    let map = index["weight_map"].as_object().unwrap();
    let (a, b) = (open(&whole), open(&parts));
    assert_eq!(a.names(), map.keys().collect::<Vec<_>>());
    assert!(all_facts(&a) == all_facts(&b) && others(&a) == others(&b));
    // A layer's scale is in the file of its codes.
    for path in b.layer_paths() {
        let file = |own: &str| &map[&format!("{path}.{own}")];
        assert_eq!(file("weight"), file("weight_scale"));
    }
}

/// The report names only files that are there, and the folder opens.
#[test]
fn a_model_without_tensors_is_a_file_without_tensors() {
    let dir = dir();
    let (empty, to) = (dir.path().join("empty"), dir.path().join("out"));
    std::fs::create_dir(&empty).unwrap();
    files::write(&empty.join("model.safetensors"), &[]);
    files::write_config(&empty, &json!({ "model_type": "llama" }));
    let options = WriteOptions::new();
    let source = open(&empty);
    let report = rewrite::dequantize(&source, &to, None, &options, &mut rewrite::quiet).unwrap();
    assert_eq!(report.files, ["config.json", "model.safetensors"]);
    assert_eq!(report.files, names_in(&to));
    assert!(open(&to).names().is_empty());
}

/// Loaders map files into memory and read elements in place.
#[test]
fn every_tensor_is_aligned_to_its_element() {
    let dir = dir();
    let (plain, to) = (dir.path().join("plain"), dir.path().join("out"));
    plain_model(&plain, (33, 35), false, DType::BF16);
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    rewrite::quantize(&open(&plain), &to, &options, &mut rewrite::quiet).unwrap();
    let bytes = std::fs::read(to.join("model.safetensors")).unwrap();
    let (length, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(length % 8, 0);
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    for (name, info) in metadata.tensors() {
        let size = info.dtype.bitsize() / 8;
        assert_eq!(info.data_offsets.0 % size, 0, "{name}");
    }
    safetensors::SafeTensors::deserialize(&bytes).unwrap();
}

#[test]
fn options_have_the_documented_defaults() {
    let options = WriteOptions::new();
    // 5 GB as Hugging Face's libraries count them; 1 GiB.
    assert_eq!(
        (options.shard_bytes, options.memory),
        (5_000_000_000, 1 << 30)
    );
    assert_eq!(options.threads, 0);
    assert!(!options.overwrite && !options.drop_kv_scales && !options.power_of_two_inputs);
    assert_eq!(options, WriteOptions::default());

    let options = QuantizeOptions::new(Scheme::Block128);
    assert_eq!(options.spelling, Spelling::CompressedTensors);
    assert!(!options.head && options.ignore.is_empty() && options.input_amaxes.is_empty());
    assert_eq!(options.write, WriteOptions::new());
}
