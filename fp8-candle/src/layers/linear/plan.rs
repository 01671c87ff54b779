//! What one call of a linear layer computes, and with which casts.

use super::source::WeightSource;
use crate::base::error::Result;
use crate::cast::packed::PackedWeight;
use crate::cast::quantizer::Quantizer;
use crate::cast::replay::RecordedCast;
use crate::cast::tensor::Fp8Tensor;
use crate::cast::weight_cache::WeightCache;
use crate::cast::weight_version::Seen;
use candle_core::Tensor;
use std::sync::Arc;

/// The casts of the operands of one GEMM, and its options.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GemmPlan {
    /// Operand A: x, grad_output or grad_output, see [`crate::layers::linear`].
    pub a: Quantizer,
    /// Operand B: weight, weight or x.
    pub b: Quantizer,
    /// Whether a device may accumulate with fewer bits than f32.
    pub use_fast_accum: bool,
}

impl GemmPlan {
    /// A GEMM of operands cast by `a` and `b`, accumulated in f32.
    pub fn new(a: Quantizer, b: Quantizer) -> Self {
        Self {
            a,
            b,
            use_fast_accum: false,
        }
    }

    /// The same GEMM with or without [`GemmPlan::use_fast_accum`].
    pub fn with_fast_accum(self, use_fast_accum: bool) -> Self {
        Self {
            use_fast_accum,
            ..self
        }
    }
}

/// How one call of a linear layer is computed. A GEMM without a plan runs in high precision.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LinearPlan {
    /// Path of the layer, for messages.
    pub path: Arc<str>,
    /// `x weight^T`.
    pub output: Option<GemmPlan>,
    /// `grad_output weight`.
    pub grad_input: Option<GemmPlan>,
    /// `grad_output^T x`.
    pub grad_weight: Option<GemmPlan>,
    /// Whether to dequantize and multiply in f32 instead of calling the FP8 GEMM: the reference path.
    pub emulate: bool,
    /// The casts of the results of the GEMMs.
    pub results: ResultCasts,
    /// Leaves grad_output in high precision: the backward GEMMs multiply it with their other operand, quantized and dequantized.
    pub grad_output_in_high_precision: bool,
    /// Sums the gradient of the bias from the cast grad_output, which needs a cast that serves both GEMMs; otherwise from
    /// grad_output in high precision.
    pub bias_from_cast: bool,
    /// Whether a weight that is [fetched](LinearWeight::Fetched) comes as codes where its source can send them.
    pub fetches_codes: bool,
    /// Whether an output in high precision is that of [`ops::linear`](crate::ops::linear), whose rows do not depend on each other,
    /// instead of candle's matmul.
    pub independent_rows: bool,
}

/// Casts of the results of an operator, quantized and dequantized at once, for studies of formats. `None` leaves a result
/// unchanged.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ResultCasts {
    /// Cast of the output, with its bias.
    pub output: Option<Quantizer>,
    /// Cast of the gradient of the input.
    pub grad_input: Option<Quantizer>,
    /// Cast of the gradient of the weight.
    pub grad_weight: Option<Quantizer>,
}

impl ResultCasts {
    /// The same casts with another one of the output.
    pub fn with_output(self, cast: impl Into<Option<Quantizer>>) -> Self {
        Self {
            output: cast.into(),
            ..self
        }
    }

    /// The same casts with another one of the gradient of the input.
    pub fn with_grad_input(self, cast: impl Into<Option<Quantizer>>) -> Self {
        Self {
            grad_input: cast.into(),
            ..self
        }
    }

    /// The same casts with another one of the gradient of the weight.
    pub fn with_grad_weight(self, cast: impl Into<Option<Quantizer>>) -> Self {
        Self {
            grad_weight: cast.into(),
            ..self
        }
    }
}

impl LinearPlan {
    /// A plan with all three GEMMs in high precision.
    pub fn new(path: impl Into<Arc<str>>) -> Self {
        Self {
            path: path.into(),
            output: None,
            grad_input: None,
            grad_weight: None,
            emulate: false,
            results: ResultCasts::default(),
            grad_output_in_high_precision: false,
            bias_from_cast: false,
            fetches_codes: false,
            independent_rows: false,
        }
    }

    /// The same plan with another GEMM for the output.
    pub fn with_output(self, gemm: impl Into<Option<GemmPlan>>) -> Self {
        Self {
            output: gemm.into(),
            ..self
        }
    }

    /// The same plan with another GEMM for the gradient of the input.
    pub fn with_grad_input(self, gemm: impl Into<Option<GemmPlan>>) -> Self {
        Self {
            grad_input: gemm.into(),
            ..self
        }
    }

    /// The same plan with another GEMM for the gradient of the weight.
    pub fn with_grad_weight(self, gemm: impl Into<Option<GemmPlan>>) -> Self {
        Self {
            grad_weight: gemm.into(),
            ..self
        }
    }

    /// The same plan with or without [`LinearPlan::emulate`].
    pub fn with_emulate(self, emulate: bool) -> Self {
        Self { emulate, ..self }
    }

    /// The same plan with other casts of results.
    pub fn with_results(self, results: ResultCasts) -> Self {
        Self { results, ..self }
    }

    /// The same plan with or without [`LinearPlan::grad_output_in_high_precision`].
    pub fn with_grad_output_in_high_precision(self, on: bool) -> Self {
        Self {
            grad_output_in_high_precision: on,
            ..self
        }
    }

    /// The cast whose result the gradient of the bias is summed from, which both backward GEMMs then use.
    pub(crate) fn cast_for_bias(&self) -> Option<&Quantizer> {
        let (first, second) = (self.grad_input.as_ref()?, self.grad_weight.as_ref()?);
        let shared = self.bias_from_cast && !self.grad_output_in_high_precision;
        (shared && first.a.serves(&second.a)).then_some(&first.a)
    }

