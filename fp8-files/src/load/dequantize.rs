//! Copies the values of a checkpoint into variables, to train them.

use super::Checkpoint;
use crate::error::{Error, Result};
use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use fp8_candle::fingerprint;
use fp8_candle::weight_version::WeightVersion;
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::PoisonError;

/// Sets every variable of `vars` to its value in a checkpoint of any family that [`Checkpoint`] reads, in the variable's dtype and on its
/// device: FP8 weights times their scales, everything else as stored. So a model can be fine-tuned from an FP8 file, or in FP8 from plain
/// weights, such as a file of `VarMap::save`.
///
/// The variables only change if everything fits: every variable has a tensor of its shape, and every tensor except scales a variable.
/// [`dequantize_into_with`] allows missing names. All values are read before the first variable is set, which for a moment takes as much
/// memory as the variables; gradients and moments will take more. A prepared model may have run before: its cached FP8 copies are
/// invalidated ([`weight_version`](fp8_candle::weight_version)), and it keeps its FP8 state.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::{
///     Autocast, Recipe, fp8_autocast, load, nn, prepare_fp8, save_calibrated, with_fp8,
/// };
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("model.safetensors");
/// let recipe: Recipe = "delayed".parse()?;
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// # let model = nn::linear(16, 8, vb.pp("fc"))?;
/// # prepare_fp8(&model, &Default::default())?;
/// # let guard = fp8_autocast(Autocast::new(recipe.clone()).calibrating(true))?;
/// # model.forward(&Tensor::ones((1, 16), DType::F32, &Device::Cpu)?)?;
/// # guard.close()?;
/// # save_calibrated(&model, &path)?;
/// // A model built as for training from scratch ..
/// let vars = VarMap::new();
/// let model = nn::linear(16, 8, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
/// // .. starts from the values of an FP8 file.
/// let report = load::dequantize_into(&vars, &[&path])?;
/// assert_eq!(report.dequantized, ["fc.weight"]);
/// assert_eq!(report.copied, ["fc.bias"]);
/// prepare_fp8(&model, &Default::default())?;
/// let x = Tensor::ones((4, 16), DType::F32, &Device::Cpu)?;
/// let loss = with_fp8(recipe, || model.forward(&x))?.sqr()?.mean_all()?;
/// # assert!(loss.to_scalar::<f32>()?.is_finite());
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`Checkpoint::open`]; [`Error::UnmatchedNames`] naming every variable without a tensor and every tensor without a variable,
/// [`Error::TensorShape`], and [`Error::TensorDType`] or [`Error::BuilderDType`] for values that a variable cannot hold.
pub fn dequantize_into<P: AsRef<Path>>(vars: &VarMap, paths: &[P]) -> Result<DequantizeReport> {
    dequantize_into_with(vars, paths, &DequantizeOptions::default())
}

