//! The rounding of scaled parameters and their moments, and counts of what it did.

use fp8_core::StochasticKey;
use serde::{Deserialize, Serialize};

/// Keeps the random bits apart from those of casts with the same seed.
const DOMAIN: u64 = 0x7363_616C_6564_6F70;

/// How a step rounds parameters and moments to 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RoundTo {
    /// To the nearest value: changes below half a unit in the last place are lost.
    Nearest,
    /// Up or down at random, so that the mean is the value itself. The random bits depend on the seed, the step, the parameter's place
    /// among the sorted names and the element's index, not on the number of threads.
    Stochastic {
        /// The seed of the random bits.
        seed: u64,
    },
}

impl Default for RoundTo {
    fn default() -> Self {
        Self::Stochastic { seed: 0 }
    }
}

impl RoundTo {
    /// The random bits for tensor number `tensor` (the parameter 0, then its moments) of parameter number `index` in a step.
    pub(super) fn key(self, step: u64, index: usize, tensor: u32) -> Option<StochasticKey> {
        match self {
            Self::Nearest => None,
            Self::Stochastic { seed } => Some(StochasticKey {
                seed: seed ^ DOMAIN,
                step: step as u32,
                tensor: 4 * index as u32 + tensor,
            }),
        }
    }
}

/// What the steps of an optimizer have done to data and scales since it was made or loaded.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// use fp8_optim::SgdConfig;
/// use fp8_optim::scaled::{ScaledOptimizer, ScaledSgd};
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
