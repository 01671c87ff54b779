//! Small models as their libraries write them, run by `fp8::models::Llama`.

mod mixtures;
mod native;
mod stock;

use candle_core::{DType, Device, Tensor};
use fp8::load::{Inputs, OpenOptions};
use fp8::models::{CausalLm, KvCache, Llama, Model, ModelOptions, open};
use fp8_test_support::bits;
use std::path::{Path, PathBuf};

type Result<T> = anyhow::Result<T>;

/// Logits above this count as the same: other orders of sums stay above it, a single changed code falls far below.
///
/// An exception are codes next to zero. There an input is what is left of a sum, with an error of the order of f32's epsilon times the
/// largest input of its group, and codes lie 1/448/512 of that apart: of the hundred thousand inputs of a folder about ten are so
/// small, and each has a chance of a few percent to lie within its error of an edge. The sums of the portable products, which
/// scale both operands before they multiply, meet one such edge in `ct_block128` (101 dB); the tiles of vector units meet none.
fn same_db() -> f64 {
    match fp8::fp8_core::Isa::best().level() {
        fp8::fp8_core::IsaLevel::Portable => 95.,
        _ => 110.,
    }
}

fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/golden/families").join(name)
}

fn model(dir: &Path) -> Result<Llama> {
    with_inputs(dir, Inputs::AsStored)
}

fn with_inputs(dir: &Path, inputs: Inputs) -> Result<Llama> {
    let checkpoint = OpenOptions::new().with_inputs(inputs);
    match open(dir, &ModelOptions::new().with_checkpoint(checkpoint))? {
        Model::Llama(model) => Ok(model),
        other => anyhow::bail!("a Llama is expected: {other:?}"),
    }
}

fn expected(dir: &Path, name: &str) -> Result<Tensor> {
    let all = candle_core::safetensors::load(dir.join("expected.safetensors"), &Device::Cpu)?;
    all.get(name)
        .cloned()
        .ok_or_else(|| anyhow::anyhow!("{dir:?} has no {name}"))
}

/// 20 log10 of the norm of `expected` over the norm of the difference.
fn decibels(expected: &Tensor, got: &Tensor) -> Result<f64> {
    let norm = |x: &Tensor| -> Result<f64> {
        let squares = x.to_dtype(DType::F64)?.sqr()?.sum_all()?;
        Ok(squares.to_scalar::<f64>()?.sqrt())
    };
    let difference = (expected.to_dtype(DType::F64)? - got.to_dtype(DType::F64)?)?;
    Ok(20. * (norm(expected)? / norm(&difference)?).log10())
}

/// The logits of both sequences in prompts of several lengths over a cache.
fn in_pieces(model: &Llama, ids: &Tensor, mut cache: KvCache, pieces: &[usize]) -> Result<Tensor> {
    let mut logits = vec![];
    let mut from = 0;
    for piece in pieces {
        logits.push(model.forward_cached(&ids.narrow(1, from, *piece)?, &mut cache)?);
        from += piece;
    }
    assert_eq!(cache.len(), ids.dim(1)?);
    Ok(Tensor::cat(&logits, 1)?)
}

fn check(name: &str) -> Result<()> {
    let dir = folder(name);
    let (model, ids) = (model(&dir)?, expected(&dir, "input_ids")?);
    let logits = expected(&dir, "logits_fp8")?;
    let whole = model.forward(&ids)?;
    let db = decibels(&logits, &whole)?;
    println!("{name}: {db:.1} dB");
    assert!(db >= same_db(), "{name}: {db:.1} dB");
    let tokens = ids.dim(1)?;
    // One scale for the inputs of the whole batch depends on the batch.
    if name == "torchao_tensor" {
        return Ok(());
    }
    for pieces in [vec![tokens], vec![1; tokens], vec![10, 5, 1]] {
        let cache = model.new_cache(2, tokens + 3)?;
        let db = decibels(&logits, &in_pieces(&model, &ids, cache, &pieces)?)?;
        println!("{name}: in pieces of {pieces:?} {db:.1} dB");
        assert!(
            db >= same_db(),
            "{name}: in pieces of {pieces:?} {db:.1} dB"
        );
    }
    Ok(())
}

macro_rules! families {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() -> Result<()> {
            check(stringify!($name))
        })*
    };
}

families! {
    autofp8_static
    ct_block128
    ct_channel_token_bf16
    ct_static_tensor
    hf_block_f32
    hf_per_tensor_static
    modelopt_fp8_kv
    modelopt_pb_wo
    torchao_row
    torchao_tensor
}

