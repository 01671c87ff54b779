//! The backward pass that linear layers and convolutions share: which operands each product has, and which cast serves more
//! than one of them.

use super::plan::{GemmPlan, LinearPlan};
use super::product::recast;
use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::weight_version::Seen;
use candle_core::Tensor;
use fp8_core::Contraction::{self, Cols, Rows};

/// Casts from the forward pass that the backward pass can reuse.
#[derive(Debug, Clone)]
pub(crate) struct Saved<C> {
    pub(crate) input: Option<C>,
    pub(crate) weight: Option<C>,
    /// The values of the weight, where the backward pass reads them again.
    pub(crate) seen: Option<Seen>,
}

impl<C> Default for Saved<C> {
    fn default() -> Self {
        Self {
            input: None,
            weight: None,
            seen: None,
        }
    }
}

impl<C> Saved<C> {
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
        let serves = |gemm: &Option<GemmPlan>, first: &Quantizer| {
            gemm.as_ref().is_some_and(|gemm| first.serves(&gemm.b))
        };
        if weight_tracks && serves(&plan.grad_weight, &output.a) {
            self.input = Some(x8);
        }
        if x_tracks && serves(&plan.grad_input, &output.b) {
            self.weight = Some(w8);
        }
    }
}

/// A tensor that the backward pass casts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Input,
    Weight,
    GradOutput,
}

/// The operands of a backward product.
pub(crate) enum Operands<C> {
    /// No plan: both in high precision.
    HighPrecision,
    /// grad_output in high precision, the other one cast: the values are multiplied in f32.
    OneCast(C),
    /// Both cast.
    Cast {
        grad_output: C,
        other: C,
        use_fast_accum: bool,
    },
}

/// A layer in its backward pass.
pub(crate) trait Layer {
    /// A tensor that was cast.
    type Cast: Clone;

    /// Whether the weight has no state for casts, so that grad_input is a product in high precision.
    fn is_frozen(&self) -> bool {
        false
    }

    /// `which` for a product that sums over `contraction` as in a linear layer; with `both`, for the other one as well.
    fn cast(
        &self,
        which: Which,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<Self::Cast>;

    /// The sums of grad_output, or of what `cast` makes of it; then that comes too, for the products.
    fn grad_bias(&self, cast: Option<&Quantizer>) -> Result<(Tensor, Option<Self::Cast>)>;

    /// The sums of grad_output, and its cast, in one pass where a device has that; the cast sums over the columns, with `both` over the
    /// rows too.
    fn grad_bias_beside_cast(
        &self,
        _quantizer: &Quantizer,
        _both: bool,
    ) -> Result<Option<(Tensor, Self::Cast)>> {
        Ok(None)
    }

    /// In x's dtype.
    fn grad_input(&self, operands: Operands<Self::Cast>) -> Result<Tensor>;

    /// In the weight's dtype.
    fn grad_weight(&self, operands: Operands<Self::Cast>) -> Result<Tensor>;
}

/// Which gradients are needed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) input: bool,
    pub(crate) weight: bool,
    pub(crate) bias: bool,
}

/// The gradients of input, weight and bias.
pub(crate) fn gradients<L: Layer>(
    layer: &L,
    plan: &LinearPlan,
    saved: &Saved<L::Cast>,
    wanted: Wanted,
) -> Result<[Option<Tensor>; 3]> {
    let gemms = [&plan.output, &plan.grad_input, &plan.grad_weight];
    let recorders = gemms
        .into_iter()
        .flatten()
        .filter_map(|gemm| gemm.a.observers.recorder.as_ref());
    for recorder in recorders {
        recorder.step.note_backward();
    }
    // Kept for the second product if one copy serves both.
    let mut go8 = None;
    let mut gradients = [None, None, None];
    let of_input = plan.grad_input.as_ref().filter(|_| !layer.is_frozen());
    let both = of_input.is_some_and(|gemm| {
        let again = |second: &GemmPlan| gemm.a.serves(&second.a);
        wanted.weight && plan.grad_weight.as_ref().is_some_and(again)
    });
    if wanted.bias {
        let beside = match (plan.cast_for_bias(), of_input) {
            (None, Some(gemm)) if wanted.input && !plan.grad_output_in_high_precision => {
                layer.grad_bias_beside_cast(&gemm.a, both)?
            }
            _ => None,
        };
        let (grad, cast) = match beside {
            Some((grad, cast)) => (grad, Some(cast)),
            None => layer.grad_bias(plan.cast_for_bias())?,
        };
        gradients[2] = Some(grad);
        go8 = cast;
    }
    if wanted.input {
        let operands = match of_input {
            None => Operands::HighPrecision,
            Some(gemm) => {
                let other = match &saved.weight {
                    Some(saved) => saved.clone(),
                    None => layer.cast(Which::Weight, &gemm.b, Rows, false)?,
                };
                match plan.grad_output_in_high_precision {
                    true => Operands::OneCast(other),
                    false => {
                        let grad_output = match go8.take() {
                            Some(cast) => cast,
                            None => layer.cast(Which::GradOutput, &gemm.a, Cols, both)?,
                        };
                        go8 = both.then(|| grad_output.clone());
                        Operands::Cast {
                            grad_output,
                            other,
                            use_fast_accum: gemm.use_fast_accum,
                        }
                    }
                }
            }
        };
        let grad = layer.grad_input(operands)?;
        gradients[0] = Some(recast(grad, plan.results.grad_input.as_ref())?);
    }
    if wanted.weight {
        let operands = match &plan.grad_weight {
            None => Operands::HighPrecision,
            Some(gemm) => {
                let other = match &saved.input {
                    Some(saved) => saved.clone(),
                    None => layer.cast(Which::Input, &gemm.b, Rows, false)?,
                };
                match plan.grad_output_in_high_precision {
                    true => Operands::OneCast(other),
                    false => Operands::Cast {
                        grad_output: match go8 {
                            Some(cast) => cast,
                            None => layer.cast(Which::GradOutput, &gemm.a, Rows, false)?,
                        },
                        other,
                        use_fast_accum: gemm.use_fast_accum,
                    },
                }
            }
        };
        let grad = layer.grad_weight(operands)?;
        gradients[1] = Some(recast(grad, plan.results.grad_weight.as_ref())?);
    }
    Ok(gradients)
}
