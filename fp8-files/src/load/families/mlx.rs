//! MLX's `mxfp8`: four codes in a word, a power of two for every 32 of them.

use crate::error::{Error, Result};
use crate::load::family::{At, Family};
use crate::load::family_name::FamilyName;
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::{Granularity, MX_BLOCK};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(in crate::load) struct Mlx {
    path: PathBuf,
    /// Layers of which the configuration speaks: whether they are FP8.
    layers: HashMap<String, bool>,
}

impl Mlx {
    pub(in crate::load) fn parse(at: &At<'_>, files: &[&SafetensorsFile]) -> Result<Self> {
        check(at)?;
        let mut layers = HashMap::new();
        for (name, entry) in at.named_entries()? {
            match entry.value {
                Value::Bool(quantized) => {
                    layers.insert(name.to_string(), *quantized);
                }
                Value::Object(_) => {
                    check(&entry)?;
                    layers.insert(name.to_string(), true);
                }
                _ => {}
            }
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
        let path = at.file();
        Ok(Self { path, layers })
    }
}

fn check(at: &At<'_>) -> Result<()> {
    at.get("mode").must_be(&[json!("mxfp8")])?;
    at.get("bits").must_be(&[json!(8)])?;
    at.get("group_size").must_be(&[json!(MX_BLOCK)])
}

impl Family for Mlx {
    fn name(&self) -> FamilyName {
        FamilyName::Mlx
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        let scheme = LayerScheme::new(Granularity::Mx, InputScheme::None);
        let quantized = self.layers.get(path).copied().unwrap_or(true);
        Ok(quantized.then_some(scheme))
    }

    fn weight_scale_names(&self) -> &'static [&'static str] {
        &["scales"]
    }

    fn packs_words(&self) -> bool {
        true
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
