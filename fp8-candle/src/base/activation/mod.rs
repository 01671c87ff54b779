//! The activations: their names and functions. An activation is added here, and in `kernels/curves.cuh`.
//!
//! A function of data `d` with a scale gives `f(scale * d) / scale`, which are data of the same scale. Plain values have the
//! constant scale 1, and the compiler drops the multiplications.

mod curve;
mod erf;
mod gelu_tanh;
mod sigmoid;

use crate::base::error::Result;
use crate::base::math::Real;
use candle_core::Tensor;
use sigmoid::{bound, sigmoid, sigmoid_slope};
use std::fmt;
use std::str::FromStr;

/// The nonlinearity between the two projections of a feed-forward network.
///
/// The gated ones read twice as many features, the gate before the value: `f(x[.., ..n]) * x[.., n..]`.
///
/// ```
/// use fp8_candle::ops::Activation;
/// assert!(Activation::SwiGlu.is_gated() && !Activation::Gelu.is_gated());
/// assert_eq!("swiglu".parse(), Ok(Activation::SwiGlu)); // Transformer Engine's names
/// assert_eq!(Activation::SquaredRelu.to_string(), "srelu");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Activation {
    /// GELU, tanh approximation; candle_nn's `NewGelu`.
    #[default]
    Gelu,
    /// GELU by the error function, `x (1 + erf(x / sqrt 2)) / 2`; candle_nn's `Gelu`, and `gelu` of Hugging Face's configurations.
    GeluErf,
    /// `x sigmoid(1.702 x)`.
    QuickGelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    SquaredRelu,
    /// `x sigmoid(x)`.
    Silu,
    /// `sigmoid(gate) value`.
    Glu,
    /// `gelu(gate) value`, tanh approximation.
    GeGlu,
    /// `gelu_erf(gate) value`.
    GeGluErf,
    /// `quick_gelu(gate) value`.
    QuickGeGlu,
    /// `max(gate, 0) value`.
    ReGlu,
    /// `max(gate, 0)^2 value`.
    SquaredReGlu,
    /// `silu(gate) value`.
    SwiGlu,
}

/// All activations with their names, which are Transformer Engine's where it has the activation, their functions, and whether they
/// are gated.
const ALL: [(Activation, &str, Curve, bool); 13] = [
    (Activation::Gelu, "gelu", Curve::Gelu, false),
    (Activation::GeluErf, "gelu_erf", Curve::GeluErf, false),
    (Activation::QuickGelu, "qgelu", Curve::QuickGelu, false),
    (Activation::Relu, "relu", Curve::Relu, false),
    (Activation::SquaredRelu, "srelu", Curve::SquaredRelu, false),
    (Activation::Silu, "silu", Curve::Silu, false),
    (Activation::Glu, "glu", Curve::Sigmoid, true),
    (Activation::GeGlu, "geglu", Curve::Gelu, true),
    (Activation::GeGluErf, "geglu_erf", Curve::GeluErf, true),
    (Activation::QuickGeGlu, "qgeglu", Curve::QuickGelu, true),
    (Activation::ReGlu, "reglu", Curve::Relu, true),
    (Activation::SquaredReGlu, "sreglu", Curve::SquaredRelu, true),
    (Activation::SwiGlu, "swiglu", Curve::Silu, true),
];

/// The function of one number behind an activation. Those of CUDA are in `kernels/curves.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Curve {
    Gelu,
    QuickGelu,
    Relu,
    SquaredRelu,
    Silu,
    Sigmoid,
    GeluErf,
}

/// Runs `$body` with functions `$value` and `$slope` for each curve.
macro_rules! with_curve {
    ($curve:expr, $R:ident, ($value:ident, $slope:ident) => $body:expr) => {
        match $curve {
            Curve::Gelu => with_curve!(@ $R, $value, $slope, gelu_tanh::value::<$R>, gelu_tanh::slope::<$R>, $body),
            Curve::GeluErf => with_curve!(@ $R, $value, $slope, erf::value::<$R>, erf::slope::<$R>, $body),
            Curve::QuickGelu => with_curve!(@ $R, $value, $slope, quick_gelu::<$R>, quick_gelu_slope::<$R>, $body),
            Curve::Relu => with_curve!(@ $R, $value, $slope, relu::<$R>, step::<$R>, $body),
            Curve::SquaredRelu => with_curve!(@ $R, $value, $slope, squared_relu::<$R>, squared_relu_slope::<$R>, $body),
            Curve::Silu => with_curve!(@ $R, $value, $slope, silu::<$R>, silu_slope::<$R>, $body),
            Curve::Sigmoid => with_curve!(@ $R, $value, $slope, scaled_sigmoid::<$R>, sigmoid_slope::<$R>, $body),
        }
    };
    (@ $R:ident, $value:ident, $slope:ident, $v:expr, $s:expr, $body:expr) => {
        $crate::base::simd::simd(#[inline(always)] || {
            let ($value, $slope) = ($v, $s);
            let _ = (&$value, &$slope);
            $body
        })
    };
}
use with_curve;

