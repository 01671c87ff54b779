//! What happened to data and scales.

/// What the steps of an optimizer have done to data and scales since it was made or loaded.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// use fp8::optim::SgdConfig;
/// use fp8::optim::scaled::{ScaledOptimizer, ScaledSgd};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Data of 2^12 are beyond the window of parameters.
/// let w = ScaledVar::new("w", &Tensor::full(4096f32, 4, &Device::Cpu)?.to_dtype(DType::F16)?)?;
/// let mut sgd = ScaledSgd::from_vars(vec![w.clone()], SgdConfig::default())?;
/// sgd.apply(&w.value().sum_all()?.backward()?)?;
/// assert_eq!((sgd.counts().rescaled, sgd.counts().saturated), (1, 0));
/// assert!(w.scale().to_f32() > 1.);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScaledCounts {
    /// Elements of parameters and moments that were beyond the range of their dtype and became its largest number.
    pub saturated: u64,
    /// How often a parameter got another scale.
    pub rescaled: u64,
}
