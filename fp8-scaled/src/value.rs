//! A tensor of scaled arithmetic.

use super::error::{Result, unsupported};
use super::options::Options;
use super::version::Version;
use candle_core::{DType, Device, Shape, Storage, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_candle::device::{Codes, backend};
use fp8_core::scaled::{Scale, constant_rule};
use fp8_core::{Contraction, Format, Granularity};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A tensor as a pair of data and scale: `value = data * scale`. See [the crate](crate).
///
/// Clones are cheap and share the data. A clone of a tracked value is the same value of the graph.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::Scaled;
/// let data = Tensor::new(&[1f32, -1.5], &Device::Cpu)?;
/// let x = Scaled::from_parts(&data, 0.25)?;
/// assert_eq!(x.to_tensor(DType::F32)?.to_vec1::<f32>()?, [0.25, -0.375]);
/// assert!(Scaled::from_parts(&data, 3.0).is_err()); // not a power of two
/// # Ok::<(), fp8_scaled::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Scaled {
    pub(super) data: Data,
    scale: Scale,
    pub(super) node: Option<Arc<Node>>,
    pub(super) casts: Arc<Casts>,
    /// Set if the data are in the memory of a parameter, which changes in place.
    pub(super) origin: Option<Arc<Version>>,
}

/// Data without a graph.
#[derive(Debug, Clone)]
pub(super) enum Data {
    Float(Tensor),
    /// Tensorwise, with the dequant_scale 1.
    Fp8(Fp8Tensor),
}

/// FP8 copies of the data, made at first use: every product that reads a tensor shares one cast.
#[derive(Debug, Default)]
pub(super) struct Casts(Mutex<Vec<Cast>>);

/// The codes of one cast.
#[derive(Debug, Clone)]
pub(super) struct Cast {
    /// The values: Inf has become the largest number.
    pub(super) saturated: Fp8Tensor,
    /// For products. With Inf or NaN among the data its dequant_scale is NaN, so that no product hides them.
    pub(super) operand: Fp8Tensor,
}

/// The value `x` at a scale: `data = x / scale`. Without a scale, the data are `x` and the scale is 1.
///
/// # Errors
/// If `x` is not f32, bf16, f16 or f64, or the scale is not valid ([`ScaledError`](fp8_core::scaled::ScaledError)).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_scaled::as_scaled;
/// let x = Tensor::new(&[3f32, 6.0], &Device::Cpu)?;
/// assert_eq!(as_scaled(&x, 2.0)?.data()?.to_vec1::<f32>()?, [1.5, 3.0]);
/// assert_eq!(as_scaled(&x, None)?.scale().to_f32(), 1.0);
/// # Ok::<(), fp8_scaled::Error>(())
/// ```
pub fn as_scaled(x: &Tensor, scale: impl Into<Option<f32>>) -> Result<Scaled> {
    let plain = Scaled::from_parts(x, 1.0)?;
    match scale.into() {
        None => Ok(plain),
        Some(scale) => plain.set_scaling(scale),
    }
}

impl Scaled {
    /// Combines data and scale; the value is their product. Candle's own FP8 tensors become E4M3 codes.
    ///
    /// # Errors
    /// [`fp8_candle::Error::DType`] if `data` is not f32, bf16, f16, f64 or F8E4M3, [`Error::Scaled`](crate::Error::Scaled) if `scale` is not a power of two and
    /// the check is not [lenient](fp8_core::scaled::ScaleCheck), or is negative, infinite or NaN; a zero scale needs a lenient
    /// check too, and [`Scaled::zeros`] does not.
    pub fn from_parts(data: &Tensor, scale: f32) -> Result<Self> {
        let scale = Options::current().check(scale)?;
        match data.dtype() {
            DType::F32 | DType::BF16 | DType::F16 | DType::F64 => {
                Ok(Self::new(data.detach(), scale))
            }
            DType::F8E4M3 => {
                let codes = backend(data.device())?.f8e4m3_to_codes(data)?;
                Self::of_codes(&codes, Format::E4M3, scale)
            }
            got => Err(unsupported(
                "Scaled::from_parts",
                "data",
                "f32, bf16, f16, f64 or f8e4m3; use Scaled::from_codes for FP8 codes",
                got,
            )),
        }
    }

