//! Splits tensors that hold all experts, as transformers 5 stores them, into one tensor per expert.
//!
//! | stored | shape | content |
//! |---|---|---|
//! | `..experts.gate_up_proj` | `[E, 2N, K]` | the gate of each expert, then its up projection |
//! | `..experts.down_proj` | `[E, K, N]` | the down projection |
//! | either, followed by `_scale`, `_scale_inv`, `_activation_scale` or `_input_scale` | `[E, ..]` | scales, also of experts with separate weights |
//!
//! gpt-oss in MXFP4 has its own names, and the rows of gate and up projection alternate:
//!
//! | stored | shape | content |
//! |---|---|---|
//! | `..experts.gate_up_proj_blocks` | `[E, 2N, K / 32, 16]` | codes, two in a byte; row 0 belongs to the gate, row 1 to the up projection, and so on |
//! | `..experts.down_proj_blocks` | `[E, K, N / 32, 16]` | codes |
//! | `.._scales`, `.._bias` | `[E, rows, groups]`, `[E, rows]` | scales and biases |
//!
//! Other models store tensors of these names transposed, so only those of a known `model_type` are split.

use crate::error::Result;
use crate::names::split;
use crate::safetensors_file::{Piece, SafetensorsFile};
use serde_json::Value;

/// The rows of gate and up projection in a tensor of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GateUp {
    /// First all rows of the gate.
    Halves,
    /// In turn.
    InTurn,
}

/// Ends of stored names, the names of those tensors in one expert's projection, and the order of rows.
const ENDS: [(&str, &str, GateUp); 8] = [
    ("", "weight", GateUp::Halves),
    ("_scale_inv", "weight_scale_inv", GateUp::Halves),
    ("_scale", "weight_scale", GateUp::Halves),
    ("_activation_scale", "activation_scale", GateUp::Halves),
    ("_input_scale", "input_scale", GateUp::Halves),
    ("_blocks", "weight", GateUp::InTurn),
    ("_scales", "weight_scale", GateUp::InTurn),
    ("_bias", "bias", GateUp::InTurn),
];

/// Models whose experts are split, with the order of rows in their files.
const MODELS: [(&str, GateUp); 7] = [
    ("qwen3_moe", GateUp::Halves),
    ("mixtral", GateUp::Halves),
    ("deepseek_v2", GateUp::Halves),
    ("deepseek_v3", GateUp::Halves),
    ("deepseek_v4", GateUp::Halves),
    ("mistral4", GateUp::Halves),
    ("gpt_oss", GateUp::InTurn),
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
    let kinds: Vec<&str> = places.iter().filter_map(kind).collect();
    let mut models = MODELS.iter();
    let Some((_, order)) = models.find(|(model, _)| kinds.contains(model)) else {
        return Ok(());
    };
    for file in files {
        for name in file.names() {
            if let Some(part) = part_of(&name).filter(|part| part.order == *order) {
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
    order: GateUp,
}

fn part_of(name: &str) -> Option<Part<'_>> {
    let (experts, own) = split(name);
    let mut folders = FOLDERS.iter();
    let (_, names) = folders.find(|(folder, _)| experts.ends_with(folder))?;
    let (is_gate_up, end) = match own.strip_prefix(GATE_UP) {
        Some(end) => (true, end),
        None => (false, own.strip_prefix(DOWN)?),
    };
    let (_, own, order) = ENDS.iter().find(|(stored, ..)| *stored == end)?;
    Some(Part {
        experts,
        names: *names,
        is_gate_up,
        own,
        order: *order,
    })
}

impl Part<'_> {
    fn pieces(&self, file: &SafetensorsFile, name: &str) -> Result<Vec<Piece>> {
        let shape = file.shape(name).unwrap_or_default();
        let wrong = |expected: &str| file.wrong_shape(name, expected);
        let (experts, rest) = match (self.order, self.own, shape) {
            (GateUp::InTurn, "weight", [experts, rows, groups, bytes]) => {
                (*experts, vec![*rows, groups.saturating_mul(*bytes)])
            }
            (GateUp::InTurn, "weight", _) => {
                return Err(wrong("[experts, features, groups, bytes of a group]"));
            }
            (GateUp::Halves, "weight", [_, _, _]) => (shape[0], shape[1..].to_vec()),
            (_, own, [experts, rest @ ..]) if own != "weight" => (*experts, rest.to_vec()),
            _ => return Err(wrong("[experts, features, inputs]")),
        };
        let [gate, up, down] = self.names;
        let size: usize = rest.iter().product();
        // Without elements there may be any number of experts.
        if size == 0 {
            return Err(wrong("elements for each expert"));
        }
        // Shape, first element, and step from row to row of each projection.
        let parts = match (self.is_gate_up, rest.as_slice(), self.order) {
            (false, ..) => vec![(down, rest, 0, 1)],
            // All rows share a single scale.
            (true, [] | [1, ..], _) => vec![(gate, rest.clone(), 0, 1), (up, rest, 0, 1)],
            (true, [rows, across @ ..], order) if rows % 2 == 0 => {
                let half = [&[rows / 2], across].concat();
                let (second, step) = match order {
                    GateUp::Halves => (size / 2, 1),
                    GateUp::InTurn => (across.iter().product(), 2),
                };
                vec![(gate, half.clone(), 0, step), (up, half, second, step)]
            }
            _ => {
                return Err(wrong("as many rows for gates as for up projections"));
            }
        };
        let pieces = (0..experts).flat_map(|expert| {
            parts
                .iter()
                .map(move |(projection, shape, first, step)| Piece {
                    name: format!("{}.{expert}.{projection}.{}", self.experts, self.own),
                    shape: shape.clone(),
                    first: expert * size + first,
                    step: *step,
                })
        });
        Ok(pieces.collect())
    }
}
