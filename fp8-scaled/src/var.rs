//! A trainable scaled tensor.

use super::data_norm::{Norm, norm_of};
use super::error::{Error, Result, shape};
use super::value::{Casts, Node, Scaled};
use super::version::Version;
use candle_core::{DType, Device, Tensor, TensorId, Var};
use fp8_core::scaled::Scale;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// All parameters by the tensor ids of their data. The constructors of layers get plain tensors from a `VarBuilder`, and look up their
/// parameters here once ([`Parameter::of`](super::Parameter::of)).
static PARAMETERS: Mutex<Option<HashMap<TensorId, Weak<Inner>>>> = Mutex::new(None);

/// A parameter of scaled arithmetic: data that an optimizer changes in place, and their scale. Clones are the same parameter.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// let w = Tensor::new(&[0.02f32, -0.05, 0.03], &Device::Cpu)?;
/// let w = ScaledVar::rescaled("w", &w, DType::F16)?;
/// assert_eq!(w.scale().to_f32(), 2f32.powi(-5)); // below 0.0356, the root of the mean square
/// assert!((w.value().to_vec1()?[1] + 0.05).abs() < 1e-4);
/// # Ok::<(), fp8_scaled::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ScaledVar(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: Arc<str>,
    var: Var,
    node: Arc<Node>,
    current: Mutex<Current>,
}

#[derive(Debug, Clone)]
struct Current {
    scale: Scale,
    /// FP8 copies of the current data.
    casts: Arc<Casts>,
    /// What values of the current data remember.
    data: Arc<Version>,
    /// How often the data were changed.
    version: u64,
}

impl ScaledVar {
    /// A parameter with `x` for data and the scale 1.
    ///
    /// # Errors
    /// If `x` is not f32, bf16, f16 or f64.
    pub fn new(name: impl Into<String>, x: &Tensor) -> Result<Self> {
        Self::from_scaled(name, &Scaled::from_parts(x, 1.0)?)
    }

    /// A parameter of the value of `x`, in `dtype`, whose scale is the power of two below the root mean square of `x`, however small or
    /// large that is. Zeros have the scale 0, so that sums with them take the other operand's scale.
    ///
    /// # Errors
    /// If `x` or `dtype` is not f32, bf16, f16 or f64.
    pub fn rescaled(name: impl Into<String>, x: &Tensor, dtype: DType) -> Result<Self> {
        Self::from_scaled(name, &sized(x)?.astype(dtype)?)
    }

    /// A parameter with data and scale of `x`, copied.
    ///
    /// # Errors
    /// [`Error::Fp8Parameter`] if the data of `x` are FP8.
    pub fn from_scaled(name: impl Into<String>, x: &Scaled) -> Result<Self> {
        if let Some(codes) = x.codes() {
            return Err(Error::Fp8Parameter {
                name: name.into(),
                got: codes.format(),
            });
        }
        let data = x.data()?;
        let name: String = name.into();
        let name: Arc<str> = name.into();
        let inner = Arc::new(Inner {
            name: name.clone(),
            node: Node::leaf(data.dims()),
            var: Var::from_tensor(&data.copy()?)?,
            current: Mutex::new(Current {
                scale: x.scale(),
                casts: Arc::default(),
                data: Version::new(name),
                version: 0,
            }),
        });
        let mut parameters = PARAMETERS.lock().unwrap_or_else(PoisonError::into_inner);
        let parameters = parameters.get_or_insert_default();
        if parameters.len() == parameters.capacity() {
            // Remove parameters that no longer exist before the table grows.
            parameters.retain(|_, parameter| parameter.strong_count() > 0);
        }
        parameters.insert(inner.var.id(), Arc::downgrade(&inner));
        Ok(Self(inner))
    }

