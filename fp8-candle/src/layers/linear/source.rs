//! A weight that is elsewhere.

use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::Quantized;
use candle_core::{DType, Device, Tensor};
use fp8_core::Contraction;

/// The weight of a linear layer that is elsewhere, for example in parts on several ranks. A layer fetches it in its forward pass, drops
/// it, and fetches it again in its backward pass. Where a forward pass is computed again right before its backward pass
/// ([`recompute`](crate::wide::recompute)), one fetch serves both.
///
/// In a group of ranks all ranks fetch the same weights in the same order.
pub trait WeightSource: std::fmt::Debug + Send + Sync {
    /// The name in messages.
    fn name(&self) -> &str;

    /// `[out_features, in_features]`.
    fn dims(&self) -> &[usize];

    /// The dtype of the values.
    fn dtype(&self) -> DType;

    /// Where the values arrive.
    fn device(&self) -> &Device;

    /// The variable that gets the gradient: for example this rank's part.
    fn variable(&self) -> &Tensor;

    /// The values, outside any graph.
    ///
    /// # Errors
    /// They cannot be fetched.
    fn values(&self) -> Result<Tensor>;

    /// The codes that `cast` makes of the values for a product over `contraction`, if the source can fetch codes for this cast: the
    /// same to the bit, recorded and counted as one cast.
    ///
    /// # Errors
    /// They cannot be fetched.
    fn codes(&self, cast: &Quantizer, contraction: Contraction) -> Result<Option<Quantized>>;

    /// The gradient of [`WeightSource::variable`], from that of the whole weight.
    ///
    /// # Errors
    /// It cannot be made.
    fn gradient(&self, whole: Tensor) -> Result<Tensor>;
}
