//! Walks a model and gathers what its file will hold.

use super::options::Shown;
use super::scheme::Scheme;
use crate::error::{Error, Result};
use crate::load::InputScheme;
use crate::module::{Fp8Layer, Fp8Module, Visitor};
use crate::nn::{InputScaling, StaticWeight};
use candle_core::{Tensor, TensorId};
use fp8_candle::{Fp8Tensor, Role, fingerprint};
use std::collections::{BTreeMap, HashMap};

/// Everything of a model that is written.
#[derive(Default)]
pub(super) struct Collected {
    pub(super) tensors: BTreeMap<String, Tensor>,
    /// Layers in FP8, in the order of the model.
    pub(super) quantized: Vec<(String, Scheme)>,
    /// Linear layers in high precision.
    pub(super) ignored: Vec<String>,
    /// Names of weights that are stored under another name.
    pub(super) tied: BTreeMap<String, String>,
    pub(super) shown: Shown,
}

impl Collected {
    pub(super) fn quantized_paths(&self) -> Vec<String> {
        let paths = self.quantized.iter().map(|(path, _)| path.clone());
        paths.collect()
    }
}

/// Everything that `model` shows.
pub(super) fn collect<M: Fp8Module + ?Sized>(model: &M) -> Result<Collected> {
    let mut others = OtherTensors::default();
    model.visit(&mut others);
    let mut collector = Collector {
        others: others.0,
        sources: HashMap::new(),
        out: Collected::default(),
        error: None,
    };
    model.visit(&mut collector);
    match collector.error {
        Some(error) => Err(error),
        None if collector.out.quantized.is_empty() => Err(Error::NothingToExport),
        None => Ok(collector.out),
    }
}

/// Tensors that belong to no linear layer, with the first name of each.
#[derive(Default)]
struct OtherTensors(HashMap<TensorId, String>);

impl Visitor for OtherTensors {
    fn layer(&mut self, _: &dyn Fp8Layer) {}

    fn tensor(&mut self, path: &str, tensor: &Tensor) {
        self.0
            .entry(tensor.id())
            .or_insert_with(|| path.to_string());
    }
}

struct Collector {
    others: HashMap<TensorId, String>,
    /// Which tensor a name was taken from.
    sources: HashMap<String, TensorId>,
    out: Collected,
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
        self.out.shown.names.insert(name.to_string());
        self.out.shown.tensors.insert(source.id());
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
            self.out.tensors.insert(name.to_string(), tensor.detach());
        }
        Ok(())
    }

    fn add_linear(&mut self, linear: &dyn Fp8Layer) -> Result<()> {
        let path = linear.path();
        let sizes = linear.features();
        if path.is_empty() {
            return Err(Error::Unnamed {
                shape: vec![sizes.0, sizes.1],
            });
        }
        let weight = linear.held_weight();
        let name = format!("{path}.weight");
        if let Some(bias) = linear.bias() {
            self.keep(&format!("{path}.bias"), bias)?;
        }
        let other = self.others.get(&weight.id()).cloned();
        if !self.claim(&name, weight)? && other.is_none() {
            return Ok(());
        }
        if let Some(weight) = linear.static_weight() {
            return self.add_static(path, weight, sizes);
        }
        if let Some(other) = other {
            // Stored once, by what else uses it.
            if !self.out.ignored.iter().any(|ignored| ignored == path) {
                self.out.ignored.push(path.to_string());
            }
            if other != name {
                self.out.tied.insert(name, other);
            }
            return Ok(());
        }
        let scheme = match linear.fp8_state() {
            None => None,
            Some(state) => {
                let calibration = state.calibration().ok_or_else(|| not_calibrated(path))?;
                if fingerprint(weight)? != calibration.weight_fingerprint {
                    return Err(Error::ChangedSinceCalibration {
                        path: path.to_string(),
                    });
                }
                Scheme::of(&calibration, sizes, path)?.map(|scheme| (scheme, state))
            }
        };
        let Some((scheme, state)) = scheme else {
            self.out.ignored.push(path.to_string());
            self.out.tensors.insert(name, weight.detach());
            return Ok(());
        };
        let codes = scheme.quantize(weight, path)?;
        let input_scale = match scheme.input {
            InputScheme::Static => {
                let slot = state.slot(Role::Input);
                let amax = slot.and_then(|slot| slot.calibrated_amax());
                let amax = amax.ok_or_else(|| not_calibrated(path))?;
                Some(scheme.input_scale(amax, weight.device(), path)?)
            }
            _ => None,
        };
        self.add_codes(path, scheme, &codes, input_scale)
    }

    /// A layer that was loaded in FP8 is written as it is.
    fn add_static(
        &mut self,
        path: &str,
        weight: &StaticWeight,
        sizes: (usize, usize),
    ) -> Result<()> {
        let codes = weight.weight().unpack()?;
        let input = weight.input_scaling();
        let scheme = Scheme::of_loaded(codes.granularity(), input, sizes, path)?;
        let input_scale = match input {
            InputScaling::Static(scale) => Some(scale.clone()),
            _ => None,
        };
        self.add_codes(path, scheme, &codes, input_scale)
    }

    fn add_codes(
        &mut self,
        path: &str,
        scheme: Scheme,
        codes: &Fp8Tensor,
        input_scale: Option<Tensor>,
    ) -> Result<()> {
        let mut put = |own: &str, tensor: Tensor| {
            let name = format!("{path}.{own}");
            self.out.shown.names.insert(name.clone());
            self.out.tensors.insert(name, tensor);
        };
        put("weight", codes.to_f8e4m3()?);
        put("weight_scale", scheme.stored_scale(codes, path)?);
        if let Some(input_scale) = input_scale {
            put("input_scale", input_scale);
        }
        self.out.quantized.push((path.to_string(), scheme));
        Ok(())
    }
}

fn not_calibrated(path: &str) -> Error {
    Error::NotCalibrated {
        path: path.to_string(),
    }
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
