//! The FP8 inference file: compressed-tensors `float-quantized`.
//!
//! `X.weight` F8_E4M3 `[out, in]`, `X.weight_scale` f32 (`[1]`, or `[out, 1]` for rowwise recipes), `X.input_scale`
//! f32 `[1]` (static inputs only), every other tensor unchanged, and `config.json` with `quantization_config` beside
//! the file. In all of them value = code * scale: these names are the checkpoint convention's, the numbers are
//! dequant_scales.

use crate::atomic::{write_atomic, write_safetensors_atomic};
use crate::error::{Error, Result};
use crate::module::{Fp8Layer, Fp8Module, Visitor};
use crate::nn::{InputScaling, StaticWeight};
use candle_core::{DType, Tensor, TensorId};
use fp8_candle::{Fp8Tensor, Quantizer, Role, ScaleSource, fingerprint};
use fp8_core::{Cast, Contraction, Format, Granularity, static_dequant_scale};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// How a calibrated layer is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportStrategy {
    /// One static scale for the weight and one for the input (delayed, tensorwise, static recipes).
    Tensor,
    /// One scale per output channel of the weight, inputs scaled per token while they run (rowwise recipes).
    Channel,
}

/// What [`save_calibrated`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportReport {
    /// The safetensors file.
    pub model: PathBuf,
    /// The configuration beside it.
    pub config: PathBuf,
    /// Paths of the layers in FP8.
    pub quantized: Vec<String>,
    /// Paths of the linear layers left in high precision (`ignore` in the configuration).
    pub ignored: Vec<String>,
}

/// Writes a calibrated model as an FP8 inference file. `path` is the file, or a directory that gets
/// `model.safetensors`. A `config.json` already there keeps its other entries.
///
/// The scales follow the recipe of the calibrating guard: rowwise recipes give a scale per output channel and inputs
/// scaled per token while they run, all others one static scale for the weight and one for the input. A weight that a
/// layer outside of the linear ones uses too (a tied embedding) stays in high precision.
///
/// # Errors
/// If no layer is prepared, a prepared layer was not calibrated, a tensor has no name or shares it with another, or
/// a file cannot be written (the old one survives then).
pub fn save_calibrated<M: Fp8Module + ?Sized>(
    model: &M,
    path: impl AsRef<Path>,
) -> Result<ExportReport> {
    let path = path.as_ref();
    let file = if path.is_dir() {
        path.join("model.safetensors")
    } else {
        path.to_path_buf()
    };
    let config_path = file.with_file_name("config.json");

    let mut others = OtherTensors::default();
    model.visit(&mut others);
    let mut collector = Collector {
        others: others.0,
        tensors: BTreeMap::new(),
        sources: HashMap::new(),
        quantized: vec![],
        ignored: vec![],
        strategy: None,
        error: None,
    };
    model.visit(&mut collector);
    if let Some(error) = collector.error {
        return Err(error);
    }
    let Some(strategy) = collector.strategy else {
        return Err(Error::NothingToExport);
    };
    let config = merged_config(&config_path, &collector.ignored, strategy)?;

    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    write_safetensors_atomic(&file, &collector.tensors, Some(&metadata))?;
    write_atomic(&config_path, |out| {
        serde_json::to_writer_pretty(&mut *out, &config)?;
        out.write_all(b"\n")
    })?;
    Ok(ExportReport {
        model: file,
        config: config_path,
        quantized: collector.quantized,
        ignored: collector.ignored,
    })
}

/// The configuration file with `quantization_config` put in.
fn merged_config(path: &Path, ignored: &[String], strategy: ExportStrategy) -> Result<Value> {
    let mut config = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Map::new(),
        Err(source) => {
            return Err(Error::Read {
                path: path.to_path_buf(),
                source,
            });
        }
        Ok(text) => serde_json::from_str(&text).map_err(|error| Error::Json {
            path: path.to_path_buf(),
            what: "the object at its root",
            reason: error.to_string(),
        })?,
    };
    config.insert(
        "quantization_config".into(),
        quantization_config(ignored, strategy),
    );
    Ok(config.into())
}

