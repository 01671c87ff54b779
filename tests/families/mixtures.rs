//! Mixtures of experts as transformers 5 saves them: `num_local_experts`, and all experts of a layer in one tensor.

use super::{Result, decibels, expected, folder, model, same_db, with_inputs};
use fp8::load::{Checkpoint, Inputs};
use fp8::models::{ModelOptions, open};
use fp8::rewrite::{Spelling, WriteOptions, convert, quiet};
use std::path::Path;

const FOLDERS: [&str; 6] = [
    "qwen3_moe_hf5",
    "qwen3_moe_hf5_fused",
    "mixtral_hf5",
    "mixtral_hf5_fused",
    "deepseek_v3_hf5",
    "deepseek_v3_hf5_fused",
];

#[test]
fn mixtures_of_transformers_5() -> Result<()> {
    for name in FOLDERS {
        let dir = folder(name);
        let model = with_inputs(&dir, Inputs::WeightOnly)?;
        let logits = model.forward(&expected(&dir, "input_ids")?)?;
        let db = decibels(&expected(&dir, "logits_weight_only")?, &logits)?;
        println!("{name}: {db:.1} dB");
        assert!(db >= same_db(), "{name}: {db:.1} dB");
    }
    Ok(())
}

/// Experts get the same names whether a file holds them in one tensor or in several.
#[test]
fn experts_have_names_of_their_own() -> Result<()> {
    // Mixtral's names depend on the form.
    for pair in FOLDERS.chunks(2).filter(|pair| pair[0] != "mixtral_hf5") {
        same_experts(pair[0], pair[1])?;
    }
    Ok(())
}

fn same_experts(apart: &str, fused: &str) -> Result<()> {
    let (apart, fused) = (
        Checkpoint::open_dir(folder(apart))?,
        Checkpoint::open_dir(folder(fused))?,
    );
    assert_eq!(apart.names(), fused.names());
    assert_eq!(apart.layer_paths(), fused.layer_paths());
    let path = "model.layers.1.mlp.experts.3.up_proj";
    assert!(fused.layer_paths().contains(&path.to_string()));
    let scale = format!("{path}.weight_scale_inv");
    assert_eq!(fused.shape(&scale), Some([1, 2].as_slice()));
    let cpu = candle_core::Device::Cpu;
    for path in apart.layer_paths() {
        let (one, other) = (
            apart.stored_layer(&path, &cpu)?,
            fused.stored_layer(&path, &cpu)?,
        );
        let codes = |layer: &fp8::load::StoredLayer| layer.codes.codes().to_vec2::<u8>();
        assert_eq!(codes(&one)?, codes(&other)?, "{path}");
    }
    Ok(())
}

/// Experts in MXFP4 and everything else in bf16, as compressed-tensors writes them; inputs untouched.
#[test]
fn a_mixture_in_mxfp4() -> Result<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/fp4/qwen3_moe_mxfp4");
    let checkpoint = Checkpoint::open_dir(&dir)?;
    assert_eq!(checkpoint.layer_paths().len(), 2 * 4 * 3);
    assert!(
        checkpoint
            .layer_paths()
            .iter()
            .all(|path| checkpoint.is_fp4(path))
    );
    let (ids, logits) = (
        expected(&dir, "input_ids")?,
        expected(&dir, "logits_weight_only")?,
    );
    let db = decibels(&logits, &model(&dir)?.forward(&ids)?)?;
    println!("qwen3_moe_mxfp4: {db:.1} dB");
    assert!(db >= 110., "{db:.1} dB");
    // As FP8: the same values.
    let temp = tempfile::tempdir()?;
    let target = temp.path().join("fp8");
    convert(
        &checkpoint,
        &target,
        Spelling::CompressedTensors,
        &WriteOptions::new(),
        &mut quiet,
    )?;
    let db = decibels(&logits, &model(&target)?.forward(&ids)?)?;
    println!("qwen3_moe_mxfp4 as MXFP8: {db:.1} dB");
    assert!(db >= 110., "{db:.1} dB");
    Ok(())
}

#[test]
fn two_counts_of_experts_have_to_agree() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let from = folder("qwen3_moe_hf5");
    std::fs::copy(
        from.join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )?;
    let text = std::fs::read_to_string(from.join("config.json"))?;
    let write = |old: &str, new: &str| {
        std::fs::write(dir.path().join("config.json"), text.replace(old, new))
    };
    let old = "\"num_local_experts\": 4";
    for same in [
        "\"num_experts\": 4",
        "\"num_experts\": 4, \"num_local_experts\": 4",
    ] {
        write(old, same)?;
        open(dir.path(), &ModelOptions::new())?;
    }
    write(old, "\"num_experts\": 4, \"num_local_experts\": 8")?;
    let error = open(dir.path(), &ModelOptions::new()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("num_local_experts is 8"), "{text}");
    Ok(())
}
