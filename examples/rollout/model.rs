//! A small language model with random weights, as a folder in high precision or in FP8.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::load::Checkpoint;
use fp8::models::{CausalLm, Llama, LlamaConfig, Model, ModelOptions, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme};
use serde_json::json;
use std::path::Path;

/// Tokens of a sequence at most.
pub const POSITIONS: usize = 1024;

/// Writes the model into `dir`.
pub fn write(dir: &Path) -> Result<()> {
    let config = json!({
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false, "torch_dtype": "float32",
    });
    std::fs::write(dir.join("config.json"), config.to_string())?;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    Llama::new(&LlamaConfig::parse("config.json", &config)?, vb)?;
    vars.save(dir.join("model.safetensors"))?;
    Ok(())
}

/// Writes the model of `source` into `target` with these codes. Static scales are those of a text of random tokens.
pub fn quantize(source: &Path, target: &Path, scheme: Scheme) -> Result<()> {
    let mut options = QuantizeOptions::new(scheme);
    if scheme.needs_calibration() {
        let model = opened(source)?;
        let ids = (0..512u32).map(|i| i * i * 31 % model.vocab_size() as u32);
        let ids = Tensor::from_iter(ids, &Device::Cpu)?.reshape((1, 512))?;
        let run = || {
            model.forward(&ids).map_err(candle_core::Error::wrap)?;
            Ok(())
        };
        options = options.with_input_amaxes(rewrite::input_amaxes(&model, run)?);
    }
    let source = Checkpoint::open_dir(source)?;
    rewrite::quantize(&source, target, &options, &mut rewrite::quiet)?;
    Ok(())
}

/// The language model in `dir`.
pub fn opened(dir: &Path) -> Result<Llama> {
    match open(dir, &ModelOptions::new())? {
        Model::Llama(model) => Ok(model),
        _ => bail!("{} holds no language model", dir.display()),
    }
}
