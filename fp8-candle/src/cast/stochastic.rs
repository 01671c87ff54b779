//! Which random bits a stochastic cast rounds with.

use crate::base::error::{Error, Result};
use crate::cast::state::Slot;
use crate::device::{backend, is_recorded};
use candle_core::Tensor;
use fp8_core::StochasticKey;

/// Stochastic rounding of a tensor role.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Stochastic {
    /// The row whose name the bits belong to, and that counts draws.
    pub slot: Slot,
    /// The seed of the run.
    pub seed: u64,
    /// How the bits of one cast differ from those of another.
    pub draw: Draw,
}

/// What the random bits of one cast are made from, besides the seed, the name of the row and the index of the element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Draw {
    /// The number of draws of the row so far, which is part of its checkpoints: other bits for every cast. Casts that run at
    /// the same time on several threads draw in the order in which they come. Each micro-batch of a step has bits and a number of its
    /// own, so that several processes which share a step's micro-batches draw what one process draws.
    Next {
        /// The place of the micro-batch in the step, over all processes; 0 if a step has one.
        micro_batch: u32,
    },
    /// The same number, without drawing: training after an evaluation does not depend on it. The number here tells the casts
    /// of one layer apart.
    Evaluation(u32),
    /// The values themselves, for weights: a weight has the same codes until it changes, however often it is cast, before and
    /// after a checkpoint is loaded. Where a device would have to copy them to the host, it is [`Draw::Next`] of the first micro-batch.
    OfValues,
}

// The kinds of draws differ in the key, not in the counter, which each uses whole.
const EVALUATION: u64 = 0x9e37_79b9_7f4a_7c15;
const OF_VALUES: u64 = 0xd1b5_4a32_d192_ed03;

impl Stochastic {
    pub(crate) fn new(slot: Slot, seed: u64) -> Self {
        Self {
            slot,
            seed,
            draw: Draw::Next { micro_batch: 0 },
        }
    }

    /// The key of a cast of `x`.
    pub(crate) fn key(&self, x: &Tensor) -> Result<StochasticKey> {
        if is_recorded(x.device()) {
            return Err(Error::NotRecordable(
                "stochastic casts count their draws on the host, so each run would round with the same bits".into(),
            ));
        }
        let seed = match self.draw {
            Draw::Next { micro_batch } => {
                return Ok(self.slot.next_stochastic_key(self.seed, micro_batch));
            }
            Draw::Evaluation(cast) => {
                let salt = EVALUATION.wrapping_mul(u64::from(cast) * 2 + 1);
                let key = self.slot.stochastic_key(self.seed ^ salt);
                return Ok(key);
            }
            Draw::OfValues => match backend(x.device())?.fingerprint(x)? {
                None => return Ok(self.slot.next_stochastic_key(self.seed, 0)),
                Some(values) => self.seed ^ OF_VALUES ^ values,
            },
        };
        Ok(StochasticKey {
            step: 0,
            ..self.slot.stochastic_key(seed)
        })
    }
}
