//! Parameters by name, and the `VarBuilder` that makes them.

use super::error::Result;
use super::grads::ScaledGrads;
use super::tree::{ScaledTree, with_scale};
use super::var::ScaledVar;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use fp8_files::Error as FilesError;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What messages call this map.
const PLACE: &str = "the map of scaled parameters";

/// Named parameters of scaled arithmetic, in 16 bits (or f32) with a scale each. Clones share them.
///
/// Layers that are built on [`ScaledVarMap::var_builder`] are handed the tensors of the data, and find the parameter that each
/// belongs to by [`ScaledVar::of`]. **A layer that knows nothing of scales would compute with the data as if they were the values.**
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// use fp8_scaled::ScaledVarMap;
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
        got => Err(FilesError::TensorDType {
            tensor: tensor.to_string(),
            got: got.as_str().into(),
            expected: "f16, bf16 or f32, as scaled parameters have".into(),
        }
        .into()),
    }
}

/// The parameters, sorted by name: what an optimizer takes.
impl From<&ScaledVarMap> for Vec<ScaledVar> {
    fn from(params: &ScaledVarMap) -> Self {
        params.vars()
    }
}

impl ScaledVarMap {
    /// No parameters yet; those to come have data of `dtype`: f16, bf16 or f32.
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

    /// A `VarBuilder` that makes parameters here: at the first `get` of a name by its initialization hint, in f32, which is then
    /// rescaled to the power of two below its root mean square and narrowed (zeros to the scale 0). Every `get` of a name gives the same tensor, that of the
    /// data. [`VarBuilder::to_dtype`] changes the dtype of what is made next.
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

    /// How many parameters there are.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Adds a parameter that was made elsewhere, under its own name.
    ///
    /// # Errors
    /// [`FilesError::NameClash`](fp8_files::Error::NameClash) if there is another one of that name, [`FilesError::TensorDType`](fp8_files::Error::TensorDType) if its data are f64.
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

    /// Names of the parameters that have no gradient in `grads`, sorted; empty when all is well: what `fp8::check_gradients`
    /// is for plain parameters.
    pub fn missing_gradients(&self, grads: &ScaledGrads) -> Vec<String> {
        let vars = self.lock();
        let missing = vars.iter().filter(|(_, var)| grads.get(var).is_none());
        missing.map(|(name, _)| name.clone()).collect()
    }

    /// A copy of all values, data and scales as they are.
    ///
    /// # Errors
    /// candle's, when there is no memory for it.
    pub fn to_tree(&self) -> Result<ScaledTree> {
        let mut tree = ScaledTree::default();
        for var in self.vars() {
            let data = var.data_var().as_detached_tensor().copy()?;
            tree.insert(var.name(), with_scale(&data, var.scale())?);
        }
        Ok(tree)
    }

    /// Puts data and scales back as they are in `tree`, which has values for exactly these names. Nothing is changed unless all fit.
    ///
    /// # Errors
    /// [`FilesError::UnmatchedNames`](fp8_files::Error::UnmatchedNames), [`FilesError::TensorShape`](fp8_files::Error::TensorShape) or [`FilesError::TensorDType`](fp8_files::Error::TensorDType).
    pub fn load_tree(&self, tree: &ScaledTree) -> Result<()> {
        let vars = self.check_tree(tree)?;
        for var in vars {
            if let Some(value) = tree.get(var.name()) {
                let data = value.data()?.to_device(var.device())?;
                var.set(&with_scale(&data, value.scale())?)?;
            }
        }
        Ok(())
    }

    /// The parameters, if `tree` has values of their shapes and dtypes for exactly their names.
    ///
    /// # Errors
    /// As [`ScaledVarMap::load_tree`].
    pub fn check_tree(&self, tree: &ScaledTree) -> Result<Vec<ScaledVar>> {
        let vars = self.vars();
        let missing: Vec<String> = (vars.iter().map(ScaledVar::name))
            .filter(|name| tree.get(name).is_none())
            .map(str::to_string)
            .collect();
        let here = self.lock();
        let unused: Vec<String> = (tree.iter().map(|(name, _)| name))
            .filter(|name| !here.contains_key(*name))
            .map(str::to_string)
            .collect();
        drop(here);
        if !(missing.is_empty() && unused.is_empty()) {
            return Err(FilesError::UnmatchedNames { missing, unused }.into());
        }
        for var in &vars {
            let Some(value) = tree.get(var.name()) else {
                continue;
            };
            if value.dims() != var.dims() {
                return Err(FilesError::TensorShape {
                    tensor: var.name().to_string(),
                    got: value.dims().to_vec(),
                    expected: format!("{:?}, that of the parameter", var.dims()),
                }
                .into());
            }
            if value.dtype() != var.dtype().into() {
                return Err(FilesError::TensorDType {
                    tensor: var.name().to_string(),
                    got: value.dtype().to_string(),
                    expected: format!("{}, that of the parameter", var.dtype().as_str()),
                }
                .into());
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
                return Err(FilesError::TensorShape {
                    tensor: name.to_string(),
                    got: var.dims().to_vec(),
                    expected: format!("{:?}", shape.dims()),
                }
                .into());
            }
            if var.dtype() != dtype {
                return Err(FilesError::TensorDType {
                    tensor: name.to_string(),
                    got: var.dtype().as_str().into(),
                    expected: dtype.as_str().into(),
                }
                .into());
            }
            return Ok(var.data_var().as_tensor().clone());
        }
        let start = init.var(shape, DType::F32, device)?;
        let var = ScaledVar::rescaled(name, start.as_tensor(), dtype)?;
        let data = var.data_var().as_tensor().clone();
        vars.insert(name.to_string(), var);
        Ok(data)
    }

    /// Only of parameters that exist.
    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let var = ScaledVarMap::get(self, name)?;
        let (dims, device) = (var.dims(), self.device.clone());
        SimpleBackend::get(self, dims.into(), name, Init::Const(0.), dtype, &device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}
