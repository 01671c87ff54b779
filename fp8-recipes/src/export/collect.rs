//! Collects the contents of the file from a model.

use super::options::{ExportOptions, Name, Shown};
use super::scheme;
use super::source::Source;
use crate::FilesError;
use crate::error::{Error, ExportError, LayerError, Result};
use crate::module::{Fp8Layer, Fp8Module, LayerKind, Visitor, show_layer};
use crate::nn::{InputScaling, StaticWeight};
use candle_core::{DType, Tensor, TensorId};
use fp8_candle::{Fp8Tensor, Role, fingerprint};
use fp8_files::contents::{Contents, Described, Role as TensorRole, role_by_name};
use fp8_files::scheme::LayerScheme;
use fp8_scaled::Parameter;
use std::collections::{BTreeMap, HashMap};

/// The contents of an export.
#[derive(Default)]
pub(super) struct Collected {
    pub(super) tensors: BTreeMap<String, Tensor>,
    /// The layers in FP8, in the order of the model, and the linear layers in high precision.
    pub(super) contents: Contents,
    /// Names of weights that are stored under another name.
    pub(super) tied: BTreeMap<String, String>,
    /// Prepared convolutions and layers with batch axes, which are written in high precision.
    pub(super) convolutions: Vec<String>,
    pub(super) shown: Shown,
}

impl Collected {
    pub(super) fn quantized_paths(&self) -> Vec<String> {
        let paths = self.contents.layers.iter().map(|layer| layer.path.clone());
        paths.collect()
    }
}

/// Collects what `model` shows. Tensors without a name are looked up in `options`.
pub(super) fn collect<M: Fp8Module + ?Sized>(
    model: &M,
    options: &ExportOptions,
) -> Result<Collected> {
    let mut others = OtherTensors {
        options,
        names: HashMap::new(),
        sources: HashMap::new(),
    };
    model.visit(&mut others);
    let mut collector = Collector {
        options,
        others,
        sources: HashMap::new(),
        out: Collected::default(),
        error: None,
    };
    model.visit(&mut collector);
    match collector.error {
        Some(error) => Err(error),
        None if collector.out.contents.layers.is_empty() => {
            Err(ExportError::NothingToExport.into())
        }
        None => {
            let mut out = collector.out;
            out.contents.name_absent_layers();
            options.spelling.check(&out.contents)?;
            Ok(out)
        }
    }
}

/// Tensors outside linear layers.
struct OtherTensors<'a> {
    options: &'a ExportOptions,
    /// The first name of each tensor.
    names: HashMap<TensorId, String>,
    /// The first tensor of each name.
    sources: HashMap<String, Source>,
}

impl OtherTensors<'_> {
    /// The name under which something other than a linear layer uses this weight, whose own name is `name`.
    fn user(&self, name: &str, weight: &Source) -> Result<Option<&str>> {
        if let Some(other) = self.names.get(&weight.held().id()) {
            return Ok(Some(other));
        }
        // An embedding and a head of one name that were read from a file one after the other.
        match self.sources.get_key_value(name) {
            Some((name, other)) if other.is_same(weight)? => Ok(Some(name)),
            _ => Ok(None),
        }
    }
}

impl Visitor for OtherTensors<'_> {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        if !is_linear(layer) {
            show_layer(self, layer);
        }
    }

    fn tensor(&mut self, path: Option<&str>, tensor: &Tensor) {
        let path = match (path, self.options.name_of(tensor)) {
            (Some(path), _) | (None, Name::Variable(path)) => path,
            (None, Name::Buffer | Name::Unknown) => return,
        };
        self.names
            .entry(tensor.id())
            .or_insert_with(|| path.to_string());
        self.sources
            .entry(path.to_string())
            .or_insert_with(|| Source::Tensor(tensor.clone()));
    }
}

struct Collector<'a> {
    options: &'a ExportOptions,
    others: OtherTensors<'a>,
    /// What each name was taken from.
    sources: HashMap<String, Source>,
    out: Collected,
    error: Option<Error>,
}