    /// Whether the codes of the input serve the gradient of the weight too.
    pub(crate) fn saves_input(&self) -> bool {
        match (&self.output, &self.grad_weight) {
            (Some(output), Some(gemm)) => output.a.serves(&gemm.b),
            _ => false,
        }
    }

    /// Whether the gradient of the input is made from the values of the weight, not from the codes of the forward pass.
    pub(crate) fn rereads_weight(&self) -> bool {
        match (&self.output, &self.grad_input) {
            (Some(output), Some(gemm)) => !output.b.serves(&gemm.b),
            _ => true,
        }
    }

    /// The same plan with or without [`LinearPlan::fetches_codes`].
    pub fn with_fetches_codes(self, on: bool) -> Self {
        Self {
            fetches_codes: on,
            ..self
        }
    }

    /// The same plan with or without [`LinearPlan::independent_rows`].
    pub fn with_independent_rows(self, on: bool) -> Self {
        Self {
            independent_rows: on,
            ..self
        }
    }

    /// The same plan with or without [`LinearPlan::bias_from_cast`].
    pub fn with_bias_from_cast(self, on: bool) -> Self {
        Self {
            bias_from_cast: on,
            ..self
        }
    }
}

/// The weight of a linear layer.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum LinearWeight<'a> {
    /// High precision `[N, K]`, quantized in the call. A cache keeps the codes until the weight changes.
    HighPrecision(&'a Tensor, Option<&'a WeightCache>),
    /// High precision in any shape whose elements, in order, are those of the transpose `[K, N]`: flax's kernel. It is quantized as
    /// `[N, K]`, and its gradient has its own shape.
    Kernel {
        /// The values.
        kernel: &'a Tensor,
        /// K.
        in_features: usize,
        /// Keeps the codes until the kernel changes.
        cache: Option<&'a WeightCache>,
    },
    /// Frozen FP8 `[N, K]`.
    Fp8(&'a Fp8Tensor),
    /// Frozen FP8 `[N, K]`, packed for its device.
    Packed(&'a PackedWeight),
    /// `[N, K]`, fetched in the forward pass and again in the backward pass.
    Fetched(&'a Arc<dyn WeightSource>),
}

impl<'a> LinearWeight<'a> {
    /// The tensor that has a gradient.
    pub(crate) fn held(&self) -> Option<&'a Tensor> {
        match *self {
            Self::HighPrecision(weight, _) => Some(weight),
            Self::Kernel { kernel, .. } => Some(kernel),
            Self::Fetched(source) => Some(source.variable()),
            Self::Fp8(_) | Self::Packed(_) => None,
        }
    }
}

/// A kernel whose elements, in order, are those of `[.., K, N]`, as the detached view `[.., N, K]`; `leading` are the dimensions
/// before these two.
pub(crate) fn kernel_matrix(
    kernel: &Tensor,
    leading: &[usize],
    in_features: usize,
) -> Result<Tensor> {
    let rows: usize = leading.iter().product::<usize>() * in_features;
    let out_features = kernel.elem_count() / rows.max(1);
    let dims = [leading, &[in_features, out_features]].concat();
    let values = kernel.detach().contiguous()?.reshape(dims)?;
    Ok(values.transpose(leading.len(), leading.len() + 1)?)
}

/// The gradient of `[.., N, K]` in the shape of the kernel that [`kernel_matrix`] has made it from.
pub(crate) fn kernel_gradient(gradient: &Tensor, kernel: &Tensor) -> Result<Tensor> {
    let rank = gradient.rank();
    let gradient = gradient.transpose(rank - 2, rank - 1)?.contiguous()?;
    Ok(gradient.reshape(kernel.shape())?)
}

/// What the forward pass leaves for the backward pass: casts that it can reuse.
#[derive(Debug, Clone)]
pub(crate) struct SavedCasts<C> {
    pub(crate) input: Option<C>,
    pub(crate) weight: Option<C>,
    /// The values of the weight, where the backward pass reads them again.
    pub(crate) seen: Option<Seen>,
    /// Of a fetched weight: its cast in the forward pass, which the backward pass repeats.
    pub(crate) weight_again: Option<RecordedCast>,
    /// Of a fetched weight: its values, where the backward pass follows at once.
    pub(crate) weight_values: Option<Tensor>,
}

impl<C> Default for SavedCasts<C> {
    fn default() -> Self {
        Self {
            input: None,
            weight: None,
            seen: None,
            weight_again: None,
            weight_values: None,
        }
    }
}

impl<C> SavedCasts<C> {
    /// Checks values of the weight that the backward pass of layer `path` has read again.
    pub(crate) fn check(&self, weight: &Tensor, path: &str) -> Result<()> {
        match &self.seen {
            Some(seen) => seen.check(weight, path, "weight"),
            None => Ok(()),
        }
    }

    /// Keeps what the gradients will need. Each operand comes with whether it is in the graph.
    pub(crate) fn keep(
        &mut self,
        plan: &LinearPlan,
        output: &GemmPlan,
        (x_tracks, x8): (bool, C),
        (weight_tracks, w8): (bool, C),
    ) {
        let serves = |first: &Quantizer, gemm: &Option<GemmPlan>| {
            gemm.as_ref().is_some_and(|gemm| first.serves(&gemm.b))
        };
        if weight_tracks && serves(&output.a, &plan.grad_weight) {
            self.input = Some(x8);
        }
        if x_tracks && serves(&output.b, &plan.grad_input) {
            self.weight = Some(w8);
        }
    }
}