/// Where no scale depends on other tokens, tokens have the bits of the whole sequence however they come; over a cache of codes they agree
/// with each other.
#[test]
fn tokens_have_the_same_bits_in_pieces_of_any_length() -> Result<()> {
    let dirs = std::fs::read_dir(folder(""))?.map(|entry| Ok(entry?.path()));
    let mut compared = vec![];
    for dir in dirs.collect::<Result<Vec<_>>>()? {
        // One scale for the inputs of the whole batch depends on the batch.
        if !dir.join("expected.safetensors").exists() || dir.ends_with("torchao_tensor") {
            continue;
        }
        let model = model(&dir)?;
        let ids = expected(&dir, "input_ids")?;
        let (rows, tokens) = ids.dims2()?;
        let pieces = [vec![tokens], vec![1; tokens], vec![tokens - 6, 5, 1]];
        let whole = bits(&model.forward(&ids)?);
        for pieces in &pieces {
            let cache = model.new_cache(rows, tokens)?;
            let got = bits(&in_pieces(&model, &ids, cache, pieces)?);
            assert!(got == whole, "{dir:?} in pieces of {pieces:?}");
        }
        let row = bits(&model.forward(&ids.narrow(0, 1, 1)?)?);
        assert!(
            row == whole[row.len()..2 * row.len()],
            "{dir:?}: a row alone"
        );
        let mut over_codes = vec![];
        for pieces in &pieces {
            if let Some(cache) = model.new_fp8_cache(rows, tokens)? {
                over_codes.push(bits(&in_pieces(&model, &ids, cache, pieces)?));
            }
        }
        assert!(
            over_codes.windows(2).all(|pair| pair[0] == pair[1]),
            "{dir:?}"
        );
        compared.push((
            dir.file_name().map(ToOwned::to_owned),
            !over_codes.is_empty(),
        ));
    }
    assert!(compared.len() >= 9, "{compared:?}");
    assert!(
        compared.iter().any(|(_, over_codes)| *over_codes),
        "{compared:?}"
    );
    Ok(())
}

#[test]
fn fp8_cache() -> Result<()> {
    let dir = folder("modelopt_fp8_kv");
    let (model, ids) = (model(&dir)?, expected(&dir, "input_ids")?);
    let logits = expected(&dir, "logits_fp8_kv")?;
    let tokens = ids.dim(1)?;
    for pieces in [vec![tokens], vec![1; tokens], vec![10, 5, 1]] {
        let Some(cache) = model.new_fp8_cache(2, tokens)? else {
            anyhow::bail!("the file has scales of keys and values");
        };
        assert!(cache.is_fp8());
        let db = decibels(&logits, &in_pieces(&model, &ids, cache, &pieces)?)?;
        println!("FP8 cache, pieces of {pieces:?}: {db:.1} dB");
        assert!(db >= same_db(), "pieces of {pieces:?}: {db:.1} dB");
    }
    Ok(())
}

/// With the weights dequantized and inputs untouched, as libraries without an FP8 product run these files.
#[test]
fn weight_only() -> Result<()> {
    for name in [
        "autofp8_static",
        "ct_block128",
        "ct_channel_token_bf16",
        "ct_static_tensor",
        "hf_block_f32",
        "hf_per_tensor_static",
        "modelopt_fp8_kv",
        "torchao_row",
        "torchao_tensor",
    ] {
        let dir = folder(name);
        let model = with_inputs(&dir, Inputs::WeightOnly)?;
        let logits = model.forward(&expected(&dir, "input_ids")?)?;
        let db = decibels(&expected(&dir, "logits_weight_only")?, &logits)?;
        println!("{name}, weight-only: {db:.1} dB");
        assert!(db >= same_db(), "{name}: {db:.1} dB");
    }
    Ok(())
}

/// Serving engines cast the inputs of weight-only blocks in groups.
#[test]
fn blocks_as_engines_run_them() -> Result<()> {
    let dir = folder("modelopt_pb_wo");
    let model = with_inputs(&dir, Inputs::Groups(128))?;
    let logits = model.forward(&expected(&dir, "input_ids")?)?;
    let db = decibels(&expected(&dir, "logits_fp8_g128")?, &logits)?;
    println!("modelopt_pb_wo in groups: {db:.1} dB");
    assert!(db >= same_db(), "{db:.1} dB");
    Ok(())
}
