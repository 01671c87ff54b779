//! Tensors in the files of a model that the model does not read are named.

use candle_core::{DType, Device, Tensor};
use fp8::load::Checkpoint;
use fp8::models::{ModelOptions, of_checkpoint_with_unread};
use fp8_test_support::golden_models::{configs, write_model};
use std::collections::HashMap;
use std::path::Path;

fn unread(folder: &Path) -> Vec<String> {
    let checkpoint = Checkpoint::open_dir(folder).expect("a checkpoint");
    let options = ModelOptions::new().with_dtype(DType::F32);
    of_checkpoint_with_unread(checkpoint, folder, &options)
        .expect("a model")
        .1
}

/// Adds tensors to the file of a folder.
fn add(folder: &Path, more: &[(&str, &[usize])]) {
    let file = folder.join("model.safetensors");
    let mut tensors: HashMap<String, Tensor> =
        candle_core::safetensors::load(&file, &Device::Cpu).expect("tensors");
    for (name, dims) in more {
        let zeros = Tensor::zeros(*dims, DType::F32, &Device::Cpu).expect("a tensor");
        tensors.insert((*name).to_string(), zeros);
    }
    candle_core::safetensors::save(&tensors, &file).expect("saved");
}

#[test]
fn models_read_all_of_their_files() {
    for family in configs().keys() {
        let folder = tempfile::tempdir().expect("a folder");
        write_model(family, folder.path());
        assert_eq!(unread(folder.path()), [""; 0], "{family}");
    }
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families");
    let folders = std::fs::read_dir(goldens).expect("goldens");
    let folders = folders.map(|folder| folder.expect("a folder").path());
    let folders: Vec<_> = folders.filter(|path| path.is_dir()).collect();
    assert!(folders.len() > 10);
    for folder in folders {
        assert_eq!(unread(&folder), [""; 0], "{}", folder.display());
    }
}

#[test]
fn what_the_configuration_does_not_mention_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    write_model("llama", folder.path());
    add(
        folder.path(),
        &[
            ("score.weight", &[2, 32]),
            ("model.layers.0.self_attn.q_proj.bias", &[32]),
            // Computed, or for images.
            ("vision_tower.patch_conv.weight", &[4, 4]),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", &[8]),
        ],
    );
    let expected = ["model.layers.0.self_attn.q_proj.bias", "score.weight"];
    let mut found = unread(folder.path());
    found.sort();
    assert_eq!(found, expected);
}