    /// Combines FP8 codes, U8 of any shape, and a scale.
    ///
    /// # Errors
    /// As [`Scaled::from_parts`].
    pub fn from_codes(codes: &Tensor, format: Format, scale: f32) -> Result<Self> {
        Self::of_codes(codes, format, Options::current().check(scale)?)
    }

    fn of_codes(codes: &Tensor, format: Format, scale: Scale) -> Result<Self> {
        let one = Tensor::ones(1, DType::F32, codes.device())?;
        let data = Fp8Tensor::from_parts(
            codes.clone(),
            format,
            Granularity::Tensorwise,
            Contraction::Cols,
            one,
        )?;
        Ok(Self::new_fp8(data, scale))
    }

    /// Zeros with the scale 0, under strict checks too.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let data = Tensor::zeros(shape, dtype, device)?;
        Ok(Self::from_parts(&data, 1.0)?.at(Scale::ZERO))
    }

    /// A constant as a scalar: the scale is the largest power of two not above its magnitude, the data are in [1, 2).
    pub fn constant(value: f64, dtype: DType, device: &Device) -> Result<Self> {
        let (scale, mantissa) = constant_rule(value);
        let data = Tensor::new(f64::from(mantissa), device)?;
        let data = match (dtype, scale.is_zero()) {
            // With all digits of f64.
            (DType::F64, false) => Tensor::new(value / f64::from(scale.to_f32()), device)?,
            _ => data.to_dtype(dtype)?,
        };
        Ok(Self::from_parts(&data, 1.0)?.at(scale))
    }

    /// A constant in the dtype of operations on `like`.
    pub(super) fn constant_like(value: f64, like: &Self) -> Result<Self> {
        Self::constant(value, like.compute_dtype(), like.device())
    }

    /// Detached float data with its scale.
    pub(super) fn new(data: Tensor, scale: Scale) -> Self {
        Self::of(Data::Float(data), scale)
    }

    fn of(data: Data, scale: Scale) -> Self {
        Self {
            data,
            scale,
            node: None,
            casts: Arc::default(),
            origin: None,
        }
    }

    /// The same data at another scale, which is another value; without a graph.
    pub(super) fn at(&self, scale: Scale) -> Self {
        Self {
            scale,
            node: None,
            ..self.clone()
        }
    }

    /// Codes with a dequant_scale of 1.
    pub(super) fn new_fp8(data: Fp8Tensor, scale: Scale) -> Self {
        Self::of(Data::Fp8(data), scale)
    }

    /// The data in `dtype`, not multiplied by the scale.
    pub(super) fn float(&self, dtype: DType) -> Result<Tensor> {
        self.check_origin()?;
        match &self.data {
            Data::Float(data) => super::kernels::convert("cast", data, 1.0, dtype),
            Data::Fp8(data) => Ok(data.dequantize(dtype)?),
        }
    }

    /// An error if the data are those of a parameter that has changed.
    pub(super) fn check_origin(&self) -> Result<()> {
        match &self.origin {
            Some(version) => version.check("Scaled::data"),
            None => Ok(()),
        }
    }

    /// Whether `tensor` is in the memory of the data.
    pub(super) fn shares(&self, tensor: &Tensor) -> bool {
        match &self.data {
            Data::Float(data) => address(data) == address(tensor),
            Data::Fp8(_) => false,
        }
    }

    /// The dtype of results computed from this alone: that of the data, f16 for FP8.
    pub(super) fn compute_dtype(&self) -> DType {
        match &self.data {
            Data::Float(data) => data.dtype(),
            Data::Fp8(_) => DType::F16,
        }
    }

    /// The scale of the value.
    pub fn scale(&self) -> Scale {
        self.scale
    }

    /// The same value outside any graph.
    pub fn detach(&self) -> Self {
        self.at(self.scale)
    }

    /// Whether gradients flow from here to a variable.
    pub fn is_tracked(&self) -> bool {
        self.node.is_some()
    }

    /// Whether operations on this value record a graph.
    pub(super) fn is_recorded(&self) -> bool {
        self.is_tracked() && Options::current().settings.gradients
    }

    /// The data as FP8 codes of `format`, rounded to nearest even and saturated, in `[product of the leading dims, last dim]`;
    /// one copy is kept with the value.
    pub(super) fn cast(&self, format: Format) -> Result<Cast> {
        if let Data::Fp8(data) = &self.data
            && data.format() == format
        {
            let (saturated, operand) = (data.clone(), data.clone());
            return Ok(Cast { saturated, operand });
        }
        let mut casts = (self.casts.0.lock()).unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(cast) = (casts.iter()).find(|cast| cast.saturated.format() == format) {
            return Ok(cast.clone());
        }
        let x = self.data()?.contiguous()?;
        let backend = backend(x.device())?;
        let one = Tensor::ones(1, DType::F32, x.device())?;
        let scheme = (Granularity::Tensorwise, Contraction::Cols);
        let orientation = backend.orientation(Contraction::Cols, true);
        let rounded = fp8_core::Cast::new(format);
        let (codes, amax) = backend.quantize_with_amax(&x, &one, &rounded, orientation)?;
        // 1, but NaN where the amax is Inf or NaN.
        let finite = amax.affine(0., 1.)?;
        let with = |codes: Codes, dequant_scale| {
            Fp8Tensor::from_codes(codes, x.dims(), format, scheme, dequant_scale)
        };
        let cast = Cast {
            saturated: with(codes.clone(), one)?,
            operand: with(codes, finite)?,
        };
        Options::current().count_cast();
        casts.push(cast.clone());
        Ok(cast)
    }
}