/// As [`dequantize_into`], except that `options` may allow missing names.
///
/// ```no_run
/// # use fp8_recipes as fp8;
/// use fp8::load::{DequantizeOptions, dequantize_into_with};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vars = candle_nn::VarMap::new();
/// // A classifier on a language model: it has a new head and does not load the old one.
/// let options = DequantizeOptions::new().allow_missing(true).allow_unused(true);
/// let report = dequantize_into_with(&vars, &["model.safetensors"], &options)?;
/// assert_eq!(report.missing, ["classifier.weight"]);
/// assert_eq!(report.unused, ["lm_head.weight"]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`dequantize_into`].
pub fn dequantize_into_with<P: AsRef<Path>>(
    vars: &VarMap,
    paths: &[P],
    options: &DequantizeOptions,
) -> Result<DequantizeReport> {
    let checkpoint = Checkpoint::open(paths)?;
    let vars = sorted(vars);
    let mut report = DequantizeReport::default();
    let mut used = HashSet::new();
    let mut found: Vec<(&String, &Var)> = vec![];
    for (name, var) in &vars {
        let Some(stored) = checkpoint.resolve(name) else {
            report.missing.push(name.clone());
            continue;
        };
        let shape = checkpoint.shape(&stored).unwrap_or_default();
        if shape != var.dims() {
            return Err(Error::TensorShape {
                tensor: name.clone(),
                got: shape.to_vec(),
                expected: format!("{:?}, the shape of the variable", var.dims()),
            });
        }
        match checkpoint.is_fp8(&stored) {
            true => report.dequantized.push(name.clone()),
            false => report.copied.push(name.clone()),
        }
        used.insert(stored);
        found.push((name, var));
    }
    // A tied variable has two names, but the file may have only one.
    let set: HashSet<_> = found.iter().map(|(_, var)| var.id()).collect();
    report
        .missing
        .retain(|name| !set.contains(&vars[name].id()));
    let names = checkpoint.value_names().into_iter();
    report.unused = names.filter(|name| !used.contains(name)).collect();
    let refused = |names: &[String], allowed: bool| match allowed {
        true => vec![],
        false => names.to_vec(),
    };
    let missing = refused(&report.missing, options.allow_missing);
    let unused = refused(&report.unused, options.allow_unused);
    if !missing.is_empty() || !unused.is_empty() {
        return Err(Error::UnmatchedNames { missing, unused });
    }
    let values: Vec<Tensor> = found
        .iter()
        .map(|(name, var)| checkpoint.value(name, var.dtype(), var.device()))
        .collect::<Result<_>>()?;
    // A variable with two names in the file must have one value.
    let mut first = HashMap::new();
    for ((name, var), value) in found.iter().zip(&values) {
        if let Some((other, before)) = first.insert(var.id(), (*name, value))
            && fingerprint(before)? != fingerprint(value)?
        {
            return Err(Error::TiedValues {
                first: other.clone(),
                second: (*name).clone(),
            });
        }
    }
    for ((_, var), value) in found.iter().zip(&values) {
        var.set(value)?;
        let version = WeightVersion::of(var);
        // A first announcement would promise that all later changes are announced too. Without one no copies are cached.
        if version.get() > 0 {
            version.announce_change();
        }
    }
    Ok(report)
}

fn sorted(vars: &VarMap) -> BTreeMap<String, Var> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    vars.iter()
        .map(|(name, var)| (name.clone(), var.clone()))
        .collect()
}

impl Checkpoint {
    fn is_fp8(&self, name: &str) -> bool {
        matches!(self.dtype(name), Some(Dtype::F8_E4M3 | Dtype::F8_E5M2))
    }
}

/// Which names [`dequantize_into_with`] allows to be missing. By default none.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::DequantizeOptions;
/// let options = DequantizeOptions::new().allow_unused(true);
/// assert!(options.allow_unused && !options.allow_missing);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DequantizeOptions {
    /// See [`DequantizeOptions::allow_missing`].
    pub allow_missing: bool,
    /// See [`DequantizeOptions::allow_unused`].
    pub allow_unused: bool,
}

impl DequantizeOptions {
    /// No name may be missing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether variables without a tensor in the checkpoint keep their values. Otherwise they are an error.
    pub fn allow_missing(mut self, allow: bool) -> Self {
        self.allow_missing = allow;
        self
    }

    /// Whether tensors without a variable are left out. Otherwise they are an error.
    pub fn allow_unused(mut self, allow: bool) -> Self {
        self.allow_unused = allow;
        self
    }
}

/// What [`dequantize_into`] did; all names are sorted. Prints one line, and one more for each name without a counterpart.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device};
/// # let dir = tempfile::tempdir()?;
/// # let path = fp8_test_support::files::fp8_model(dir.path());
/// # let vars = candle_nn::VarMap::new();
/// # let vb = candle_nn::VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// vb.get((32, 64), "fc.weight")?;
/// vb.get(32, "fc.bias")?;
/// let report = fp8::load::dequantize_into(&vars, &[path])?;
/// assert_eq!(report.dequantized, ["fc.weight"]);
/// assert_eq!(report.copied, ["fc.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DequantizeReport {
    /// Variables set from FP8 codes times their scales.
    pub dequantized: Vec<String>,
    /// Variables set from tensors in high precision.
    pub copied: Vec<String>,
    /// Variables without a tensor, which keep their values.
    pub missing: Vec<String>,
    /// Tensors without a variable.
    pub unused: Vec<String>,
}

impl fmt::Display for DequantizeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dequantized, copied) = (self.dequantized.len(), self.copied.len());
        write!(
            f,
            "variables set: {}, of which {dequantized} from FP8",
            dequantized + copied
        )?;
        for name in &self.missing {
            write!(f, "\n  not in the checkpoint: {name}")?;
        }
        for name in &self.unused {
            write!(f, "\n  no variable: {name}")?;
        }
        Ok(())
    }
}
