//! The entries of a file that say what the model is.

use super::described::Described;
use super::keys::Keys;
use super::names::Architecture;
use super::options::GgufOptions;
use super::rope;
use crate::models::error::Result;
use crate::models::families::{
    BertActivation, BertConfig, Config, LlamaConfig, MoeConfig, Pooling,
};
use candle_core::quantized::gguf_file::Value;

/// The version of the block formats.
const QUANTIZATION_VERSION: u32 = 2;

/// All entries except those of the tokenizer.
pub(super) fn entries(
    model: &Described<'_>,
    options: &GgufOptions,
) -> Result<Vec<(String, Value)>> {
    let architecture = model.architecture.name();
    let text = |text: &str| Value::String(text.to_string());
    let own = |key: &str, value| (key.to_string(), value);
    let mut entries = vec![
        own("general.architecture", text(architecture)),
        own("general.type", text("model")),
    ];
    let directory = model.source.directory();
    let directory = directory.and_then(|path| path.canonicalize().ok());
    let folder = directory
        .as_ref()
        .and_then(|path| path.file_name()?.to_str());
    if let Some(name) = options.name.as_deref().or(folder) {
        entries.push(own("general.name", text(name)));
    }
    let mut keys = Keys {
        architecture,
        entries,
    };
    match &model.parsed {
        Config::Llama(config) => llama(model, config, &mut keys)?,
        Config::Bert(config) => bert(model, config, &mut keys)?,
    }
    let mut entries = keys.entries;
    let (_, file_type) = options.tensor_type.entry();
    entries.push(own("general.file_type", Value::U32(file_type)));
    let version = Value::U32(QUANTIZATION_VERSION);
    entries.push(own("general.quantization_version", version));
    Ok(entries)
}

fn llama(model: &Described<'_>, config: &LlamaConfig, keys: &mut Keys) -> Result<()> {
    keys.count("vocab_size", config.vocab_size);
    keys.count("block_count", config.num_layers);
    keys.count("context_length", config.max_position_embeddings);
    keys.count("embedding_length", config.hidden_size);
    keys.count("feed_forward_length", config.intermediate_size);
    keys.count("attention.head_count", config.num_heads);
    keys.count("attention.head_count_kv", config.num_kv_heads);
    keys.count("attention.key_length", config.head_dim);
    keys.count("attention.value_length", config.head_dim);
    keys.float("attention.layer_norm_rms_epsilon", config.rms_norm_eps);
    let whole = config.rope.dim == config.head_dim;
    if !whole && model.architecture != Architecture::Phi3 {
        let value = format!("{} of {} features", config.rope.dim, config.head_dim);
        return Err(model.unsupported("partial_rotary_factor", value, "all features of a head"));
    }
    rope::entries(model, &config.rope, keys)?;
    if let Some(window) = window(model, config)? {
        keys.count("attention.sliding_window", window);
    }
    match &config.moe {
        Some(moe) => experts(model, moe, keys),
        None => Ok(()),
    }
}

/// The window that all layers have.
fn window(model: &Described<'_>, config: &LlamaConfig) -> Result<Option<usize>> {
    let windows = &config.sliding_windows;
    let first = windows.first().copied().flatten();
    let one = windows.iter().all(|window| *window == first);
    let has_window = matches!(model.architecture, Architecture::Llama | Architecture::Phi3);
    match first {
        None if one => Ok(None),
        Some(_) if one && has_window => Ok(first),
        _ => {
            let some = windows.iter().flatten().next();
            let value = format!("{} in some layers", some.copied().unwrap_or_default());
            Err(model.unsupported("sliding_window", value, "none, or in Mistral and Phi-3 one"))
        }
    }
}

fn experts(model: &Described<'_>, moe: &MoeConfig, keys: &mut Keys) -> Result<()> {
    if !moe.normalize {
        return Err(model.unsupported("norm_topk_prob", "false", "true"));
    }
    if let Some(layer) = moe.dense_layers.first() {
        let value = format!("layer {layer}, among others");
        return Err(model.unsupported("mlp_only_layers", value, "no layer without experts"));
    }
    keys.count("expert_count", moe.num_experts);
    keys.count("expert_used_count", moe.experts_per_token);
    if model.architecture == Architecture::Qwen3Moe {
        keys.count("expert_feed_forward_length", moe.intermediate_size);
    }
    Ok(())
}

fn bert(model: &Described<'_>, config: &BertConfig, keys: &mut Keys) -> Result<()> {
    if config.activation == BertActivation::Relu {
        return Err(model.unsupported("hidden_act", "relu", "gelu"));
    }
    keys.count("vocab_size", config.vocab_size);
    keys.count("block_count", config.num_layers);
    keys.count("context_length", config.max_position_embeddings);
    keys.count("embedding_length", config.hidden_size);
    keys.count("feed_forward_length", config.intermediate_size);
    keys.count("attention.head_count", config.num_heads);
    keys.float("attention.layer_norm_epsilon", config.layer_norm_eps);
    keys.set("attention.causal", Value::Bool(false));
    let pooling = match model.source.directory() {
        Some(directory) => Pooling::of_dir(directory)?,
        None => Pooling::default(),
    };
    let pooling = match pooling {
        Pooling::Mean => 1,
        Pooling::FirstToken => 2,
    };
    keys.set("pooling_type", Value::U32(pooling));
    let kinds = Value::U32(u32::try_from(config.type_vocab_size).unwrap_or(u32::MAX));
    let key = "tokenizer.ggml.token_type_count".to_string();
    keys.entries.push((key, kinds));
    Ok(())
}
