//! Helpers of these tests.

use candle_core::{DType, Device, Tensor};
use fp8_core::Granularity;
use fp8_files::load::{Checkpoint, StoredLayer};
use fp8_recipes::nn::InputScaling;
pub use fp8_test_support::bits;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub const CPU: Device = Device::Cpu;

pub fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// The folder of a family. Two folders are `ct_static_tensor` in other spellings, made on first use.
pub fn golden(family: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/families");
    let quantization = match family {
        "hf_per_tensor_static" => json!({
            "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": null,
            "modules_to_not_convert": ["lm_head"],
        }),
        "autofp8_static" => json!({
            "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
        }),
        _ => return path.join(family),
    };
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rewrite-{family}"));
    if !made.exists() {
        let staging = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        respell(&path.join("ct_static_tensor"), staging.path(), quantization);
        // Another test may have made it in the meantime.
        let _ = fs::rename(staging.keep(), &made);
    }
    made
}

/// Copies a model with scalar scales under the names of another family.
fn respell(from: &Path, to: &Path, quantization: Value) {
    let is_hf = quantization.get("weight_block_size").is_some();
    let tensors = candle_core::safetensors::load(from.join("model.safetensors"), &CPU).unwrap();
    let renamed = tensors.into_iter().map(|(name, tensor)| {
        let (path, own) = name.rsplit_once('.').unwrap();
        let own = match own {
            "weight_scale" if is_hf => "weight_scale_inv",
            "input_scale" if is_hf => "activation_scale",
            "weight_scale" | "input_scale" => own,
            _ => return (name, tensor),
        };
        (format!("{path}.{own}"), tensor.reshape(()).unwrap())
    });
    let renamed: HashMap<String, Tensor> = renamed.collect();
    candle_core::safetensors::save(&renamed, to.join("model.safetensors")).unwrap();
    let mut config = json_file(from.join("config.json"));
    config["quantization_config"] = quantization;
    fs::write(to.join("config.json"), config.to_string()).unwrap();
    fs::copy(
        from.join("expected.safetensors"),
        to.join("expected.safetensors"),
    )
    .unwrap();
}

pub fn open_golden(family: &str) -> Checkpoint {
    Checkpoint::open_dir(golden(family)).unwrap_or_else(|e| panic!("{family}: {e}"))
}

pub fn open(path: impl AsRef<Path>) -> Checkpoint {
    let path = path.as_ref();
    Checkpoint::open_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub fn json_file(path: impl AsRef<Path>) -> Value {
    let text = fs::read_to_string(path.as_ref()).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Names in a directory, sorted.
pub fn names_in(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Pseudorandom values around zero, fixed by the seed.
pub fn tensor(seed: u64, dims: &[usize]) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.
    };
    let len = dims.iter().product();
    let values: Vec<f32> = (0..len).map(|_| next()).collect();
    Tensor::from_vec(values, dims, &CPU).unwrap()
}

/// A small model in high precision: two layers, norms, an embedding, tied or not.
pub fn plain_model(path: &Path, (hidden, inner): (usize, usize), tied: bool, dtype: DType) {
    fs::create_dir_all(path).unwrap();
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    let mut add = |name: String, dims: &[usize]| {
        let value = tensor(tensors.len() as u64 + 1, dims);
        tensors.insert(name, value.to_dtype(dtype).unwrap());
    };
    add("model.embed_tokens.weight".into(), &[40, hidden]);
    for i in 0..2 {
        let at = format!("model.layers.{i}");
        add(format!("{at}.self_attn.q_proj.weight"), &[hidden, hidden]);
        add(format!("{at}.self_attn.q_proj.bias"), &[hidden]);
        add(format!("{at}.mlp.up_proj.weight"), &[inner, hidden]);
        add(format!("{at}.mlp.down_proj.weight"), &[hidden, inner]);
        add(format!("{at}.mlp.gate.weight"), &[4, hidden]);
        add(format!("{at}.input_layernorm.weight"), &[hidden]);
    }
    if !tied {
        add("lm_head.weight".into(), &[40, hidden]);
    }
    candle_core::safetensors::save(&tensors, path.join("model.safetensors")).unwrap();
    let config = json!({ "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": tied, "hidden_size": hidden });
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    fs::write(path.join("tokenizer.json"), "{}").unwrap();
    fs::write(path.join("README.md"), "no part of the model").unwrap();
}

/// Everything of a layer that a conversion must keep: codes, granularity, dequant_scale bits, input scaling.
#[derive(Debug, PartialEq)]
pub struct Facts {
    pub codes: Vec<u8>,
    pub granularity: Granularity,
    pub dequant_scale: Vec<u32>,
    pub input: String,
}

pub fn facts(layer: &StoredLayer) -> Facts {
    let codes = layer.codes.codes().flatten_all().unwrap();
    let input = match &layer.input {
        InputScaling::Static(scale) => format!("static {:?}", bits(scale)),
        other => format!("{other:?}"),
    };
    Facts {
        codes: codes.to_vec1().unwrap(),
        granularity: layer.codes.granularity(),
        dequant_scale: bits(layer.codes.dequant_scale()),
        input,
    }
}

/// All FP8 layers of a checkpoint.
pub fn all_facts(checkpoint: &Checkpoint) -> BTreeMap<String, Facts> {
    let layers = checkpoint.layer_paths().into_iter();
    layers
        .map(|path| {
            let layer = checkpoint.stored_layer(&path, &CPU).unwrap();
            (path, facts(&layer))
        })
        .collect()
}

/// All other tensors: dtype, shape, bits of the values.
pub fn others(checkpoint: &Checkpoint) -> BTreeMap<String, (String, Vec<usize>, Vec<u32>)> {
    let names = checkpoint.other_names().into_iter();
    names
        .map(|name| {
            let tensor = checkpoint.tensor(&name, &CPU).unwrap();
            let dtype = tensor.dtype().as_str().to_string();
            (name, (dtype, tensor.dims().to_vec(), bits(&tensor)))
        })
        .collect()
}
