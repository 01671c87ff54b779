//! Mixtures of experts as transformers 5 saves them: `num_local_experts`, and all experts of a layer in one tensor.

use super::{Result, decibels, expected, folder, same_db, with_inputs};
use fp8::load::{Checkpoint, Inputs};
use fp8::models::{ModelOptions, open};

const FOLDERS: [&str; 4] = [
    "qwen3_moe_hf5",
    "qwen3_moe_hf5_fused",
    "mixtral_hf5",
    "mixtral_hf5_fused",
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
    let [apart, fused, ..] = FOLDERS.map(|name| Checkpoint::open_dir(folder(name)));
    let (apart, fused) = (apart?, fused?);
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