impl Curve {
    /// The same function of candle operations, which candle differentiates.
    pub(crate) fn composed(self, x: &Tensor) -> Result<Tensor> {
        let sigmoid = |x: &Tensor| -> Result<Tensor> {
            // 1 / (1 + e^-x), by tanh, which candle differentiates and which cannot overflow.
            Ok(((x * 0.5)?.tanh()? * 0.5)?.affine(1., 0.5)?)
        };
        Ok(match self {
            Self::Gelu => gelu_tanh::composed(x)?,
            Self::GeluErf => erf::composed(x)?,
            Self::QuickGelu => (x * sigmoid(&(x * 1.702)?)?)?,
            Self::Relu => x.relu()?,
            Self::SquaredRelu => x.relu()?.sqr()?,
            Self::Silu => (x * sigmoid(x)?)?,
            Self::Sigmoid => sigmoid(x)?,
        })
    }
}

impl Activation {
    /// All of them, in the order of the enum.
    pub fn all() -> impl Iterator<Item = Self> {
        ALL.into_iter().map(|(activation, ..)| activation)
    }

    /// Whether it reads twice as many features as it gives.
    pub fn is_gated(self) -> bool {
        ALL[self as usize].3
    }

    /// The function of its gate, or of its only input.
    pub(crate) fn curve(self) -> Curve {
        ALL[self as usize].2
    }

    /// The name by which it is parsed, and which errors and nodes have.
    pub fn name(self) -> &'static str {
        ALL[self as usize].1
    }

    /// The shape of the result for an input of shape `dims`.
    pub(crate) fn result_dims(self, dims: &[usize]) -> Vec<usize> {
        let mut dims = dims.to_vec();
        if let (true, Some(dim)) = (self.is_gated(), dims.last_mut()) {
            *dim /= 2;
        }
        dims
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Activation {
    type Err = UnknownActivation;

    fn from_str(text: &str) -> Result<Self, UnknownActivation> {
        let mut all = Self::all();
        let found = all.find(|activation| activation.name() == text);
        found.ok_or_else(|| UnknownActivation(text.to_string()))
    }
}

/// Unknown activation name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no activation `{0}`: gelu, gelu_erf, qgelu, relu, srelu, silu, glu, geglu, geglu_erf, qgeglu, reglu, sreglu or swiglu"
)]
pub struct UnknownActivation(pub String);

#[inline(always)]
fn silu<R: Real>(d: R, scale: R) -> R {
    d * sigmoid(d * scale)
}

#[inline(always)]
fn silu_slope<R: Real>(x: R) -> R {
    // 1 - sigmoid(x) without cancellation; beyond the limits it would be Inf * 0.
    let bounded = bound(x, 128.);
    sigmoid(x) * bounded.mul_add(sigmoid(-bounded), R::ONE)
}

#[inline(always)]
fn quick_gelu<R: Real>(d: R, scale: R) -> R {
    d * sigmoid(d * scale * R::from_f64(1.702))
}

#[inline(always)]
fn quick_gelu_slope<R: Real>(x: R) -> R {
    silu_slope(x * R::from_f64(1.702))
}

#[inline(always)]
fn relu<R: Real>(x: R, _: R) -> R {
    // NaN stays NaN.
    if x < R::ZERO { R::ZERO } else { x }
}

#[inline(always)]
fn step<R: Real>(x: R) -> R {
    if x > R::ZERO { R::ONE } else { R::ZERO }
}

#[inline(always)]
fn squared_relu<R: Real>(d: R, scale: R) -> R {
    let x = relu(d, scale);
    x * x * scale
}

#[inline(always)]
fn squared_relu_slope<R: Real>(x: R) -> R {
    let x = relu(x, R::ONE);
    x + x
}

/// The sigmoid is the only curve whose values do not grow with its argument.
#[inline(always)]
fn scaled_sigmoid<R: Real>(d: R, scale: R) -> R {
    sigmoid(d * scale) / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_order_of_the_enum() {
        for (index, (activation, ..)) in ALL.into_iter().enumerate() {
            assert_eq!(activation as usize, index);
        }
        assert_eq!(Activation::SwiGlu as usize + 1, ALL.len());
    }

    /// A curve without a case has no value, and one at another place of the list is another function.
    #[test]
    fn every_function_has_its_number_and_its_cases_in_the_kernels() {
        const KERNELS: &str = include_str!("../../../kernels/curves.cuh");
        let (_, list) = KERNELS
            .split_once("enum Curve : uint32_t {")
            .expect("the list");
        let (list, _) = list.split_once('}').expect("its end");
        let names: Vec<&str> = list.split(',').map(str::trim).collect();
        for (.., curve, _) in ALL {
            let mut name = String::new();
            for letter in format!("{curve:?}").chars() {
                if letter.is_uppercase() && !name.is_empty() {
                    name.push('_');
                }
                name.push(letter.to_ascii_uppercase());
            }
            assert_eq!(names.get(curve as usize), Some(&name.as_str()), "{names:?}");
            let cases = KERNELS.matches(&format!("(CURVE == {name})")).count();
            assert_eq!(cases, 2, "`CURVE == {name}` in value and slope");
        }
    }
}
