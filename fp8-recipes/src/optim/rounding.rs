//! The rounding of scaled parameters and their moments.

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
    /// Up or down at random, so that the mean is the value itself. The bits follow from the seed, the step, the variable's place
    /// among the sorted names and the element's index: not from the number of threads.
    Stochastic {
        /// Another seed, other bits.
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