    /// The parameter whose data are `tensor`: the tensor of [`ScaledVar::data_var`] or a clone of it, as the constructor of a layer gets it
    /// from a `VarBuilder`. None for other tensors, and after the last clone of the parameter was dropped.
    pub fn of(tensor: &Tensor) -> Option<Self> {
        let parameters = PARAMETERS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = parameters.as_ref()?.get(&tensor.id())?.upgrade();
        found.map(Self)
    }

    /// Its name in checkpoints.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The value, as a leaf of the graph. It shares the data, which change in place: once they have changed, it is an error
    /// ([`Error::ChangedParameter`]) to read this value, or to differentiate what was computed from it. [`Scaled::to_tensor`] copies.
    pub fn value(&self) -> Scaled {
        let current = self.current().clone();
        let Current {
            scale, casts, data, ..
        } = current;
        let mut value = Scaled::new(self.0.var.as_tensor().detach(), scale);
        value.casts = casts;
        value.origin = Some(data);
        value.node = Some(self.0.node.clone());
        value
    }

    /// The current scale.
    pub fn scale(&self) -> Scale {
        self.current().scale
    }

    /// The dtype of the data.
    pub fn dtype(&self) -> DType {
        self.0.var.dtype()
    }

    /// The sizes of the dimensions.
    pub fn dims(&self) -> &[usize] {
        self.0.var.dims()
    }

    /// Where the data are.
    pub fn device(&self) -> &Device {
        self.0.var.device()
    }

    /// Sets the value, in the dtype of this parameter.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if `x` has another shape.
    pub fn set(&self, x: &Scaled) -> Result<()> {
        if x.dims() != self.dims() {
            return Err(shape(
                "ScaledVar::set",
                "the value",
                format!("{:?}, as `{}` has", self.dims(), self.name()),
                x.dims(),
            ));
        }
        self.0.var.set(&x.astype(self.dtype())?.data()?)?;
        self.changed(x.scale());
        Ok(())
    }

    /// Sets the value to `x`, at the scale that [`ScaledVar::rescaled`] gives it.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if `x` has another shape; if it is not f32, bf16, f16 or f64.
    pub fn set_rescaled(&self, x: &Tensor) -> Result<()> {
        self.set(&sized(x)?)
    }

    /// The data, for an optimizer that changes them in place and calls [`ScaledVar::changed`] afterwards.
    pub fn data_var(&self) -> &Var {
        &self.0.var
    }

    /// Announces new data and their scale, so that new FP8 copies are made and no earlier value is taken for theirs.
    pub fn changed(&self, scale: Scale) {
        let mut current = self.current();
        current.data.end();
        *current = Current {
            scale,
            casts: Arc::default(),
            data: Version::new(self.0.name.clone()),
            version: current.version + 1,
        };
    }

    /// How often [`ScaledVar::changed`] was called, by [`ScaledVar::set`] too.
    pub fn version(&self) -> u64 {
        self.current().version
    }

    pub(super) fn id(&self) -> u64 {
        self.0.node.id
    }

    fn current(&self) -> std::sync::MutexGuard<'_, Current> {
        (self.0.current.lock()).unwrap_or_else(PoisonError::into_inner)
    }
}

/// `x` at the power of two below its root mean square. One rescaling moves a factor of 2^-14 at the least, so it may take several.
fn sized(x: &Tensor) -> Result<Scaled> {
    // Rescaling would round 16-bit data.
    let wide = match x.dtype() {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?,
        _ => x.clone(),
    };
    let mut x = Scaled::from_parts(&wide, 1.0)?;
    if x.elem_count() == 0 {
        return Ok(x);
    }
    loop {
        if norm_of(&x.data()?, Norm::Max)? == 0.0 {
            return Scaled::zeros(wide.shape(), wide.dtype(), wide.device());
        }
        // Start with the largest magnitude: squares may overflow.
        let next = x.dynamic_rescale_max()?;
        if next.scale() == x.scale() {
            return next.dynamic_rescale_l2();
        }
        x = next;
    }
}
