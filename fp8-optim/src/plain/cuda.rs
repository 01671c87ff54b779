//! Variables on CUDA devices, which kernels update together where they compute the rule.

use candle_core::{Device, Tensor};
use fp8_candle::optim::{AdamWDecision, AdamWMoments, AdamWTensors, CodedMoment, MultiTensorAdamW};

use super::super::counter::{Counter, correction};
use super::super::engine::{Engine, Slot};
use super::super::error::Result;
use super::super::groups::Groups;
use super::super::masters::{Keeping, MasterDType};
use super::super::moments::{Coded, Kept, coding};
use super::super::report::StepReport;
use super::super::rule::Rule;
use super::super::shared::KernelGroup;
use super::super::veto::CastVeto;
use super::variable::{Variable, moment_random};

impl Variable {
    fn is_on_cuda(&self) -> bool {
        self.var.device().is_cuda()
    }

    /// `index`: the variable's number, for the random bits of its moments.
    fn kernel_tensors<R: Rule>(
        &self,
        rule: &R,
        index: usize,
        decays: bool,
    ) -> candle_core::Result<AdamWTensors> {
        let moments = match self.state.moments.as_deref() {
            Some([Kept::Values(exp_avg), Kept::Values(exp_avg_sq)]) => AdamWMoments::Values {
                exp_avg: exp_avg.clone(),
                exp_avg_sq: exp_avg_sq.clone(),
            },
            Some([Kept::Coded(exp_avg), Kept::Coded(exp_avg_sq)]) => {
                // The kernels add the number of the step.
                let random = |i| moment_random(rule.settings().seed, 0, index, i);
                let storage = self.storage;
                let coding = R::MOMENTS
                    .first()
                    .map(|moment| coding(storage, moment, random(0)));
                let coding = coding.flatten().unwrap_or_default();
                let coded = |coded: &Coded, i| CodedMoment {
                    codes: coded.codes.clone(),
                    amaxes: coded.amaxes.clone(),
                    curves: coded.curves.clone(),
                    rotated: random(i).map_or(0, |random| random.rotated),
                };
                AdamWMoments::Coded {
                    exp_avg: coded(exp_avg, 0),
                    exp_avg_sq: coded(exp_avg_sq, 1),
                    expands: coding.expansion.expands,
                    key: coding.random.map(|random| random.key),
                }
            }
            _ => candle_core::bail!("variable `{}`: it has no two moments", self.name),
        };
        Ok(AdamWTensors {
            var: self.var.as_detached_tensor(),
            moments,
            master: self.state.master.clone(),
            decays,
        })
    }
}

/// The counter for these variables: on the device if all are on one CUDA device and kernels compute the rule, since the device then decides
/// about its steps by itself.
pub(super) fn counter<R: Rule>(rule: &R, variables: &[Variable]) -> candle_core::Result<Counter> {
    match variables.split_first() {
        Some((first, rest))
            if rule.adamw_kernel().is_some()
                && first.is_on_cuda()
                && rest
                    .iter()
                    .all(|other| other.var.device().same_device(first.var.device())) =>
        {
            Counter::on(first.var.device())
        }
        _ => Ok(Counter::Host(0)),
    }
}

/// Whether variable number `i` is in a group of kernels, which know one learning rate, one weight decay, and masters in f32.
fn is_grouped(slots: &[Slot<Variable>], own: &Groups, i: usize) -> bool {
    let variable = &slots[i].parameter;
    let known = matches!(
        variable.keeping,
        Keeping::Variable | Keeping::Copy(MasterDType::F32)
    );
    variable.is_on_cuda() && known && own.of(i).is_none()
}

/// A group per CUDA device. Its kernels write to the moments of these variables: new moments need new groups.
fn groups<R: Rule>(rule: &R, slots: &[Slot<Variable>], own: &Groups) -> Result<Vec<KernelGroup>> {
    let mut devices: Vec<(&Device, Vec<usize>)> = Vec::new();
    for i in (0..slots.len()).filter(|i| is_grouped(slots, own, *i)) {
        let device = slots[i].parameter.var.device();
        match devices.iter_mut().find(|(d, _)| d.same_device(device)) {
            Some((_, indices)) => indices.push(i),
            None => devices.push((device, vec![i])),
        }
    }
    let group = |indices: Vec<usize>| {
        let slots = indices.iter().map(|&i| (i, &slots[i]));
        let tensors = slots.map(|(i, slot)| slot.parameter.kernel_tensors(rule, i, slot.decays));
        let tensors = tensors.collect::<candle_core::Result<_>>()?;
        Ok(KernelGroup {
            kernels: MultiTensorAdamW::new(tensors)?,
            indices,
        })
    };
    let groups = devices.into_iter().map(|(_, indices)| group(indices));
    groups.collect()
}

