//! Experts that lie in one tensor, as transformers 5 keeps them: shown under the names that each has by itself.
//!
//! | stored | shape | what it is |
//! |---|---|---|
//! | `..experts.gate_up_proj` | `[E, 2N, K]` | the gate of each expert, then its other projection |
//! | `..experts.down_proj` | `[E, K, N]` | the projection back |
//! | either, with `_scale`, `_scale_inv`, `_activation_scale` or `_input_scale` at its end | `[E, ..]` | scales, also beside experts that are apart |
//!
//! Other models keep tensors of these names transposed, so only those of a known `model_type` are cut.

use crate::error::{Error, Result};
use crate::names::split;
use crate::safetensors_file::{Piece, SafetensorsFile};
use serde_json::Value;

/// Ends of stored names, and what a tensor of that end is called beside an expert's `weight`.
const ENDS: [(&str, &str); 5] = [
    ("", "weight"),
    ("_scale_inv", "weight_scale_inv"),
    ("_scale", "weight_scale"),
    ("_activation_scale", "activation_scale"),
    ("_input_scale", "input_scale"),
];

const GATE_UP: &str = "gate_up_proj";
const DOWN: &str = "down_proj";

/// Folders of experts in a layer, with what an expert's gate, its other projection to the inside and the one back are called there.
const FOLDERS: [(&str, [&str; 3]); 2] = [
    (".mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
    (".block_sparse_moe.experts", ["w1", "w3", "w2"]),
];

/// Cuts the experts of `files`, which are those of the model that `config` describes.
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

/// Whether a tensor of that stored name was cut into gates and what they belong to.
pub(super) fn is_halved(name: &str) -> bool {
    part_of(name).is_some_and(|part| part.is_gate_up)
}

/// What a stored tensor of all experts is.
struct Part<'a> {
    /// Path of the experts.
    experts: &'a str,
    names: [&'static str; 3],
    is_gate_up: bool,
    /// What it is called beside one expert.
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
        let wrong = |expected: &str| Error::TensorShape {
            tensor: name.to_string(),
            got: shape.to_vec(),
            expected: format!("{expected}, in {}", file.path().display()),
        };
        let (experts, rest) = match shape {
            [experts, rest @ ..] if self.own != "weight" || rest.len() == 2 => (*experts, rest),
            _ => return Err(wrong("[experts, features, inputs]")),
        };
        let [gate, up, down] = self.names;
        let size: usize = rest.iter().product();
        // One row is a scale that all share, more are those of the gate and then the others.
        let halves = match (self.is_gate_up, rest) {
            (false, _) => vec![(down, 0, rest.to_vec())],
            (true, [] | [1, ..]) => vec![(gate, 0, rest.to_vec()), (up, 0, rest.to_vec())],
            (true, [rows, across @ ..]) if rows % 2 == 0 => {
                let half = [&[rows / 2], across].concat();
                vec![(gate, 0, half.clone()), (up, size / 2, half)]
            }
            _ => {
                return Err(wrong(
                    "as many rows for gates as for what they are multiplied with",
                ));
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
