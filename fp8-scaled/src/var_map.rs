//! Parameters by name, and the `VarBuilder` that makes them.

use super::error::{Result, tensor_dtype, tensor_shape};
use super::grads::ScaledGrads;
use super::tree::{ScaledTree, with_scale};
use super::var::ScaledVar;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use fp8_files::Error as FilesError;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How error messages name this map.
const PLACE: &str = "the map of scaled parameters";

/// Named parameters of scaled arithmetic, in 16 bits (or f32) with a scale each. Clones share them.
///
/// Layers built on [`ScaledVarMap::var_builder`] receive the tensors of the data, and look up their parameters with [`ScaledVar::of`].
/// **A layer without support for scales would compute with the data as if they were the values.**
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::{ScaledVar, ScaledVarMap};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let params = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
/// let init = candle_nn::Init::Const(0.02);
/// let data = params.var_builder().pp("fc").get_with_hints((4, 8), "weight", init)?;
/// let weight = ScaledVar::of(&data).unwrap();
/// assert_eq!((weight.name(), weight.scale().to_f32()), ("fc.weight", 1.0 / 64.0));
/// params.set("fc.weight", &Tensor::ones((4, 8), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(weight.scale().to_f32(), 1.0);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ScaledVarMap {
    vars: Arc<Mutex<BTreeMap<String, ScaledVar>>>,
    dtype: DType,
    device: Device,
}

fn check_dtype(tensor: &str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 => Ok(()),
        got => {
            let expected = "f16, bf16 or f32, as scaled parameters have";
            Err(tensor_dtype(tensor, got.as_str(), expected))
        }
    }
}

/// The parameters, sorted by name: what an optimizer takes.
impl From<&ScaledVarMap> for Vec<ScaledVar> {
    fn from(params: &ScaledVarMap) -> Self {
        params.vars()
    }
}

impl ScaledVarMap {
    /// An empty map, whose new parameters get data of `dtype`: f16, bf16 or f32.
    ///
    /// # Errors
    /// [`FilesError::TensorDType`](fp8_files::Error::TensorDType) for another dtype.
    pub fn new(dtype: DType, device: &Device) -> Result<Self> {
        check_dtype(PLACE, dtype)?;
        Ok(Self {
            vars: Arc::default(),
            dtype,
            device: device.clone(),
        })
    }

