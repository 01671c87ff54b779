//! The tensors of the file, before any of them is read.

use super::described::Described;
use super::names::{Architecture, Target, target};
use super::options::GgufType;
use super::rope;
use crate::models::error::Result;
use crate::models::families::Config;
use std::collections::BTreeMap;

/// Elements of a block of Q8_0, and its bytes.
pub(super) const BLOCK: usize = 32;
pub(super) const BLOCK_BYTES: usize = 34;

/// A tensor that will be written.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) name: String,
    pub(super) stored: GgufType,
    /// Outermost first.
    pub(super) dims: Vec<usize>,
    pub(super) content: Content,
    /// Whether its rows do not divide into the blocks that were asked for.
    pub(super) fell_back: bool,
}

#[derive(Debug)]
pub(super) enum Content {
    /// Tensors of the source, one after the other.
    Parts {
        names: Vec<String>,
        /// The heads whose rows are reordered.
        heads: Option<usize>,
    },
    /// Values that follow from the configuration.
    Values(Vec<f32>),
}

impl Planned {
    pub(super) fn bytes(&self) -> u64 {
        let elements: usize = self.dims.iter().product();
        let bytes = match self.stored {
            GgufType::F32 => elements * 4,
            GgufType::F16 | GgufType::BF16 => elements * 2,
            GgufType::Q8_0 => elements / BLOCK * BLOCK_BYTES,
        };
        bytes as u64
    }
}

/// Tensors that are always f32, as in llama.cpp; so are those of one dimension.
fn is_f32(name: &str) -> bool {
    let tables = [
        "ffn_gate_inp.weight",
        "position_embd.weight",
        "token_types.weight",
    ];
    name.ends_with("_norm.weight") || tables.iter().any(|end| name.ends_with(end))
}

/// All tensors, in the order of the model.
pub(super) fn plan(model: &Described<'_>, tensor_type: GgufType) -> Result<Vec<Planned>> {
    let source = model.source;
    let mut parts: BTreeMap<String, BTreeMap<usize, String>> = BTreeMap::new();
    let mut experts = vec![];
    for name in source.names() {
        let (stored, part) = match target(model.architecture, &name) {
            Some(Target::Tensor(stored)) => (stored, 0),
            Some(Target::Expert(stored, expert)) => {
                experts.push(stored.clone());
                (stored, expert)
            }
            Some(Target::Nowhere) => continue,
            None => return Err(model.unknown(&name)),
        };
        let entry = parts.entry(stored).or_default();
        if entry.contains_key(&part) {
            return Err(model.unknown(&name));
        }
        entry.insert(part, name);
    }
    let mut tensors = vec![];
    for (name, parts) in parts {
        let names: Vec<String> = parts.into_values().collect();
        let shape = |name: &String| source.shape(name).unwrap_or_default();
        let mut dims = shape(&names[0]);
        if let Some(other) = names.iter().find(|name| shape(name) != dims) {
            return Err(model.unknown(other));
        }
        if experts.contains(&name) {
            let count = expert_count(model);
            if count != names.len() {
                let value = format!("{count}, and `{name}` is made of {} experts", names.len());
                return Err(model.unsupported("num_local_experts", value, "one tensor for each"));
            }
            dims.insert(0, names.len());
        }
        let heads = heads(model, &name);
        if let Some(heads) = heads
            && !dims[0].is_multiple_of(2 * heads)
        {
            let value = format!("{heads}, and `{name}` has {} rows", dims[0]);
            return Err(model.unsupported("num_attention_heads", value, "heads of an even size"));
        }
        let wanted = match dims.len() <= 1 || is_f32(&name) {
            true => GgufType::F32,
            false => tensor_type,
        };
        let whole = dims.last().is_some_and(|row| row.is_multiple_of(BLOCK));
        let fell_back = wanted == GgufType::Q8_0 && !whole;
        tensors.push(Planned {
            stored: if fell_back { GgufType::F16 } else { wanted },
            content: Content::Parts { names, heads },
            name,
            dims,
            fell_back,
        });
    }
    if let Config::Llama(config) = &model.parsed {
        for (name, values) in rope::tables(model, &config.rope)? {
            tensors.push(Planned {
                name: name.to_string(),
                stored: GgufType::F32,
                dims: vec![values.len()],
                content: Content::Values(values),
                fell_back: false,
            });
        }
    }
    tensors.sort_by_cached_key(|tensor| order(&tensor.name));
    Ok(tensors)
}

/// The embeddings, the layers by number, the head.
fn order(name: &str) -> (usize, String) {
    let block = name.strip_prefix("blk.").and_then(|rest| {
        let (layer, _) = rest.split_once('.')?;
        layer.parse::<usize>().ok()
    });
    let place = match block {
        Some(layer) => layer.saturating_add(1),
        None if name.starts_with("output") => usize::MAX,
        None => 0,
    };
    (place, name.to_string())
}

fn expert_count(model: &Described<'_>) -> usize {
    match &model.parsed {
        Config::Llama(config) => config.moe.as_ref().map_or(0, |moe| moe.num_experts),
        Config::Bert(_) => 0,
    }
}

/// Llama's files store queries and keys for rotary positions over neighbouring elements; transformers rotates the halves of a head.
fn heads(model: &Described<'_>, name: &str) -> Option<usize> {
    let Config::Llama(config) = &model.parsed else {
        return None;
    };
    if model.architecture != Architecture::Llama {
        return None;
    }
    match name {
        _ if name.contains(".attn_q.") => Some(config.num_heads),
        _ if name.contains(".attn_k.") => Some(config.num_kv_heads),
        _ => None,
    }
}
