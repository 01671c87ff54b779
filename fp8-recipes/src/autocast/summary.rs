//! What a step has cast.

use crate::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::StateTable;
use std::sync::Arc;

/// What was cast between the ends of two steps.
///
/// Counts of Inf and NaN stay on their device until [`StepSummary::non_finite`] asks for them.
#[derive(Debug, Clone, Default)]
pub struct StepSummary {
    pub(super) casts: u64,
    pub(super) layers: usize,
    /// Table, counts before and after.
    pub(super) counts: Vec<(Arc<StateTable>, Tensor, Tensor)>,
}

/// A tensor role in which casts saw Inf or NaN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonFinite {
    /// Path of the layer, a dot, the role: `blocks.0.fc.input`.
    pub slot: String,
    /// In how many casts.
    pub casts: u32,
}

impl StepSummary {
    /// Takes in what came later.
    pub(super) fn merge(&mut self, later: Self) {
        self.casts += later.casts;
        self.layers += later.layers;
        self.counts.extend(later.counts);
    }

    /// How many tensors were cast to FP8 in the forward passes of the step, and in those backward passes that ran before its
    /// end.
    pub fn casts(&self) -> u64 {
        self.casts
    }

    /// How many prepared layers were used.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Where casts saw Inf or NaN, under whatever recipe, since the end of the step before; backward passes that run after the
    /// end of their step are told of at the next one. Copies counts to the host.
    pub fn non_finite(&self) -> Result<Vec<NonFinite>> {
        let mut found = vec![];
        for (table, before, now) in &self.counts {
            let before = before.to_dtype(DType::U32)?.to_vec1::<u32>()?;
            let now = now.to_vec1::<u32>()?;
            // Rows may have come meanwhile.
            let before = before.into_iter().chain(std::iter::repeat(0));
            for ((name, now), before) in table.names().into_iter().zip(now).zip(before) {
                if now > before {
                    found.push(NonFinite {
                        slot: name.to_string(),
                        casts: now - before,
                    });
                }
            }
        }
        found.sort_by(|a, b| a.slot.cmp(&b.slot));
        found.dedup_by(|later, kept| {
            let same = later.slot == kept.slot;
            if same {
                kept.casts += later.casts;
            }
            same
        });
        Ok(found)
    }
}
