//! ComfyUI's scaled FP8: a marker `scaled_fp8` with `scale_weight` beside each weight (old), or a description of each layer (new).

use crate::error::{Error, Result};
use crate::load::family::{At, Family, ScaleLayout};
use crate::load::family_name::FamilyName;
use crate::names::{join, split};
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::{InputScheme, LayerScheme};
use candle_core::{DType, Device};
use fp8_core::Granularity;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Metadata entry of new files.
const METADATA: &str = "_quantization_metadata";
/// Tensor beside a layer in new files: the same JSON as bytes.
const DESCRIPTION: &str = "comfy_quant";
/// Tensor in old files.
const MARKER: &str = "scaled_fp8";
/// Longer than any description of a layer.
const MAX_DESCRIPTION: usize = 1 << 16;

#[derive(Debug)]
pub(in crate::load) struct Comfy {
    path: PathBuf,
    /// Of new files; None where every weight with a scale is FP8. Paths may lack their beginning.
    described: Option<HashMap<String, Layer>>,
    /// Old files may forbid products in FP8.
    full_precision: bool,
    /// Layers with a scale for their inputs.
    inputs: HashSet<String>,
    /// Layers whose blocks run along the rows only.
    blocks: HashMap<String, usize>,
}

#[derive(Debug, Clone, Copy)]
struct Layer {
    is_mx: bool,
    full_precision: bool,
}

/// Whether ComfyUI has written any of the files.
pub(in crate::load) fn is_comfy(files: &[&SafetensorsFile]) -> bool {
    files.iter().any(|file| {
        let marks = [MARKER, DESCRIPTION, "scale_weight"];
        file.metadata(METADATA).is_some()
            || file.names().any(|name| marks.contains(&split(&name).1))
    })
}

impl Comfy {
    pub(in crate::load) fn parse(files: &[&SafetensorsFile]) -> Result<Self> {
        let mut comfy = Self {
            path: files
                .first()
                .map(|file| file.path().to_path_buf())
                .unwrap_or_default(),
            described: None,
            full_precision: false,
            inputs: HashSet::new(),
            blocks: HashMap::new(),
        };
        let mut described = HashMap::new();
        let mut is_new = false;
        for file in files {
            if let Some(text) = file.metadata(METADATA) {
                is_new = true;
                let value = parse(file, METADATA, text.as_bytes())?;
                let at = At::new(file.path(), METADATA, &value);
                for (path, layer) in at.get("layers").named_entries()? {
                    described.insert(path.to_string(), Layer::parse(&layer)?);
                }
            }
            for name in file.names() {
                let (path, own) = split(&name);
                let shape = file.shape(&name).unwrap_or_default();
                match own {
                    DESCRIPTION => {
                        is_new = true;
                        if shape.iter().product::<usize>() > MAX_DESCRIPTION {
                            return Err(Error::TensorShape {
                                tensor: name.clone(),
                                got: shape.to_vec(),
                                expected: format!(
                                    "at most {MAX_DESCRIPTION} bytes, in {}",
                                    file.path().display()
                                ),
                            });
                        }
                        let value = parse(file, &name, &file.bytes(&name)?)?;
                        let at = At::new(file.path(), &name, &value);
                        described.insert(path.to_string(), Layer::parse(&at)?);
                    }
                    MARKER => {
                        comfy.full_precision |= shape.iter().product::<usize>() == 2;
                        if file.dtype(&name) == Some(Dtype::F8_E5M2) {
                            return Err(Error::TensorDType {
                                tensor: name.clone(),
                                got: "F8_E5M2".into(),
                                expected: format!(
                                    "F8_E4M3, the format of the weights in {}",
                                    file.path().display()
                                ),
                            });
                        }
                    }
                    "scale_input" | "input_scale" if has_scale(file, &name)? => {
                        comfy.inputs.insert(path.to_string());
                    }
                    "scale_weight" | "weight_scale" => {
                        let weight = files
                            .iter()
                            .find_map(|file| file.shape(&join(path, "weight")));
                        if let ([n, blocks, 1], Some(&[rows, k])) = (shape, weight)
                            && *n == rows
                            && *blocks > 0
                            && k.is_multiple_of(*blocks)
                        {
                            comfy.blocks.insert(path.to_string(), k / blocks);
                        }
                    }
                    _ => {}
                }
            }
        }
        comfy.described = is_new.then_some(described);
        Ok(comfy)
    }

