//! Adapters added to the weights of their base, in files and in memory.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use fp8::fp8_files::adapter::AdapterFile;
use fp8::load::Checkpoint;
use fp8::models::{Model, ModelOptions, open};
use fp8::rewrite::{self, Merged, QuantizeOptions, Scheme, Source, WriteOptions, quiet};
use fp8_test_support::{assert_within, sqnr};
use std::ops::ControlFlow;
use std::path::Path;

/// f32 has 24 bits, 144 dB. The sum of weight and update is rounded, and two layers lose a part more.
const LEAST: f64 = 105.;

fn model(dir: &Path) -> Model {
    open(dir, &ModelOptions::new()).expect("a model")
}

fn merge(base: &Path, adapter: &str, dtype: Option<DType>, out: &Path) -> Vec<String> {
    let checkpoint = Checkpoint::open_dir(base).expect("a base");
    let adapter = AdapterFile::open(adapter_dir(adapter)).expect("an adapter");
    let merged = Merged::new(&checkpoint, &adapter).expect("they fit");
    rewrite::dequantize(&merged, out, dtype, &WriteOptions::new(), &mut quiet).expect("written");
    merged.layers().to_vec()
}

/// In f32 the merged model computes what base and adapter compute, and what the merge in memory gives, to the bit.
#[test]
fn the_merged_model_computes_what_base_and_adapter_do() -> Outcome {
    for name in ADAPTERS {
        let base = Base::new(family(name));
        let out = tempfile::tempdir()?;
        let merged = out.path().join("merged");
        merge(base.dir.path(), name, Some(DType::F32), &merged);
        let got = model(&merged).forward(base.ids())?;
        let close = sqnr(&expected(name), &got);
        assert!(close >= LEAST, "{name}: {close} dB");
        let mut in_memory = base.open();
        in_memory.load_adapter("tuned", adapter_dir(name))?;
        in_memory.merge_adapter("tuned")?;
        assert_eq!(
            values(&in_memory.forward(base.ids())?),
            values(&got),
            "{name}"
        );
        assert!(in_memory.adapters().is_empty());
    }
    Ok(())
}

/// Weights in the base's own dtype are base + factor B A, rounded once; everything else is copied.
#[test]
fn weights_are_rounded_once() -> Outcome {
    let base = Base::new("llama");
    let out = tempfile::tempdir()?;
    let merged = out.path().join("merged");
    let layers = merge(base.dir.path(), "llama.names", None, &merged);
    assert_eq!(layers.len(), 6);
    let read =
        |dir: &Path| candle_core::safetensors::load(dir.join("model.safetensors"), &Device::Cpu);
    let (before, after) = (read(base.dir.path())?, read(&merged)?);
    assert_eq!(before.len(), after.len());
    let adapter = AdapterFile::open(adapter_dir("llama.names"))?;
    let config = adapter.config();
    // From the golden script: rank 4, alpha 8, with the exceptions.
    for (path, rank, factor) in [
        ("model.layers.0.self_attn.q_proj", 4, 2.),
        ("model.layers.1.self_attn.q_proj", 4, 8.),
        ("model.layers.0.mlp.down_proj", 2, 4.),
    ] {
        assert_eq!(
            (config.rank_of(path)?, config.factor_of(path)?),
            (rank, factor),
            "{path}"
        );
    }
    for (name, before) in &before {
        let after = &after[name];
        assert_eq!(after.dtype(), DType::BF16, "{name}");
        let path = name.trim_end_matches(".weight");
        if !layers.contains(&path.to_string()) {
            let same = (before.to_dtype(DType::F32)?, after.to_dtype(DType::F32)?);
            assert_eq!(values(&same.0), values(&same.1), "{name}");
            continue;
        }
        let sizes = before.dims2()?;
        let [a, b] = adapter.matrices(path, sizes, DType::F64, &Device::Cpu)?;
        let factor = config.factor_of(path)?;
        let wide = before.to_dtype(DType::F64)?;
        let sum = (&wide + (b.matmul(&a)? * factor)?)?;
        // What the f32 sums of rank + 2 terms may lose, then half a step of bf16.
        let terms = (wide.abs()? + (b.abs()?.matmul(&a.abs()?)? * factor)?)?;
        let terms: Vec<f64> = terms.flatten_all()?.to_vec1()?;
        let steps = (config.rank_of(path)? + 3) as f64;
        assert_within(name, &after.to_dtype(DType::F64)?, &sum, |i, exact| {
            let lost = terms[i] * steps * 2f64.powi(-24);
            lost + (exact.abs() + lost) * 2f64.powi(-9) * 2.
        });
    }
    Ok(())
}

/// Straight into FP8: the codes and scales of the merged model in f32, and of the base where it has those of the scheme and no update.
#[test]
fn merging_into_fp8_is_merging_and_quantizing() -> Outcome {
    let plain = Base::new("qwen2");
    let out = tempfile::tempdir()?;
    for base in [&plain, &plain.quantized()] {
        let merged = out.path().join("merged");
        let _ = std::fs::remove_dir_all(&merged);
        merge(base.dir.path(), "qwen2.regex", Some(DType::F32), &merged);
        let checkpoint = Checkpoint::open_dir(base.dir.path())?;
        let adapter = AdapterFile::open(adapter_dir("qwen2.regex"))?;
        for scheme in [Scheme::ChannelToken, Scheme::Mxfp8] {
            let (one, two) = (out.path().join("one"), out.path().join("two"));
            let options = QuantizeOptions::new(scheme)
                .with_ignore(["*.down_proj"])
                .with_write(WriteOptions::new().with_overwrite(true));
            let source = Merged::new(&checkpoint, &adapter)?;
            rewrite::quantize(&source, &one, &options, &mut quiet)?;
            rewrite::quantize(&Checkpoint::open_dir(&merged)?, &two, &options, &mut quiet)?;
            let (one, two) = (Checkpoint::open_dir(&one)?, Checkpoint::open_dir(&two)?);
            for path in two.layer_paths() {
                let name = format!("{path}.weight");
                let value = |from: &Checkpoint| Source::value(from, &name, DType::F32);
                let granularity = one.stored_layer(&path, &Device::Cpu)?.codes.granularity();
                let kept = Source::codes(&source, &name, granularity)?.is_some();
                assert!(!(kept && source.layers().contains(&path)), "{path}");
                let expected = if kept { &checkpoint } else { &two };
                assert_eq!(
                    values(&value(&one)?),
                    values(&value(expected)?),
                    "{scheme}: {path}"
                );
            }
            assert_eq!(one.layer_paths(), two.layer_paths());
        }
    }
    Ok(())
}

