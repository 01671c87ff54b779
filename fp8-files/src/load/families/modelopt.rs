//! NVIDIA's ModelOpt: `hf_quant_config.json`, or the same in `config.json`.

use super::modules::Modules;
use crate::error::Result;
use crate::load::family::{At, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::Granularity;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(in crate::load) struct ModelOpt {
    path: PathBuf,
    layers: Layers,
    excluded: Modules,
}

#[derive(Debug)]
enum Layers {
    /// All that are not excluded.
    All(LayerScheme),
    /// Those that a list names.
    Listed(HashMap<String, LayerScheme>),
}

impl ModelOpt {
    pub(in crate::load) fn parse(at: &At<'_>) -> Result<Self> {
        // Old exports nest it, as the file of its own does.
        let nested = at.get("quantization");
        let at = if nested.is_null() { at } else { &nested };
        let cache = at.get("kv_cache_quant_algo");
        match cache.value.as_str().map(str::to_ascii_lowercase).as_deref() {
            None if cache.is_null() => {}
            Some("fp8" | "none" | "auto") => {}
            _ => return Err(cache.unsupported("null or FP8")),
        }
        let algo = at.get("quant_algo");
        let layers = if algo
            .value
            .as_str()
            .is_some_and(|name| name.eq_ignore_ascii_case("mixed_precision"))
        {
            let listed = at.get("quantized_layers");
            if !listed.value.is_object() {
                return Err(listed.unsupported("an object of layers"));
            }
            let mut layers = HashMap::new();
            for (path, layer) in listed.named_entries()? {
                let scheme = scheme(&layer.get("quant_algo"))?;
                layers.insert(path.to_string(), scheme);
            }
            Layers::Listed(layers)
        } else {
            Layers::All(scheme(&algo)?)
        };
        let mut excluded = Modules::default();
        for key in ["exclude_modules", "ignore"] {
            excluded.add_globs(&at.get(key))?;
        }
        Ok(Self {
            path: at.file(),
            layers,
            excluded,
        })
    }
}

/// What the name of an algorithm means; its case does not count.
fn scheme(algo: &At<'_>) -> Result<LayerScheme> {
    const EXPECTED: &str = "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8 or MIXED_PRECISION";
    let name = algo.text(EXPECTED)?.to_ascii_lowercase();
    Ok(match name.as_str() {
        "fp8" => LayerScheme::new(Granularity::Tensorwise, InputScheme::Static),
        "fp8_per_channel_per_token" => {
            LayerScheme::new(Granularity::Rowwise, InputScheme::PerToken)
        }
        "fp8_pb_wo" => {
            let (rows, cols) = (128, 128);
            LayerScheme::new(Granularity::Blockwise { rows, cols }, InputScheme::None)
        }
        "mxfp8" => LayerScheme::new(Granularity::Mx, InputScheme::Mx),
        _ => return Err(algo.unsupported(EXPECTED)),
    })
}

impl Family for ModelOpt {
    fn name(&self) -> FamilyName {
        FamilyName::ModelOpt
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        if self.excluded.name(path) {
            return Ok(None);
        }
        Ok(match &self.layers {
            Layers::All(scheme) => Some(*scheme),
            Layers::Listed(layers) => layers.get(path).copied(),
        })
    }

    fn weight_scale_names(&self) -> &'static [&'static str] {
        &["weight_scale", "weight_scale_inv"]
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