fn quantization_config(ignored: &[String], strategy: ExportStrategy) -> Value {
    let (weights, inputs, dynamic) = match strategy {
        ExportStrategy::Tensor => ("tensor", "tensor", false),
        ExportStrategy::Channel => ("channel", "token", true),
    };
    let args = |strategy: &str, dynamic: bool| {
        json!({
            "num_bits": 8,
            "type": "float",
            "symmetric": true,
            "strategy": strategy,
            "dynamic": dynamic,
            "group_size": null,
        })
    };
    json!({
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "targets": ["Linear"],
                "weights": args(weights, false),
                "input_activations": args(inputs, dynamic),
                "output_activations": null,
            }
        },
        "ignore": ignored,
        "kv_cache_scheme": null,
    })
}

/// Tensors that belong to no linear layer.
#[derive(Default)]
struct OtherTensors(HashSet<TensorId>);

impl Visitor for OtherTensors {
    fn layer(&mut self, _: &dyn Fp8Layer) {}

    fn tensor(&mut self, _: &str, tensor: &Tensor) {
        self.0.insert(tensor.id());
    }
}

struct Collector {
    others: HashSet<TensorId>,
    tensors: BTreeMap<String, Tensor>,
    /// Which tensor a name was taken from.
    sources: HashMap<String, TensorId>,
    quantized: Vec<String>,
    ignored: Vec<String>,
    strategy: Option<ExportStrategy>,
    error: Option<Error>,
}

impl Collector {
    /// Files `tensor` under `name`; false if the same tensor is there already.
    fn claim(&mut self, name: &str, source: &Tensor) -> Result<bool> {
        if name.is_empty() || name == "weight" && self.sources.contains_key(name) {
            return Err(Error::Unnamed {
                shape: source.dims().to_vec(),
            });
        }
        match self.sources.get(name) {
            Some(id) if *id == source.id() => Ok(false),
            Some(_) => Err(Error::NameClash {
                tensor: name.to_string(),
            }),
            None => {
                self.sources.insert(name.to_string(), source.id());
                Ok(true)
            }
        }
    }

    fn keep(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        if self.claim(name, tensor)? {
            self.tensors.insert(name.to_string(), tensor.detach());
        }
        Ok(())
    }

    fn add_linear(&mut self, linear: &dyn Fp8Layer) -> Result<()> {
        let path = linear.path();
        if path.is_empty() {
            let (out_features, in_features) = linear.features();
            return Err(Error::Unnamed {
                shape: vec![out_features, in_features],
            });
        }
        let weight = linear.held_weight();
        let name = format!("{path}.weight");
        if let Some(bias) = linear.bias() {
            self.keep(&format!("{path}.bias"), bias)?;
        }
        let state = linear
            .fp8_state()
            .filter(|_| !self.others.contains(&weight.id()));
        if !self.claim(&name, weight)? {
            return Ok(());
        }
        if let Some(weight) = linear.static_weight() {
            return self.add_static(path, weight);
        }
        let Some(state) = state else {
            self.ignored.push(path.to_string());
            self.tensors.insert(name, weight.detach());
            return Ok(());
        };
        let not_calibrated = || Error::NotCalibrated {
            path: path.to_string(),
        };
        let calibration = state.calibration().ok_or_else(not_calibrated)?;
        if fingerprint(weight)? != calibration.weight_fingerprint {
            return Err(Error::ChangedSinceCalibration {
                path: path.to_string(),
            });
        }
        let strategy = match calibration.weight.granularity {
            Granularity::Rowwise => ExportStrategy::Channel,
            _ => ExportStrategy::Tensor,
        };
        self.agree(path, strategy)?;
        let codes = quantize_weight(weight, strategy, path)?;
        let input_scale = match strategy {
            ExportStrategy::Channel => None,
            ExportStrategy::Tensor => {
                let amax = state
                    .slot(Role::Input)
                    .and_then(|slot| slot.calibrated_amax());
                let amax = amax.ok_or_else(not_calibrated)?;
                let input_format = calibration.input.format.unwrap_or(Format::E4M3);
                if input_format != Format::E4M3 {
                    return Err(Error::NotExportable {
                        path: path.to_string(),
                        reason: format!(
                            "its inputs were calibrated in {input_format}, the file holds e4m3 scales"
                        ),
                    });
                }
                let dequant_scale = static_dequant_scale(amax, Format::E4M3).map_err(|source| {
                    let slot = format!("{path}.input");
                    candle_core::Error::from(fp8_candle::Error::Calibration { slot, source })
                })?;
                Some(Tensor::from_slice(&[dequant_scale], 1, weight.device())?)
            }
        };
        self.add_codes(path, &codes, input_scale)
    }