/// The report compares what rounding has left of each update with the update.
#[test]
fn the_rounding_of_updates_is_reported() -> Outcome {
    let base = Base::new("qwen2").quantized();
    let out = tempfile::tempdir()?;
    let checkpoint = Checkpoint::open_dir(base.dir.path())?;
    let adapter = AdapterFile::open(adapter_dir("qwen2.regex"))?;
    let source = Merged::new(&checkpoint, &adapter)?;
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let report = rewrite::quantize(&source, out.path().join("fp8"), &options, &mut quiet)?;
    let written = Checkpoint::open_dir(out.path().join("fp8"))?;
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let paths: Vec<&String> = report.update_errors.keys().collect();
    let mut expected: Vec<&String> = source.layers().iter().collect();
    expected.sort();
    assert_eq!(paths, expected);
    for (path, error) in &report.update_errors {
        let name = format!("{path}.weight");
        let update = Source::update(&source, &name)?.expect("an update");
        let wanted = values(&Source::value(&source, &name, DType::F32)?);
        let got = values(&Source::value(&written, &name, DType::F32)?);
        let differences: Vec<f32> = got
            .iter()
            .zip(&wanted)
            .map(|(got, wanted)| got - wanted)
            .collect();
        let own = norm(&differences) / norm(&values(&update));
        // Of each number of f32, 24 bits are right.
        let relative = (f64::from(*error) / own - 1.).abs();
        assert!(
            relative <= 4. * 2f64.powi(-24),
            "{path}: {error} against {own}"
        );
    }
    // A base in high precision is rounded once: nothing was there before that an update could round back to.
    let plain = Base::new("qwen2");
    let checkpoint = Checkpoint::open_dir(plain.dir.path())?;
    let source = Merged::new(&checkpoint, &adapter)?;
    let report = rewrite::quantize(&source, out.path().join("once"), &options, &mut quiet)?;
    assert!(report.update_errors.is_empty());
    Ok(())
}

/// An FP8 base is dequantized first.
#[test]
fn an_fp8_base_counts_as_its_dequantized_weights() -> Outcome {
    let base = Base::new("llama").quantized();
    let out = tempfile::tempdir()?;
    let (direct, plain, merged) = (
        out.path().join("direct"),
        out.path().join("plain"),
        out.path().join("merged"),
    );
    merge(base.dir.path(), "llama.all", Some(DType::F32), &direct);
    let source = Checkpoint::open_dir(base.dir.path())?;
    rewrite::dequantize(
        &source,
        &plain,
        DType::F32,
        &WriteOptions::new(),
        &mut quiet,
    )?;
    merge(&plain, "llama.all", Some(DType::F32), &merged);
    let logits = |dir: &Path| -> Result<Tensor, Box<dyn std::error::Error>> {
        Ok(model(dir).forward(base.ids())?)
    };
    assert_eq!(values(&logits(&direct)?), values(&logits(&merged)?));
    // With inputs in high precision, the adapter on the FP8 base computes the same up to the order of sums.
    let inputs = fp8::load::OpenOptions::new().with_inputs(fp8::load::Inputs::WeightOnly);
    let mut model = open(
        base.dir.path(),
        &ModelOptions::new().with_checkpoint(inputs),
    )?;
    model.load_adapter("tuned", adapter_dir("llama.all"))?;
    let close = sqnr(&model.forward(base.ids())?, &logits(&direct)?);
    assert!(close >= LEAST, "{close} dB");
    Ok(())
}

#[test]
fn small_shards_and_a_cancelled_merge() -> Outcome {
    let base = Base::new("llama");
    let out = tempfile::tempdir()?;
    let (whole, parts) = (out.path().join("whole"), out.path().join("parts"));
    merge(base.dir.path(), "llama.all", None, &whole);
    let checkpoint = Checkpoint::open_dir(base.dir.path())?;
    let adapter = AdapterFile::open(adapter_dir("llama.all"))?;
    let merged = Merged::new(&checkpoint, &adapter)?;
    let options = WriteOptions::new().with_shard_bytes(16 << 10);
    let mut stop = |_: rewrite::Progress<'_>| ControlFlow::Break(());
    let cancelled = rewrite::dequantize(&merged, &parts, None, &options, &mut stop);
    assert!(
        matches!(cancelled, Err(fp8::FilesError::Cancelled)),
        "{cancelled:?}"
    );
    assert!(!parts.exists());
    let report = rewrite::dequantize(&merged, &parts, None, &options, &mut quiet)?;
    assert!(report.files.len() > 4, "{:?}", report.files);
    let logits = |dir: &Path| model(dir).forward(base.ids());
    assert_eq!(values(&logits(&whole)?), values(&logits(&parts)?));
    Ok(())
}
