//! ComfyUI's scaled FP8: a marker `scaled_fp8` with `scale_weight` beside each weight (old), or a description of each layer (new).

use crate::error::{Error, Result};
use crate::load::at::At;
use crate::load::family::{Declared, Family, ScaleLayout};
use crate::load::family_name::FamilyName;
use crate::names::{split, weight_name};
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::InputScheme;
use candle_core::{DType, Device};
use fp8_core::Granularity;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};

impl FamilyName {
    /// ComfyUI's scaled FP8.
    pub const COMFY_UI: Self = Self::new("ComfyUI scaled fp8");
}

/// Metadata entry of new files.
const METADATA: &str = "_quantization_metadata";
/// Tensor beside a layer in new files: the same JSON as bytes.
const DESCRIPTION: &str = "comfy_quant";
/// Tensor in old files.
const MARKER: &str = "scaled_fp8";
/// Longer than any description of a layer.
const MAX_DESCRIPTION: usize = 1 << 16;

/// Whether ComfyUI wrote any of the files.
pub(in crate::load) fn is_comfy(files: &[&SafetensorsFile]) -> bool {
    files.iter().any(|file| {
        let marks = [MARKER, DESCRIPTION, "scale_weight"];
        file.metadata(METADATA).is_some()
            || file.names().any(|name| marks.contains(&split(&name).1))
    })
}

/// What the files declare about their layers.
#[derive(Default)]
struct Comfy {
    /// Descriptions in new files, by paths that may lack their beginning; None where every weight with a scale is FP8.
    described: Option<HashMap<String, Layer>>,
    /// Old files may forbid products in FP8.
    full_precision: bool,
    /// Layers with a scale for their inputs.
    inputs: HashSet<String>,
    /// Layers whose blocks run along the rows only, with the width of a block.
    blocks: HashMap<String, usize>,
}

#[derive(Debug, Clone, Copy)]
struct Layer {
    is_mx: bool,
    full_precision: bool,
}

pub(in crate::load) fn parse(files: &[&SafetensorsFile]) -> Result<Family> {
    let mut comfy = Comfy::default();
    for file in files {
        if let Some(text) = file.metadata(METADATA) {
            let value = json_of(file, METADATA, text.as_bytes())?;
            let at = At::new(file.path(), METADATA, &value);
            let described = comfy.described.get_or_insert_default();
            for (path, layer) in at.get("layers").entries()? {
                described.insert(path.to_string(), Layer::parse(&layer)?);
            }
        }
        for name in file.names() {
            comfy.read(files, file, &name)?;
        }
    }
    let source = files.first().map(|file| file.path());
    let layer = move |path: &str| Ok(comfy.layer(path));
    Ok(Family {
        weight_scales: &["weight_scale", "scale_weight"],
        input_scales: &["input_scale", "scale_input"],
        descriptions: &[DESCRIPTION, MARKER],
        may_ignore_input_scales: true,
        ..Family::new(FamilyName::COMFY_UI, source, layer)
    })
}

impl Comfy {
    /// Evaluates one tensor.
    fn read(
        &mut self,
        files: &[&SafetensorsFile],
        file: &SafetensorsFile,
        name: &str,
    ) -> Result<()> {
        let (path, own) = split(name);
        let shape = file.shape(name).unwrap_or_default();
        let elements: usize = shape.iter().product();
        match own {
            DESCRIPTION if elements > MAX_DESCRIPTION => {
                let expected = format!("at most {MAX_DESCRIPTION} bytes");
                return Err(file.wrong_shape(name, expected));
            }
            DESCRIPTION => {
                let value = json_of(file, name, &file.bytes(name)?)?;
                let layer = Layer::parse(&At::new(file.path(), name, &value))?;
                let described = self.described.get_or_insert_default();
                described.insert(path.to_string(), layer);
            }
            MARKER if file.dtype(name) == Some(Dtype::F8_E5M2) => {
                return Err(file.wrong_dtype(name, "F8_E4M3, the format of the weights"));
            }
            MARKER => self.full_precision |= elements == 2,
            "scale_input" | "input_scale" if has_scale(file, name)? => {
                self.inputs.insert(path.to_string());
            }
            "scale_weight" | "weight_scale" => {
                let weight = weight_name(path);
                let weight = files.iter().find_map(|file| file.shape(&weight));
                if let ([n, blocks, 1], Some(&[rows, k])) = (shape, weight)
                    && *n == rows
                    && *blocks > 0
                    && k.is_multiple_of(*blocks)
                {
                    self.blocks.insert(path.to_string(), (k / blocks).max(1));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The description of a layer, whose path may have lost its beginning.
    fn description(&self, path: &str) -> Option<Layer> {
        let Some(described) = &self.described else {
            return Some(Layer {
                is_mx: false,
                full_precision: self.full_precision,
            });
        };
        let mut path = path;
        loop {
            if let Some(layer) = described.get(path) {
                return Some(*layer);
            }
            path = path.split_once('.')?.1;
        }
    }

    fn layer(&self, path: &str) -> Option<Declared> {
        let layer = self.description(path)?;
        let input = match (layer.full_precision, layer.is_mx) {
            (true, _) => InputScheme::None,
            (false, true) => InputScheme::DynamicMx,
            (false, false) if self.inputs.contains(path) => InputScheme::Static(()),
            // With a scale of 1 inputs would be clipped at 448.
            (false, false) => InputScheme::None,
        };
        if layer.is_mx {
            return Some(Declared {
                layout: ScaleLayout::Tiles,
                ..Declared::new(Granularity::Mx, input)
            });
        }
        let blocks = self.blocks.get(path);
        let blocks = blocks.map(|&cols| Granularity::Blockwise { rows: 1, cols });
        Some(Declared::new(blocks, input))
    }
}

impl Layer {
    fn parse(at: &At<'_>) -> Result<Self> {
        let format = at.get("format");
        format.must_be(json!(["float8_e4m3fn", "mxfp8"]))?;
        let full = at.get("full_precision_matrix_mult");
        full.must_be(json!([null, false, true]))?;
        Ok(Self {
            is_mx: format.value == "mxfp8",
            full_precision: full.value == &json!(true),
        })
    }
}

fn json_of(file: &SafetensorsFile, name: &str, json: &[u8]) -> Result<Value> {
    let what = "ComfyUI's description of a layer";
    serde_json::from_slice(json)
        .map_err(|error| Error::json(file.path(), what, format!("`{name}`: {error}")))
}

/// Whether a scale of inputs differs from 1, which means no scale.
fn has_scale(file: &SafetensorsFile, name: &str) -> Result<bool> {
    let dtype = file.dtype(name);
    let is_number = matches!(dtype, Some(Dtype::F32 | Dtype::BF16 | Dtype::F16));
    let shape = file.shape(name).unwrap_or_default();
    if !is_number || shape.iter().product::<usize>() != 1 {
        // The checks of all families reject it.
        return Ok(true);
    }
    let scale = file.tensor(name, &Device::Cpu)?.to_dtype(DType::F32)?;
    Ok(scale.flatten_all()?.to_vec1::<f32>()? != [1.])
}