    /// A layer that was loaded in FP8 is written as it is.
    fn add_static(&mut self, path: &str, weight: &StaticWeight) -> Result<()> {
        let codes = weight.weight().unpack()?;
        let (strategy, input_scale) = match (codes.granularity(), weight.input_scaling()) {
            (Granularity::Tensorwise, InputScaling::Static(scale)) => {
                (ExportStrategy::Tensor, Some(scale.clone()))
            }
            (Granularity::Rowwise, InputScaling::DynamicPerToken) => {
                (ExportStrategy::Channel, None)
            }
            (granularity, input) => {
                return Err(Error::NotExportable {
                    path: path.to_string(),
                    reason: format!("a {granularity} weight with {input:?} inputs has no strategy"),
                });
            }
        };
        self.agree(path, strategy)?;
        self.add_codes(path, &codes, input_scale)
    }

    /// One file has one strategy.
    fn agree(&mut self, path: &str, strategy: ExportStrategy) -> Result<()> {
        let first = *self.strategy.get_or_insert(strategy);
        if first != strategy {
            return Err(Error::NotExportable {
                path: path.to_string(),
                reason: format!(
                    "it was calibrated for strategy {strategy:?}, other layers for {first:?}"
                ),
            });
        }
        Ok(())
    }

    fn add_codes(
        &mut self,
        path: &str,
        codes: &Fp8Tensor,
        input_scale: Option<Tensor>,
    ) -> Result<()> {
        self.tensors
            .insert(format!("{path}.weight"), codes.to_f8e4m3()?);
        let scale = codes.dequant_scale();
        let scale = match codes.granularity() {
            Granularity::Tensorwise => scale.reshape(1)?,
            _ => scale.clone(),
        };
        self.tensors.insert(format!("{path}.weight_scale"), scale);
        if let Some(input_scale) = input_scale {
            self.tensors
                .insert(format!("{path}.input_scale"), input_scale);
        }
        self.quantized.push(path.to_string());
        Ok(())
    }
}

/// The static scale comes from the amax of the weight as it is now, which is the calibrated one unless the model was
/// trained further. Channel scales are exact, also where the recipe rounds them to powers of two: so are the input
/// scales that a loader of this format makes.
fn quantize_weight(weight: &Tensor, strategy: ExportStrategy, path: &str) -> Result<Fp8Tensor> {
    let (granularity, source) = match strategy {
        ExportStrategy::Channel => {
            let dynamic = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
            (Granularity::Rowwise, dynamic.source)
        }
        ExportStrategy::Tensor => {
            let amax = weight
                .abs()?
                .flatten_all()?
                .max(0)?
                .to_dtype(DType::F32)?
                .to_scalar()?;
            let dequant_scale = static_dequant_scale(amax, Format::E4M3).map_err(|source| {
                let slot = format!("{path}.weight");
                candle_core::Error::from(fp8_candle::Error::Calibration { slot, source })
            })?;
            let dequant_scale = Tensor::from_slice(&[dequant_scale], 1, weight.device())?;
            (
                Granularity::Tensorwise,
                ScaleSource::Fixed { dequant_scale },
            )
        }
    };
    let cast = Cast::new(Format::E4M3);
    let quantizer = Quantizer {
        cast,
        granularity,
        source,
        counter: None,
        observer: None,
    };
    Ok(Fp8Tensor::quantize(weight, &quantizer, Contraction::Cols)?)
}

impl Visitor for Collector {
    fn layer(&mut self, linear: &dyn Fp8Layer) {
        if self.error.is_none() {
            self.error = self.add_linear(linear).err();
        }
    }

    fn tensor(&mut self, path: &str, tensor: &Tensor) {
        if self.error.is_none() {
            self.error = self.keep(path, tensor).err();
        }
    }
}
