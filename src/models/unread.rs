//! Tensors in a model's files that the model does not read.

use crate::models::families::Config;
use fp8_files::load::LoadedNames;
use std::collections::BTreeSet;

/// Ends of names that models compute, or read elsewhere: tables of positions, masks, and scales of caches.
const COMPUTED: [&str; 5] = [
    ".inv_freq",
    ".position_ids",
    ".masked_bias",
    ".attn.bias",
    "_scale",
];

/// Parts of a model for images or sound, around the language model that is read.
const OTHER_PARTS: [&str; 11] = [
    "vision_encoder",
    "vision_language_adapter",
    "vision_model",
    "vision_tower",
    "visual",
    "patch_merger",
    "pre_mm_projector_norm",
    "multi_modal_projector",
    "audio_tower",
    "embed_audio",
    "embed_vision",
];

/// Parts of a BERT that do not change its embeddings.
const OF_BERT: [&str; 3] = ["pooler.", "bert.pooler.", "cls."];

/// Those of `names` that a model has not loaded, although a model of another configuration or class would. Layers behind the last one, which
/// predict further tokens, parts for images and sound, and the head of a model whose embedding is its head are not among them.
pub(super) fn unread(names: Vec<String>, loaded: &LoadedNames, config: &Config) -> Vec<String> {
    let read: BTreeSet<String> = loaded.names().into_iter().collect();
    let known = |name: &str| match config {
        Config::Llama(config) => {
            let head = matches!(name, "lm_head.weight" | "output.weight");
            let other = name.split('.').any(|part| OTHER_PARTS.contains(&part));
            head && config.tie_word_embeddings || other || is_behind(name, config.num_layers)
        }
        Config::Bert(_) => OF_BERT.iter().any(|part| name.starts_with(part)),
    };
    let computed = |name: &str| COMPUTED.iter().any(|end| name.ends_with(end));
    let unread = |name: &String| !read.contains(name) && !computed(name) && !known(name);
    names.into_iter().filter(unread).collect()
}

/// Whether a tensor is of a layer behind the first `layers`.
fn is_behind(name: &str, layers: usize) -> bool {
    let rest = name.split_once("layers.").map(|(_, rest)| rest);
    let number = rest.and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    number.is_some_and(|number| number >= layers)
}