/// The address of a tensor's storage: equal for tensors that share memory.
fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0) as usize
}

/// Computes the cotangents of the parents from that of the result; the flags say which are needed.
pub(super) type Vjp = dyn Fn(&Scaled, &[bool]) -> Result<Vec<Option<Scaled>>> + Send + Sync;

/// The operation that made a tracked value.
pub(super) struct Node {
    /// Increases with time: a node has a larger id than its parents.
    pub(super) id: u64,
    pub(super) op: &'static str,
    pub(super) dims: Vec<usize>,
    pub(super) parents: Vec<Option<Arc<Node>>>,
    /// None for a leaf, and after a backward pass has used it.
    pub(super) vjp: Mutex<Option<Arc<Vjp>>>,
    pub(super) is_leaf: bool,
    /// The data of parameters that the operation has read, and may read again in its derivative.
    pub(super) reads: Vec<Arc<Version>>,
    /// The settings under which the operation ran; its derivative runs under them too.
    pub(super) options: Arc<Options>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} #{}", self.op, self.id)
    }
}

pub(super) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Node {
    /// The leaf of a variable.
    pub(super) fn leaf(dims: &[usize]) -> Arc<Self> {
        Arc::new(Self {
            id: next_id(),
            op: "variable",
            dims: dims.to_vec(),
            parents: vec![],
            vjp: Mutex::new(None),
            is_leaf: true,
            reads: vec![],
            options: Options::current(),
        })
    }
}

impl Drop for Node {
    /// Drops parents without recursion, since long graphs would overflow the stack.
    fn drop(&mut self) {
        let mut open = std::mem::take(&mut self.parents);
        while let Some(parent) = open.pop() {
            if let Some(mut parent) = parent.and_then(Arc::into_inner) {
                open.append(&mut parent.parents);
            }
        }
    }
}
