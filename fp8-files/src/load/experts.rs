//! Splits tensors that hold all experts, as transformers 5 stores them, into one tensor per expert.
//!
//! | stored | shape | content |
//! |---|---|---|
//! | `..experts.gate_up_proj` | `[E, 2N, K]` | the gate of each expert, then its up projection |
//! | `..experts.down_proj` | `[E, K, N]` | the down projection |
//! | either, followed by `_scale`, `_scale_inv`, `_activation_scale` or `_input_scale` | `[E, ..]` | scales, also of experts with separate weights |
//!
//! Other models store tensors of these names transposed, so only those of a known `model_type` are split.

use crate::error::Result;
use crate::names::split;
use crate::safetensors_file::{Piece, SafetensorsFile};
use serde_json::Value;

/// Ends of stored names, and the names of those tensors in one expert's projection.
const ENDS: [(&str, &str); 5] = [
    ("", "weight"),
    ("_scale_inv", "weight_scale_inv"),
    ("_scale", "weight_scale"),
    ("_activation_scale", "activation_scale"),
    ("_input_scale", "input_scale"),
];

const GATE_UP: &str = "gate_up_proj";
const DOWN: &str = "down_proj";

/// Paths of experts in a layer, with the names of an expert's gate, up and down projection there.
const FOLDERS: [(&str, [&str; 3]); 2] = [
    (".mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
    (".block_sparse_moe.experts", ["w1", "w3", "w2"]),
];

/// Splits the experts in the `files` of the model that `config` describes.
pub(super) fn cut(files: &mut [&mut SafetensorsFile], config: Option<&Value>) -> Result<()> {
    let places = ["/model_type", "/text_config/model_type"];
    let kind = |place: &&str| config?.pointer(place)?.as_str();
    let mut kinds = places.iter().filter_map(kind);
    if !kinds.any(|kind| matches!(kind, "qwen3_moe" | "mixtral")) {
        return Ok(());
    }
    for file in files {
        for name in file.names() {
            if let Some(part) = part_of(&name) {
                let pieces = part.pieces(file, &name)?;
                file.cut(&name, pieces)?;
            }
        }
    }
    Ok(())
}

/// Whether a tensor of that stored name was split into gate and up projections.
pub(super) fn is_halved(name: &str) -> bool {
    part_of(name).is_some_and(|part| part.is_gate_up)
}

/// A stored tensor of all experts.
struct Part<'a> {
    /// Path of the experts.
    experts: &'a str,
    names: [&'static str; 3],
    is_gate_up: bool,
    /// The tensor's name in the projection of one expert.
    own: &'static str,
}

fn part_of(name: &str) -> Option<Part<'_>> {
    let (experts, own) = split(name);
    let mut folders = FOLDERS.iter();
    let (_, names) = folders.find(|(folder, _)| experts.ends_with(folder))?;
    let (is_gate_up, end) = match own.strip_prefix(GATE_UP) {
        Some(end) => (true, end),
        None => (false, own.strip_prefix(DOWN)?),
    };
    let (_, own) = ENDS.iter().find(|(stored, _)| *stored == end)?;
    Some(Part {
        experts,
        names: *names,
        is_gate_up,
        own,
    })
}

impl Part<'_> {
    fn pieces(&self, file: &SafetensorsFile, name: &str) -> Result<Vec<Piece>> {
        let shape = file.shape(name).unwrap_or_default();
        let wrong = |expected: &str| file.wrong_shape(name, expected);
        let (experts, rest) = match shape {
            [experts, rest @ ..] if self.own != "weight" || rest.len() == 2 => (*experts, rest),
            _ => return Err(wrong("[experts, features, inputs]")),
        };
        let [gate, up, down] = self.names;
        let size: usize = rest.iter().product();
        // All rows share a single scale; of several, the first half belongs to the gate.
        let halves = match (self.is_gate_up, rest) {
            (false, _) => vec![(down, 0, rest.to_vec())],
            (true, [] | [1, ..]) => vec![(gate, 0, rest.to_vec()), (up, 0, rest.to_vec())],
            (true, [rows, across @ ..]) if rows % 2 == 0 => {
                let half = [&[rows / 2], across].concat();
                vec![(gate, 0, half.clone()), (up, size / 2, half)]
            }
            _ => {
                return Err(wrong("as many rows for gates as for up projections"));
            }
        };
        let pieces = (0..experts).flat_map(|expert| {
            halves.iter().map(move |(projection, first, shape)| Piece {
                name: format!("{}.{expert}.{projection}.{}", self.experts, self.own),
                shape: shape.clone(),
                first: expert * size + first,
            })
        });
        Ok(pieces.collect())
    }
}
