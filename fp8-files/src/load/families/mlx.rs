//! MLX's `mxfp8`: four codes in a word, a power of two for every 32 of them.

use crate::error::{Error, Result};
use crate::load::at::At;
use crate::load::family::{Declared, Family};
use crate::load::family_name::FamilyName;
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::InputScheme;
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};
use std::collections::HashMap;

impl FamilyName {
    /// MLX: four codes in a word, microscaled.
    pub const MLX: Self = Self::new("mlx mxfp8");
}

pub(super) fn parse(at: &At<'_>, files: &[&SafetensorsFile]) -> Result<Family> {
    check(at)?;
    // Whether the layers that the configuration names are FP8.
    let mut layers = HashMap::new();
    for (name, entry) in at.entries()? {
        let quantized = match entry.value {
            Value::Bool(quantized) => *quantized,
            Value::Object(_) => {
                check(&entry)?;
                true
            }
            _ => continue,
        };
        layers.insert(name.to_string(), quantized);
    }
    for file in files {
        // Only MLX's integer formats have an offset beside the scales.
        if let Some(name) = file.names().find(|name| name.ends_with(".biases")) {
            return Err(Error::ForeignFormat {
                path: file.path().to_path_buf(),
                tensor: name,
                format: "an integer format of MLX".into(),
            });
        }
    }
    let declared = Declared::new(Granularity::Mx, InputScheme::None);
    let layer = move |path: &str| {
        let quantized = layers.get(path).copied().unwrap_or(true);
        Ok(quantized.then_some(declared))
    };
    Ok(Family {
        weight_scales: &["scales"],
        packs_words: true,
        ..Family::new(FamilyName::MLX, Some(at.path), layer)
    })
}

fn check(at: &At<'_>) -> Result<()> {
    at.get("mode").must_be(json!(["mxfp8"]))?;
    at.get("bits").must_be(json!([8]))?;
    at.get("group_size").must_be(json!([MX_BLOCK]))
}
