//! What optimizers of scaled parameters share.

use super::super::OptimError;
use super::super::error::Result;
use super::super::groups::Groups;
use super::super::named::address;
use super::super::norm::clip_coefficient;
use super::super::veto::{CastVeto, SkipStreak};
use super::super::{ParamGroup, StepReport};
use super::grad::Grad;
use super::slot::{Rounded, Slot};
use super::{RoundTo, ScaledCounts};
use candle_core::Tensor;
use fp8_candle::profile;
use fp8_scaled::{ScaledGrads, ScaledVar};
use std::collections::HashSet;

/// Variables with `N` moments each, sorted by name.
pub(super) struct Core<const N: usize> {
    pub(super) slots: Vec<Slot<N>>,
    pub(super) step: u64,
    pub(super) groups: Groups,
    pub(super) round: RoundTo,
    pub(super) counts: ScaledCounts,
    streak: SkipStreak,
}

/// Numbers of a step that differ from variable to variable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    pub(super) lr: f64,
    pub(super) weight_decay: f64,
    /// What gradients are multiplied by first.
    pub(super) clip: f64,
    /// Counted from 1.
    pub(super) step: u64,
    pub(super) rounded: Rounded,
}

impl<const N: usize> Core<N> {
    pub(super) fn new(mut vars: Vec<ScaledVar>, decays: impl Fn(usize) -> bool) -> Result<Self> {
        vars.sort_by(|a, b| a.name().cmp(b.name()));
        let mut seen = HashSet::new();
        vars.retain(|var| seen.insert(var.data_var().id()));
        if let Some(pair) = (vars.windows(2)).find(|pair| pair[0].name() == pair[1].name()) {
            let name = pair[0].name().to_string();
            return Err(OptimError::DuplicateName { name });
        }
        let slots = vars.into_iter().map(|var| {
            let decays = decays(var.dims().len());
            Slot::new(var, decays)
        });
        Ok(Self {
            slots: slots.collect::<Result<_>>()?,
            step: 0,
            groups: Groups::default(),
            round: RoundTo::default(),
            counts: ScaledCounts::default(),
            streak: SkipStreak::default(),
        })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.slots.iter().map(|slot| slot.var.name())
    }

    pub(super) fn with_groups(mut self, groups: Vec<ParamGroup>) -> Result<Self> {
        self.groups = Groups::new(groups, self.names())?;
        Ok(self)
    }

    pub(super) fn with_no_decay(mut self, no_decay: impl Fn(&str, &Tensor) -> bool) -> Self {
        for slot in &mut self.slots {
            slot.decays = !no_decay(slot.var.name(), slot.var.data_var());
        }
        self
    }

    /// One step: `update` changes data and moments of a variable and returns how many elements saturated.
    pub(super) fn apply(
        &mut self,
        grads: &ScaledGrads,
        lr: f64,
        weight_decay: f64,
        (max_grad_norm, max_skipped_steps): (Option<f64>, Option<u64>),
        update: impl Fn(&mut Slot<N>, &Grad, &Rates) -> candle_core::Result<u64>,
    ) -> Result<StepReport> {
        let _scope = profile::enter(profile::Kind::Optimizer);
        let memory = |slot: &Slot<N>| address(slot.var.data_var());
        let own: HashSet<usize> = self.slots.iter().map(memory).collect();
        let grads = self.slots.iter().map(|slot| {
            let grad = grads.get(&slot.var);
            grad.map(|grad| Grad::new(&slot.var, grad, &own))
                .transpose()
        });
        let grads = grads.collect::<Result<Vec<Option<Grad>>>>()?;
        let updated = grads.iter().flatten().count();
        let squares: f64 = grads.iter().flatten().map(Grad::squares).sum();
        let grad_norm = squares.sqrt();
        if !grad_norm.is_finite() {
            self.streak.add();
            let vars = self.slots.iter();
            let vars = vars.map(|slot| (slot.var.name(), slot.var.data_var().as_tensor()));
            let seen = CastVeto::default();
            self.streak.check(max_skipped_steps, &seen, vars)?;
            return StepReport::left_out(lr, updated, grad_norm, self.step, seen);
        }
        self.streak.end();
        let clip = clip_coefficient(max_grad_norm, grad_norm);
        self.step += 1;
        for (i, (slot, grad)) in self.slots.iter_mut().zip(&grads).enumerate() {
            let Some(grad) = grad else { continue };
            let (lr, weight_decay) = self.groups.rates(i, lr, weight_decay, slot.decays);
            let rates = Rates {
                lr,
                weight_decay,
                clip,
                step: self.step,
                rounded: Rounded {
                    to: self.round,
                    step: self.step,
                    id: i as u32,
                },
            };
            let before = slot.var.scale();
            let saturated = update(slot, grad, &rates).map_err(|error| {
                error.context(format!("optimizer step of variable `{}`", slot.var.name()))
            })?;
            self.counts.saturated += saturated;
            self.counts.rescaled += u64::from(slot.var.scale() != before);
        }
        Ok(StepReport::taken(lr, updated, grad_norm, clip))
    }
}