impl<R: Rule> Engine<R, Variable> {
    /// For each variable whether kernels update it in this step: they read gradients in its dtype only.
    pub(super) fn by_kernels(&self, grads: &[Option<Tensor>]) -> Vec<bool> {
        let has_kernel = self.rule.adamw_kernel().is_some();
        let by_kernels = |i: usize| {
            let dtype = self.slots[i].parameter.var.dtype();
            let fits = grads[i].as_ref().is_none_or(|grad| grad.dtype() == dtype);
            has_kernel && fits && is_grouped(&self.slots, &self.groups, i)
        };
        (0..self.slots.len()).map(by_kernels).collect()
    }

    /// The step if kernels of one device take all of it; None if the host has to decide.
    pub(super) fn step_on_device(
        &mut self,
        grads: &[Option<Tensor>],
        veto: &CastVeto,
    ) -> Result<Option<StepReport>> {
        let Some(hyper) = self.rule.adamw_kernel() else {
            return Ok(None);
        };
        if self.shared.groups.is_none() {
            self.shared.groups = Some(groups(&self.rule, &self.slots, &self.groups)?);
        }
        let all = self.by_kernels(grads).into_iter().all(|own| own);
        let one_group = matches!(self.shared.groups.as_deref(), Some([_]));
        if !all || !one_group || !matches!(self.counter, Counter::Device(_)) {
            return Ok(None);
        }
        // Skipped steps are counted when their reports are read.
        let checked = self.check_streak(veto);
        if checked.is_err() {
            self.streak.end();
        }
        checked?;
        let (Counter::Device(counter), Some([group])) =
            (&self.counter, self.shared.groups.as_deref_mut())
        else {
            return Ok(None);
        };
        let mut marked = grads.to_vec();
        veto.poison(marked.iter_mut().flatten())?;
        let outcome = (group.kernels).step(&group.pick(&marked)?, &hyper, counter)?;
        let updated = grads.iter().flatten().count();
        let (veto, streak) = (veto.clone(), self.streak.clone());
        Ok(Some(StepReport::on_device(
            hyper.lr, updated, outcome, veto, streak,
        )))
    }

    /// Adds the sums of the squares of the gradients that kernels take.
    pub(super) fn add_kernel_sums(
        &mut self,
        grads: &[Option<Tensor>],
        by_kernels: &[bool],
    ) -> Result<()> {
        let own = only(grads, by_kernels);
        for group in self.shared.groups.iter_mut().flatten() {
            let squares = group.kernels.sum_of_squares(&group.pick(&own)?)?;
            self.shared.sum.add_device_sum(squares)?;
        }
        Ok(())
    }

    /// The kernels' part of step number `step`, which the host has decided about.
    pub(super) fn update_by_kernels(
        &mut self,
        grads: &[Option<Tensor>],
        by_kernels: &[bool],
        step: u64,
        clip: f64,
    ) -> Result<()> {
        let Some(hyper) = self.rule.adamw_kernel() else {
            return Ok(());
        };
        let decision = AdamWDecision {
            correction1: correction(hyper.beta1, step),
            correction2: correction(hyper.beta2, step),
            clip,
            step,
        };
        let own = only(grads, by_kernels);
        for group in self.shared.groups.iter_mut().flatten() {
            (group.kernels).update(&group.pick(&own)?, &hyper, &decision)?;
        }
        Ok(())
    }
}

fn only(grads: &[Option<Tensor>], by_kernels: &[bool]) -> Vec<Option<Tensor>> {
    let pairs = grads.iter().zip(by_kernels);
    pairs
        .map(|(grad, own)| grad.clone().filter(|_| *own))
        .collect()
}
