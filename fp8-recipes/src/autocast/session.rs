//! One step: which layers were used between the opening and the closing of an outermost guard.

use super::ReductionGroup;
use crate::config::{CastConfig, ResolvedConfig};
use crate::error::Result;
use crate::state::{ExportStrategy, Fp8State};
use fp8_candle::DelayedSlot;
use fp8_candle::delayed::update_slots;
use fp8_core::{Format, Granularity};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub(crate) type Group = Option<Arc<dyn ReductionGroup>>;

/// A layer's use in a step.
#[derive(Debug)]
pub(crate) struct Use {
    pub(crate) state: Arc<Fp8State>,
    pub(crate) config: Arc<ResolvedConfig>,
    pub(crate) group: Group,
}

/// The layers that signed in since the guard opened.
#[derive(Debug, Default)]
pub(crate) struct Session(Mutex<Vec<Use>>);

impl Session {
    fn lock(&self) -> MutexGuard<'_, Vec<Use>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a use; the recipe of the last use of a layer counts, but one without delayed casts does not keep an
    /// earlier one from its update.
    pub(crate) fn sign_in(&self, new: Use) -> Result<()> {
        let grad_output = new.state.grad_output().clone();
        let gradient = SlotUse {
            format: format(&new.config.grad_output),
            config: new.config.clone(),
            group: new.group.clone(),
            slot: grad_output,
        };
        {
            let mut uses = self.lock();
            if let Some(old) = uses
                .iter_mut()
                .find(|old| Arc::ptr_eq(&old.state, &new.state))
            {
                if new.config.delayed.is_some() || old.config.delayed.is_none() {
                    *old = new;
                }
                return Ok(());
            }
            uses.push(new);
        }
        // The guard before this one may have been opened on another thread, which then keeps the list of gradients
        // to update; whatever the layer still holds belongs to that step.
        if gradient.slot.has_pending() {
            update(vec![gradient])
        } else {
            Ok(())
        }
    }

    fn take(&self) -> Vec<Use> {
        std::mem::take(&mut *self.lock())
    }

    /// Drops what was recorded.
    pub(crate) fn discard(&self) {
        for used in self.take() {
            used.state.input().discard_pending();
            used.state.grad_output().discard_pending();
            if used.state.weight().discard_pending() {
                // The cache takes the weight's amax for recorded, which is no longer so.
                used.state.cache.clear();
            }
        }
    }

    /// Updates inputs and weights; returns the gradients, which wait for their backward pass.
    pub(crate) fn update(&self) -> Result<PendingGradients> {
        let uses = self.take();
        let mut forward = vec![];
        let mut gradients = vec![];
        for used in uses {
            for (slot, format) in [
                (used.state.input(), format(&used.config.input)),
                (used.state.weight(), format(&used.config.weight)),
            ] {
                forward.push(SlotUse {
                    slot: slot.clone(),
                    format,
                    config: used.config.clone(),
                    group: used.group.clone(),
                });
            }
            gradients.push(PendingGradient {
                slot: Arc::downgrade(used.state.grad_output()),
                format: format(&used.config.grad_output),
                config: used.config,
                group: used.group,
            });
        }
        update(forward)?;
        Ok(PendingGradients(gradients))
    }

    /// Makes static scales of what was recorded. Every layer is finished; the first error is returned.
    pub(crate) fn finish_calibration(&self) -> Result<()> {
        let mut first = Ok(());
        for used in self.take() {
            let state = &used.state;
            let done = state
                .input()
                .finish_calibration(format(&used.config.input), true)
                .and_then(|()| {
                    // The weight is known whole; what it was before is of no interest.
                    state
                        .weight()
                        .finish_calibration(format(&used.config.weight), false)
                });
            // An empty batch records nothing.
            let complete = state.input().is_calibrated() && state.weight().is_calibrated();
            let as_now = (done.is_ok() && complete)
                .then(|| (strategy(&used.config), format(&used.config.input)));
            state.set_calibrated_as(as_now);
            if first.is_ok() {
                first = done;
            }
        }
        Ok(first?)
    }
}

/// Resolved casts all have a format; E4M3 stands for one that is disabled.
fn format(cast: &CastConfig) -> Format {
    cast.format.unwrap_or(Format::E4M3)
}

/// Rowwise weights are exported with a scale per channel, all others with one scale.
fn strategy(config: &ResolvedConfig) -> ExportStrategy {
    match config.weight.granularity {
        Granularity::Rowwise => ExportStrategy::Channel,
        _ => ExportStrategy::Tensor,
    }
}

struct SlotUse {
    slot: Arc<DelayedSlot>,
    format: Format,
    config: Arc<ResolvedConfig>,
    group: Group,
}

/// Updates slots; those of one delayed recipe and one reduction group together.
fn update(mut uses: Vec<SlotUse>) -> Result<()> {
    uses.retain(|used| used.config.delayed.is_some());
    // Layers sign in in the order of the threads that run them; ranks must agree on one.
    uses.sort_by(|a, b| a.slot.name().cmp(b.slot.name()));
    while let Some(first) = uses.first() {
        let (config, group) = (first.config.clone(), first.group.clone());
        let same_group = |other: &Group| match (&group, other) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        let (here, rest): (Vec<_>, Vec<_>) = uses
            .into_iter()
            .partition(|used| used.config.delayed == config.delayed && same_group(&used.group));
        uses = rest;
        let Some(delayed) = &config.delayed else {
            continue;
        };
        let slots: Vec<_> = here
            .into_iter()
            .map(|used| (used.slot, used.format))
            .collect();
        let group = group.filter(|_| delayed.reduce_amax);
        update_slots(
            &slots,
            &delayed.rule(),
            delayed.amax_history_len,
            &|amaxes| match &group {
                None => Ok(amaxes.clone()),
                Some(group) => group.all_reduce_max(amaxes),
            },
        )?;
    }
    Ok(())
}

#[derive(Debug)]
struct PendingGradient {
    slot: Weak<DelayedSlot>,
    format: Format,
    config: Arc<ResolvedConfig>,
    group: Group,
}

/// Output gradients recorded, or still to be recorded, by the backward passes of earlier guards.
#[derive(Debug, Default)]
pub(crate) struct PendingGradients(Vec<PendingGradient>);

impl PendingGradients {
    /// Adds newer entries, which replace those of the same slot.
    pub(crate) fn extend(&mut self, newer: Self) {
        self.0
            .retain(|old| !newer.0.iter().any(|new| old.slot.ptr_eq(&new.slot)));
        self.0.extend(newer.0);
    }

    /// Updates every gradient slot that recorded something.
    pub(crate) fn update(self) -> Result<()> {
        let uses = self.0.into_iter().filter_map(|pending| {
            Some(SlotUse {
                slot: pending.slot.upgrade()?,
                format: pending.format,
                config: pending.config,
                group: pending.group,
            })
        });
        update(uses.collect())
    }
}
