//! Which products of attention have FP8 operands, and the operands as kernels read them.

use candle_core::Tensor;
use fp8_core::{Format, FormatPair};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Which products of attention multiply FP8 values, and in which formats.
///
/// ```text
/// scores              S  = q k^T            P = softmax(softmax_scale * S), after dropout
/// values              y  = P v
/// grad_probabilities  dP = dy v^T           dS = P * (dP - rowsum(P * dP))
/// grad_inputs         dq = softmax_scale * dS k    dk = softmax_scale * dS^T q    dv = P^T dy
/// ```
///
/// Both operands of such a product are cast: q, k, v and P to `format`, dy and dS to `grad_format`. **Every row of an operand has a
/// scale of its own**, from the row's amax (current scaling): the features of one token of one head for q, k, v and dy, the keys of one
/// query for P and dS. It is the least power of two under which nothing saturates
/// ([`mx_dequant_scale_rceil`](fp8_core::mx_dequant_scale_rceil)), rounding is to the nearest, and gradients pass the casts unchanged.
/// So
/// - codes of a token depend on nothing beside it: neither on later tokens, which causal attention must not see, nor on the batch,
///   nor on whether keys come from a cache;
/// - a code times its scale is exact in bf16. Products are exact, and sums are in f32. (Units of bf16 take magnitudes below `2^-126` as
///   zero, as they do with operands in high precision);
/// - a row with an Inf or a NaN becomes NaN, which reaches the result.
///
/// Other products have operands as [`AttentionOptions::operands`](crate::ops::AttentionOptions) says. The softmax, its sums and
/// `rowsum` are in f32. If all uses of q, k and v in the backward pass are FP8, it keeps their codes (a byte for each value, and four for
/// each row) and nothing else.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::ops::{AttentionOptions, AttentionProducts, attention};
/// let x = Tensor::randn(0f32, 1.0, (1, 2, 5, 16), &Device::Cpu)?;
/// let options = AttentionOptions::default().with_causal(true).with_products(AttentionProducts::all());
/// let y = attention(&x, &x, &x, options)?;
/// // The first token sees itself alone: its result is its row of v, rounded to E4M3.
/// let (y, v) = (y.narrow(2, 0, 1)?, x.narrow(2, 0, 1)?);
/// let error = (y - &v)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(error > 0.0 && error <= v.abs()?.max_all()?.to_scalar::<f32>()? / 16.0);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct AttentionProducts {
    /// Dot products of queries and keys, in both passes.
    pub scores: bool,
    /// The sums of the values.
    pub values: bool,
    /// Dot products of the result's gradient and the values.
    pub grad_probabilities: bool,
    /// The gradients of q, k and v.
    pub grad_inputs: bool,
    /// The format of q, k, v and P. Default E4M3.
    pub format: Format,
    /// The format of dy and dS. Default E4M3: with a scale for each row, precision matters more than range.
    pub grad_format: Format,
}

impl Default for AttentionProducts {
    fn default() -> Self {
        Self::none()
    }
}

impl AttentionProducts {
    /// No FP8 product.
    pub const fn none() -> Self {
        Self {
            scores: false,
            values: false,
            grad_probabilities: false,
            grad_inputs: false,
            format: Format::E4M3,
            grad_format: Format::E4M3,
        }
    }

    /// All products in FP8.
    pub const fn all() -> Self {
        Self {
            scores: true,
            values: true,
            grad_probabilities: true,
            grad_inputs: true,
            ..Self::none()
        }
    }

    /// The same with or without FP8 scores.
    pub const fn with_scores(self, scores: bool) -> Self {
        Self { scores, ..self }
    }

    /// The same with or without FP8 sums of the values.
    pub const fn with_values(self, values: bool) -> Self {
        Self { values, ..self }
    }

    /// The same with or without FP8 gradients of the probabilities.
    pub const fn with_grad_probabilities(self, grad_probabilities: bool) -> Self {
        Self {
            grad_probabilities,
            ..self
        }
    }

    /// The same with or without FP8 products for the gradients of q, k and v.
    pub const fn with_grad_inputs(self, grad_inputs: bool) -> Self {
        Self {
            grad_inputs,
            ..self
        }
    }

    /// The same with another format of q, k, v and P.
    pub const fn with_format(self, format: Format) -> Self {
        Self { format, ..self }
    }

    /// The same with another format of gradients.
    pub const fn with_grad_format(self, grad_format: Format) -> Self {
        Self {
            grad_format,
            ..self
        }
    }

    /// The same in the formats of `pair`.
    pub fn in_pair(self, pair: FormatPair) -> Self {
        Self {
            format: self.format.in_pair(pair),
            grad_format: self.grad_format.in_pair(pair),
            ..self
        }
    }

    /// Whether any product is FP8.
    pub const fn any(&self) -> bool {
        self.scores || self.values || self.grad_probabilities || self.grad_inputs
    }

    /// Whether all operands of the forward pass are FP8 values.
    pub(crate) fn all_forward(&self) -> bool {
        self.scores && self.values
    }

    /// Whether all operands of the backward pass are.
    pub(crate) fn all_backward(&self) -> bool {
        self.scores && self.grad_probabilities && self.grad_inputs
    }
}

/// `none`, or the FP8 products joined by `+` (`all` for all four) and the formats, the second only if it differs: `all_e4m3`,
/// `scores+values_e4m3`, `all_e4m3_e5m2`.
impl fmt::Display for AttentionProducts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let products = [
            (self.scores, "scores"),
            (self.values, "values"),
            (self.grad_probabilities, "grad_probabilities"),
            (self.grad_inputs, "grad_inputs"),
        ];
        let chosen = products.into_iter().filter(|(fp8, _)| *fp8);
        let names: Vec<&str> = chosen.map(|(_, name)| name).collect();
        match names.len() {
            0 => return f.write_str("none"),
            4 => f.write_str("all")?,
            _ => f.write_str(&names.join("+"))?,
        }
        write!(f, "_{}", self.format.name())?;
        match self.grad_format == self.format {
            true => Ok(()),
            false => write!(f, "_{}", self.grad_format.name()),
        }
    }
}

/// One operand of attention: q, k, v or the gradient of the result, in the layout of the call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Operand<'a> {
    Values(&'a Tensor),
    /// The values of codes, which kernels make as they read: for an operand whose codes nothing else reads.
    Rounded(&'a Tensor, Format),
    Codes {
        /// U8, contiguous.
        codes: &'a Tensor,
        /// f32, one for each row of features. That of a cast for FP8 products is a power of two.
        dequant_scale: &'a Tensor,
        format: Format,
    },
}

/// What the products of a backward pass read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackwardOperands<'a> {
    /// q and k.
    pub(crate) scores: [Operand<'a>; 2],
    /// The gradient of the result, and v.
    pub(crate) grad_probabilities: [Operand<'a>; 2],
    /// q, k and the gradient of the result.
    pub(crate) grad_inputs: [Operand<'a>; 3],
}