    /// A `VarBuilder` that makes parameters in this map. The first `get` of a name initializes the parameter in f32 by the hint, and stores
    /// it at the power of two below its root mean square (zeros at the scale 0). Every `get` of a name returns the same tensor, that of the
    /// data. [`VarBuilder::to_dtype`] changes the dtype of new parameters.
    pub fn var_builder(&self) -> VarBuilder<'static> {
        let backend: Box<dyn SimpleBackend> = Box::new(self.clone());
        VarBuilder::from_backend(backend, self.dtype, self.device.clone())
    }

    /// The dtype of the data of new parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the parameters are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The parameter of this name.
    ///
    /// # Errors
    /// [`FilesError::MissingTensor`](fp8_files::Error::MissingTensor) if there is none.
    pub fn get(&self, name: &str) -> Result<ScaledVar> {
        let found = self.lock().get(name).cloned();
        found.ok_or_else(|| {
            FilesError::MissingTensor {
                tensor: name.to_string(),
                place: PLACE.to_string(),
            }
            .into()
        })
    }

    /// All names, sorted.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// All parameters, in the order of their names.
    pub fn vars(&self) -> Vec<ScaledVar> {
        self.lock().values().cloned().collect()
    }

    /// The number of parameters.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Adds a parameter that was made elsewhere, under its own name.
    ///
    /// # Errors
    /// [`FilesError::NameClash`](fp8_files::Error::NameClash) if another parameter has this name,
    /// [`FilesError::TensorDType`](fp8_files::Error::TensorDType) if the data are f64.
    pub fn insert(&self, var: &ScaledVar) -> Result<()> {
        check_dtype(var.name(), var.dtype())?;
        let mut vars = self.lock();
        let here = vars.entry(var.name().to_string());
        let here = here.or_insert_with(|| var.clone());
        match here.data_var().id() == var.data_var().id() {
            true => Ok(()),
            false => Err(FilesError::NameClash {
                tensor: var.name().to_string(),
            }
            .into()),
        }
    }

    /// Sets the value of a parameter: `x`, of any float dtype, rescaled to the power of two below its root mean square and rounded
    /// once to the dtype of the parameter. Zeros get the scale 0.
    ///
    /// # Errors
    /// If there is no parameter of this name, or it has another shape, or `x` holds integers.
    pub fn set(&self, name: &str, x: &Tensor) -> Result<()> {
        let var = self.get(name)?;
        var.set_rescaled(&x.to_device(var.device())?)
    }

    /// Names of the parameters that have no gradient in `grads`, sorted: the counterpart of `fp8::check_gradients`.
    pub fn missing_gradients(&self, grads: &ScaledGrads) -> Vec<String> {
        let vars = self.lock();
        let missing = vars.iter().filter(|(_, var)| grads.get(var).is_none());
        missing.map(|(name, _)| name.clone()).collect()
    }

    /// A copy of all data and scales.
    ///
    /// # Errors
    /// candle's, if memory cannot be allocated.
    pub fn to_tree(&self) -> Result<ScaledTree> {
        let mut tree = ScaledTree::default();
        for var in self.vars() {
            let data = var.data_var().as_detached_tensor().copy()?;
            tree.insert(var.name(), with_scale(&data, var.scale())?);
        }
        Ok(tree)
    }

    /// Restores data and scales from `tree`, which must have values for exactly these names. Nothing changes unless all fit.
    ///
    /// # Errors
    /// [`FilesError::UnmatchedNames`](fp8_files::Error::UnmatchedNames), [`FilesError::TensorShape`](fp8_files::Error::TensorShape) or
    /// [`FilesError::TensorDType`](fp8_files::Error::TensorDType).
    pub fn load_tree(&self, tree: &ScaledTree) -> Result<()> {
        for var in self.check_tree(tree)? {
            if let Some(value) = tree.get(var.name()) {
                let data = value.data()?.to_device(var.device())?;
                var.set(&with_scale(&data, value.scale())?)?;
            }
        }
        Ok(())
    }

    /// The parameters, if `tree` has a value of the same shape and dtype for each of their names, and no other.
    ///
    /// # Errors
    /// As [`ScaledVarMap::load_tree`].
    pub fn check_tree(&self, tree: &ScaledTree) -> Result<Vec<ScaledVar>> {
        let vars = self.vars();
        let missing = vars.iter().map(ScaledVar::name);
        let missing = missing.filter(|name| tree.get(name).is_none());
        let missing: Vec<String> = missing.map(str::to_string).collect();
        let unused = tree.iter().map(|(name, _)| name);
        let unused = unused.filter(|name| !self.contains_tensor(name));
        let unused: Vec<String> = unused.map(str::to_string).collect();
        if !(missing.is_empty() && unused.is_empty()) {
            return Err(FilesError::UnmatchedNames { missing, unused }.into());
        }
        for var in &vars {
            let Some(value) = tree.get(var.name()) else {
                continue;
            };
            if value.dims() != var.dims() {
                let expected = format!("{:?}, that of the parameter", var.dims());
                return Err(tensor_shape(var.name(), value.dims(), expected));
            }
            if value.dtype() != var.dtype().into() {
                let expected = format!("{}, that of the parameter", var.dtype().as_str());
                let got = value.dtype().to_string();
                return Err(tensor_dtype(var.name(), &got, expected));
            }
        }
        Ok(vars)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, ScaledVar>> {
        self.vars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimpleBackend for ScaledVarMap {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        check_dtype(name, dtype)?;
        let mut vars = self.lock();
        if let Some(var) = vars.get(name) {
            if var.dims() != shape.dims() {
                let expected = format!("{:?}", shape.dims());
                return Err(tensor_shape(name, var.dims(), expected).into());
            }
            if var.dtype() != dtype {
                let got = var.dtype().as_str();
                return Err(tensor_dtype(name, got, dtype.as_str()).into());
            }
            return Ok(var.data_var().as_tensor().clone());
        }
        let start = init.var(shape, DType::F32, device)?;
        let var = ScaledVar::rescaled(name, &start, dtype)?;
        let data = var.data_var().as_tensor().clone();
        vars.insert(name.to_string(), var);
        Ok(data)
    }

    /// Works only for existing parameters.
    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let var = ScaledVarMap::get(self, name)?;
        let (dims, device) = (var.dims(), self.device.clone());
        SimpleBackend::get(self, dims.into(), name, Init::Const(0.), dtype, &device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}