impl Collector<'_> {
    fn show(&mut self, name: &str, source: &Source) {
        self.out.shown.names.insert(name.to_string());
        self.out.shown.tensors.insert(source.held().id());
    }

    /// Claims `name` for `source`; false if the same already has it.
    fn claim(&mut self, name: &str, source: Source) -> Result<bool> {
        self.show(name, &source);
        match self.sources.get(name) {
            Some(known) if known.is_same(&source)? => Ok(false),
            Some(_) => Err(FilesError::NameClash {
                tensor: name.to_string(),
            }
            .into()),
            None => {
                self.sources.insert(name.to_string(), source);
                Ok(true)
            }
        }
    }

    fn keep(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.keep_as(name, tensor, tensor.dims())
    }

    /// Stores `tensor` in another shape.
    fn keep_as(&mut self, name: &str, tensor: &Tensor, dims: &[usize]) -> Result<()> {
        if self.claim(name, Source::Tensor(tensor.clone()))? {
            // A scaled parameter is stored as its value, in f32, which holds it exactly.
            let value = Parameter::of(tensor).value(DType::F32)?;
            let value = value.detach().reshape(dims)?;
            self.out.tensors.insert(name.to_string(), value);
        }
        Ok(())
    }

    fn add_linear(&mut self, linear: &dyn Fp8Layer) -> Result<()> {
        let sizes = linear.features();
        let weight = linear.held_weight();
        let known = match (linear.path(), self.options.name_of(weight)) {
            (Some(path), _) => Some(path),
            (None, Name::Variable(name)) => name
                .strip_suffix(linear.weight_name())
                .and_then(|path| path.strip_suffix('.')),
            (None, Name::Buffer | Name::Unknown) => None,
        };
        let path = match known {
            Some(path) if !path.is_empty() => path,
            // Stored with the embedding, or whatever else uses it.
            None if linear.bias().is_none() && self.others.names.contains_key(&weight.id()) => {
                return Ok(());
            }
            _ => return Err(unnamed(weight)),
        };
        let name = format!("{path}.weight");
        if let Some(bias) = linear.bias() {
            // One number for each row of the weight, whatever the shape in the layer.
            self.keep_as(&format!("{path}.bias"), bias, &[sizes.0])?;
        }
        let source = Source::of_weight(linear);
        let other = self.others.user(&name, &source)?.map(str::to_string);
        if other.as_deref() == Some(name.as_str()) {
            // Stored by whatever else has this name, which may be shown later.
            self.show(&name, &source);
            self.ignore(path);
            return Ok(());
        }
        if !self.claim(&name, source)? && other.is_none() {
            return Ok(());
        }
        if let Some(weight) = linear.static_weight() {
            return self.add_static(path, weight, sizes);
        }
        if let Some(other) = other {
            // Stored once, with the embedding or whatever else uses it.
            self.ignore(path);
            self.out.tied.insert(name, other);
            return Ok(());
        }
        let weight = &match linear.weight_matrix()? {
            Some(matrix) => matrix,
            None => Parameter::of(weight).value(DType::F32)?,
        };
        let scheme = match linear.fp8_state() {
            None => None,
            Some(state) => {
                let calibration = state.calibration().ok_or_else(|| not_calibrated(path))?;
                if fingerprint(weight)? != calibration.weight_fingerprint {
                    return Err(ExportError::ChangedSinceCalibration {
                        path: path.to_string(),
                    }
                    .into());
                }
                scheme::calibrated(&calibration, sizes, path, self.options.ragged)?
                    .map(|scheme| (scheme, state, calibration.round_scales_to_power_of_two))
            }
        };
        let Some((scheme, state, power_of_two)) = scheme else {
            self.ignore(path);
            self.out.tensors.insert(name, weight.detach());
            return Ok(());
        };
        // The scales with which the calibrated model computes: the weight is the calibrated one.
        let calibrated = |role| -> Result<Tensor> {
            let slot = state.slot(role).filter(|slot| slot.is_calibrated());
            let slot = slot.ok_or_else(|| not_calibrated(path))?;
            Ok(slot.tensors()?.dequant_scale)
        };
        let scale = Some(calibrated(Role::Weight)?);
        let codes = scheme.quantize(weight, scale, power_of_two, path)?;
        let input = scheme.input.with_scale(|()| calibrated(Role::Input))?;
        let scheme = match self.options.power_of_two_inputs {
            true => scheme,
            false => scheme.with_exact_inputs(),
        };
        self.add_codes(path, scheme, sizes, codes, input)
    }

    /// Lists a linear layer in high precision.
    fn ignore(&mut self, path: &str) {
        let ignored = &mut self.out.contents.ignored;
        if !ignored.iter().any(|other| other == path) {
            ignored.push(path.to_string());
        }
    }

    /// Writes a layer that was loaded in FP8 unchanged, if the family can express it.
    fn add_static(
        &mut self,
        path: &str,
        weight: &StaticWeight,
        sizes: (usize, usize),
    ) -> Result<()> {
        let codes = weight.weight().unpack()?;
        let input = weight.input_scaling();
        let mut scheme = LayerScheme::of(codes.granularity(), input);
        scheme.check(sizes, path, scheme::WAY_OUT)?;
        if !self.options.power_of_two_inputs && !self.options.spelling.says_power_of_two() {
            scheme = scheme.with_exact_inputs();
        }
        self.add_codes(path, scheme, sizes, codes, input.clone())
    }

    fn add_codes(
        &mut self,
        path: &str,
        scheme: LayerScheme,
        sizes: (usize, usize),
        codes: Fp8Tensor,
        input: InputScaling,
    ) -> Result<()> {
        let described = Described {
            path: path.to_string(),
            scheme,
            sizes,
        };
        // In every spelling a layer has only names of its own; `Spelling::check` checks the whole model.
        for (name, tensor) in self.options.spelling.tensors(&described, &codes, &input)? {
            self.out.shown.names.insert(name.clone());
            self.out.tensors.insert(name, tensor);
        }
        self.out.contents.layers.push(described);
        Ok(())
    }
}

