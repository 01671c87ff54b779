//! The choice between f32 and FP8 moments.

use serde::{Deserialize, Serialize};

/// How an optimizer keeps the moments of variables between steps.
///
/// | storage | bytes of a moment, per element |
/// |---|---|
/// | f32 | 4 |
/// | FP8 | 1.04: a code, and 5 bytes for each 128 codes |
///
/// The formula runs in f32 either way. Moments of f64 variables stay f64. A state with either kind of moments can be loaded into an
/// optimizer with the other: f32 moments are then rounded to nearest, and codes become the values that they stand for.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use fp8_optim::{AdamW, AdamWConfig, Fp8Moments, MomentStorage};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let moments = MomentStorage::Fp8(Fp8Moments::default());
/// let config = AdamWConfig { moments, ..AdamWConfig::default() };
/// let w = Var::ones((4, 128), DType::F32, &Device::Cpu)?;
/// let mut optimizer = AdamW::from_named(vec![("w".into(), w.clone())], config)?;
/// optimizer.apply(&w.sqr()?.sum_all()?.backward()?)?;
/// assert_eq!(optimizer.state()?["w.exp_avg"].dtype(), DType::U8);
/// assert_eq!(optimizer.state_bytes(), 2 * (512 + 4 * 5));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MomentStorage {
    /// f32.
    #[default]
    F32,
    /// E4M3 codes.
    Fp8(Fp8Moments),
}

/// Moments as E4M3 codes, in blocks of 128 elements of the flattened variable.
///
/// A block has its amax, in f32, and a curve: the element `x` has the code of `448 (|x| / amax)^k`, with its sign. `k` is 1, or with
/// [`Fp8Moments::expansion`] the one of 1/2, 1, 2 and 4 with which the block fills the range of E4M3 best. This is the dynamic range
/// expansion of COAT ([arXiv:2410.19313](https://arxiv.org/abs/2410.19313)), whose `k` is any number: powers and roots of two cost no
/// logarithms.
///
/// In a moment that is never negative, positive values never become 0: AdamW divides by the root of its second moment, so a 0 there would make
/// a step as large as `lr / eps`. A value that is too small gets the smallest positive code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Fp8Moments {
    /// Whether blocks choose a curve. Default: true.
    pub expansion: bool,
    /// Whether codes are rounded up or down at random, so that on the curve their mean is the value. (The mean of the decoded values is the
    /// value itself if the curve is straight, and otherwise differs from it by less than a step between codes.) With rounding to nearest, a
    /// second moment would stand still while its changes (0.1% of it in a step) are below half a step between codes. The random bits follow
    /// from the optimizer's seed, the step, the variable's place among the sorted names and the element's index. The moments of a variable
    /// share one draw, and so do elements 64 apart: moment number `i` uses the bits from number `5 i` on first, and from `5 i + 16` on in the
    /// second half of a block. Default: true.
    pub stochastic: bool,
}

impl Default for Fp8Moments {
    fn default() -> Self {
        Self {
            expansion: true,
            stochastic: true,
        }
    }
}

impl Fp8Moments {
    /// Replaces [`Fp8Moments::expansion`].
    pub fn with_expansion(mut self, expansion: bool) -> Self {
        self.expansion = expansion;
        self
    }

    /// Replaces [`Fp8Moments::stochastic`].
    pub fn with_stochastic(mut self, stochastic: bool) -> Self {
        self.stochastic = stochastic;
        self
    }
}
