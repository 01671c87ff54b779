//! Mistral's own files, made of a golden folder: the same logits to the bit, whatever stands beside them.

use super::{Result, expected, folder, model};
use candle_core::Tensor;
use fp8::load::Checkpoint;
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};
use std::path::Path;

const GOLDEN: &str = "hf_per_tensor_static";
/// Features of a head.
const HEAD: usize = 32;

/// Mistral's name for one of transformers.
fn native(name: &str) -> String {
    let parts = [
        ("model.embed_tokens", "tok_embeddings"),
        ("model.layers", "layers"),
        ("model.norm", "norm"),
        ("lm_head", "output"),
        ("self_attn.q_proj", "attention.wq"),
        ("self_attn.k_proj", "attention.wk"),
        ("self_attn.v_proj", "attention.wv"),
        ("self_attn.o_proj", "attention.wo"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("weight_scale_inv", "qscale_weight"),
        ("activation_scale", "qscale_act"),
    ];
    parts
        .iter()
        .fold(name.to_string(), |name, (from, to)| name.replace(from, to))
}

/// Rows whose two halves of a rotation follow each other, to rows in which they alternate.
fn alternating(rows: usize, bytes: &[u8]) -> Vec<u8> {
    let width = bytes.len() / rows;
    let from = |row: usize| row / HEAD * HEAD + row % 2 * (HEAD / 2) + row % HEAD / 2;
    let rows = (0..rows).flat_map(|row| bytes[from(row) * width..][..width].to_vec());
    rows.collect()
}

fn params() -> Value {
    json!({ "dim": 192, "n_layers": 2, "head_dim": HEAD, "hidden_dim": 320, "n_heads": 6, "n_kv_heads": 2,
        "norm_eps": 1e-6, "vocab_size": 128, "rope_theta": 10000.0, "max_seq_len": 64,
        "quantization": { "qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR" } })
}

/// Writes the tensors in so many files, with an index if they are several; names by `rename`.
fn write(dir: &Path, files: usize, rename: fn(&str) -> String) -> Result<()> {
    let bytes = std::fs::read(folder(GOLDEN).join("model.safetensors"))?;
    let golden = SafeTensors::deserialize(&bytes)?;
    let mut tensors = vec![];
    for (name, view) in golden.iter() {
        let is_rotated = rename(name) != name
            && ["q_proj.weight", "k_proj.weight"]
                .iter()
                .any(|end| name.ends_with(end));
        let data = match is_rotated {
            true => alternating(view.shape()[0], view.data()),
            false => view.data().to_vec(),
        };
        tensors.push((rename(name), view.dtype(), view.shape().to_vec(), data));
    }
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let mut map = serde_json::Map::new();
    for (at, part) in tensors.chunks(tensors.len().div_ceil(files)).enumerate() {
        let file = match files {
            1 => "consolidated.safetensors".to_string(),
            _ => format!("consolidated-{:05}-of-{files:05}.safetensors", at + 1),
        };
        let views = part
            .iter()
            .map(|(name, dtype, shape, data)| {
                Ok((name, TensorView::new(*dtype, shape.clone(), data)?))
            })
            .collect::<Result<Vec<_>>>()?;
        std::fs::write(dir.join(&file), safetensors::serialize(views, None)?)?;
        map.extend(part.iter().map(|(name, ..)| (name.clone(), json!(file))));
    }
    if files > 1 {
        let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
        let path = dir.join("consolidated.safetensors.index.json");
        std::fs::write(path, index.to_string())?;
    }
    Ok(())
}

/// The golden's `config.json`, with its quantization or without.
fn config(quantization: bool) -> Result<Value> {
    let text = std::fs::read_to_string(folder(GOLDEN).join("config.json"))?;
    let mut config: Value = serde_json::from_str(&text)?;
    if !quantization {
        config["quantization_config"] = Value::Null;
    }
    Ok(config)
}

/// Description, names of tensors, `params.json` and `config.json`.
type Case = (
    &'static str,
    fn(&str) -> String,
    Option<Value>,
    Option<Value>,
);

#[test]
fn consolidated_files_beside_any_configuration() -> Result<()> {
    let golden = folder(GOLDEN);
    let ids = expected(&golden, "input_ids")?;
    let logits = |dir: &Path| -> Result<Vec<f32>> {
        let logits: Tensor = model(dir)?.forward(&ids)?;
        Ok(logits.flatten_all()?.to_vec1()?)
    };
    let same = logits(&golden)?;
    let own = |name: &str| name.to_string();
    let cases: [Case; 7] = [
        ("params.json", native, Some(params()), None),
        ("both", native, Some(params()), Some(config(false)?)),
        (
            "both, quantized",
            native,
            Some(params()),
            Some(config(true)?),
        ),
        ("config.json", native, None, Some(config(false)?)),
        ("config.json, quantized", native, None, Some(config(true)?)),
        ("names of transformers", own, None, Some(config(true)?)),
        (
            "names of transformers, both",
            own,
            Some(params()),
            Some(config(true)?),
        ),
    ];
    for (case, rename, params, config) in cases {
        for files in [1, 3] {
            let dir = tempfile::tempdir()?;
            write(dir.path(), files, rename)?;
            for (name, json) in [("params.json", &params), ("config.json", &config)] {
                if let Some(json) = json {
                    std::fs::write(dir.path().join(name), json.to_string())?;
                }
            }
            let got = logits(dir.path());
            let got = got.map_err(|error| error.context(format!("{case}, {files} files")))?;
            assert!(got == same, "{case}, {files} files");
        }
    }
    Ok(())
}

/// Where a directory has two sets of files, the one that `config.json` names is read.
#[test]
fn files_for_transformers_count_beside_consolidated_ones() -> Result<()> {
    let dir = tempfile::tempdir()?;
    write(dir.path(), 1, native)?;
    std::fs::write(dir.path().join("params.json"), params().to_string())?;
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(folder(GOLDEN).join(name), dir.path().join(name))?;
    }
    let checkpoint = Checkpoint::open_dir(dir.path())?;
    assert!(checkpoint.names().contains(&"lm_head.weight"));
    Ok(())
}

#[test]
fn a_folder_without_sizes_says_which_entry_it_needs() -> Result<()> {
    let dir = tempfile::tempdir()?;
    write(dir.path(), 1, native)?;
    let mut params = params();
    params["hidden_dim"] = Value::Null;
    std::fs::write(dir.path().join("params.json"), params.to_string())?;
    let text = model(dir.path()).unwrap_err().to_string();
    assert!(
        text.contains("params.json: hidden_dim is missing"),
        "{text}"
    );
    Ok(())
}