/// FP8 checkpoints store matrices; the weights of convolutions stay in high precision.
fn is_linear(layer: &dyn Fp8Layer) -> bool {
    layer.kind() == LayerKind::Linear
}

fn unnamed(tensor: &Tensor) -> Error {
    LayerError::Unnamed {
        shape: tensor.dims().to_vec(),
    }
    .into()
}

fn not_calibrated(path: &str) -> Error {
    ExportError::NotCalibrated {
        path: path.to_string(),
    }
    .into()
}

impl Visitor for Collector<'_> {
    fn layer(&mut self, linear: &dyn Fp8Layer) {
        if !is_linear(linear) {
            if linear.fp8_state().is_some() {
                let path = linear.path().map(str::to_string);
                self.out.convolutions.extend(path);
            }
            show_layer(self, linear);
        } else if self.error.is_none() {
            self.error = self.add_linear(linear).err();
        }
    }

    fn tensor(&mut self, path: Option<&str>, tensor: &Tensor) {
        if self.error.is_some() {
            return;
        }
        let options = self.options;
        let name = match (path, options.name_of(tensor)) {
            (Some(path), _) | (None, Name::Variable(path)) => Ok(path),
            (None, Name::Buffer) => return,
            (None, Name::Unknown) => Err(unnamed(tensor)),
        };
        let kept = name.and_then(|name| self.keep(name, tensor).map(|()| name));
        let name = match kept {
            Ok(name) => name,
            Err(error) => {
                self.error = Some(error);
                return;
            }
        };
        match role_by_name(name).filter(|_| tensor.rank() == 2) {
            Some((path, TensorRole::Embedding)) => {
                let embeddings = &mut self.out.contents.embeddings;
                if !embeddings.iter().any(|other| other == path) {
                    embeddings.push(path.to_string());
                }
            }
            // A router or a layer of another library: other engines see a linear layer.
            Some((path, _)) => self.ignore(path),
            None => {}
        }
    }
}