    /// What is said of a layer, whose path may have lost its beginning.
    fn description(&self, path: &str) -> Option<Layer> {
        let described = self.described.as_ref()?;
        let mut path = path;
        loop {
            if let Some(layer) = described.get(path) {
                return Some(*layer);
            }
            path = path.split_once('.')?.1;
        }
    }
}

impl Layer {
    fn parse(at: &At<'_>) -> Result<Self> {
        let format = at.get("format");
        format.must_be(&[json!("float8_e4m3fn"), json!("mxfp8")])?;
        let full = at.get("full_precision_matrix_mult");
        full.must_be(&[Value::Null, json!(false), json!(true)])?;
        Ok(Self {
            is_mx: format.value == "mxfp8",
            full_precision: full.value == &json!(true),
        })
    }
}

fn parse(file: &SafetensorsFile, what: &str, json: &[u8]) -> Result<Value> {
    serde_json::from_slice(json).map_err(|error| Error::Json {
        path: file.path().to_path_buf(),
        what: "ComfyUI's description of a layer",
        reason: format!("`{what}`: {error}"),
    })
}

/// Whether a scale of inputs is more than the 1 that stands for none.
fn has_scale(file: &SafetensorsFile, name: &str) -> Result<bool> {
    let is_number = matches!(
        file.dtype(name),
        Some(Dtype::F32 | Dtype::BF16 | Dtype::F16)
    );
    if !is_number
        || file
            .shape(name)
            .unwrap_or_default()
            .iter()
            .product::<usize>()
            != 1
    {
        // The checks of all families refuse it.
        return Ok(true);
    }
    let scale = file.tensor(name, &Device::Cpu)?.to_dtype(DType::F32)?;
    Ok(scale.flatten_all()?.to_vec1::<f32>()? != [1.])
}

impl Family for Comfy {
    fn name(&self) -> FamilyName {
        FamilyName::ComfyUi
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        let layer = match &self.described {
            None => Layer {
                is_mx: false,
                full_precision: self.full_precision,
            },
            Some(_) => match self.description(path) {
                Some(layer) => layer,
                None => return Ok(None),
            },
        };
        let input = match (layer.full_precision, layer.is_mx) {
            (true, _) => InputScheme::None,
            (false, true) => InputScheme::Mx,
            (false, false) if self.inputs.contains(path) => InputScheme::Static,
            // With a scale of 1 inputs would be clipped at 448.
            (false, false) => InputScheme::None,
        };
        let blocks = self.blocks.get(path).map(|cols| Granularity::Blockwise {
            rows: 1,
            cols: *cols,
        });
        Ok(Some(LayerScheme {
            weight: match layer.is_mx {
                true => Some(Granularity::Mx),
                false => blocks,
            },
            input: Some(input),
            ..LayerScheme::default()
        }))
    }

    fn weight_scale_names(&self) -> &'static [&'static str] {
        &["weight_scale", "scale_weight"]
    }

    fn input_scale_names(&self) -> &'static [&'static str] {
        &["input_scale", "scale_input"]
    }

    fn scale_layout(&self, path: &str) -> ScaleLayout {
        match self.description(path) {
            Some(Layer { is_mx: true, .. }) => ScaleLayout::Tiles,
            _ => ScaleLayout::RowMajor,
        }
    }

    fn is_description(&self, name: &str) -> bool {
        matches!(split(name).1, DESCRIPTION | MARKER)
    }

    fn may_ignore_input_scales(&self) -> bool {
        true
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
