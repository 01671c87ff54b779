//! The variables of a CUDA device, updated together by kernels.

use candle_core::{Device, Tensor};
use fp8_candle::Result;
use fp8_candle::optim::{AdamWDecision, AdamWHyperparameters, AdamWTensors, MultiTensorAdamW};

use super::AdamWConfig;
use super::counter::Counter;
use super::groups::Groups;
use super::masters::{Kept, MasterDType};
use super::slot::{Moments, Slot};

/// The variables of one device.
pub(super) struct Group {
    /// Indices of its slots, rising.
    pub slots: Vec<usize>,
    kernels: MultiTensorAdamW,
}

fn is_on_cuda(slot: &Slot) -> bool {
    slot.var.device().is_cuda()
}

/// Whether a group has variable number `i`: the kernels know one learning rate, one weight decay, and masters in f32.
fn is_grouped(slots: &[Slot], own: &Groups, i: usize) -> bool {
    let kept = slots[i].kept;
    let known = matches!(kept, Kept::Variable | Kept::Copy(MasterDType::F32));
    is_on_cuda(&slots[i]) && known && own.of(i).is_none()
}

/// Whether kernels take this step of variable number `i`: they read gradients in its dtype only.
pub(super) fn by_kernels(slots: &[Slot], own: &Groups, i: usize, grads: &[Option<Tensor>]) -> bool {
    let dtype = slots[i].var.dtype();
    let fits = grads[i].as_ref().is_none_or(|grad| grad.dtype() == dtype);
    fits && is_grouped(slots, own, i)
}

/// The counter for these variables: on the device if all are on one CUDA device, which then decides
/// about its steps by itself.
pub(super) fn counter(slots: &[Slot]) -> candle_core::Result<Counter> {
    match slots.split_first() {
        Some((first, rest))
            if is_on_cuda(first)
                && rest
                    .iter()
                    .all(|slot| slot.var.device().same_device(first.var.device())) =>
        {
            Counter::on(first.var.device())
        }
        _ => Ok(Counter::Host(0)),
    }
}

/// A group per CUDA device. Its kernels write to the moments of these slots: new moments need new
/// groups.
pub(super) fn groups(slots: &[Slot], own: &Groups) -> Result<Vec<Group>> {
    let mut devices: Vec<(&Device, Vec<usize>)> = Vec::new();
    for (i, slot) in slots
        .iter()
        .enumerate()
        .filter(|(i, _)| is_grouped(slots, own, *i))
    {
        let device = slot.var.device();
        match devices.iter_mut().find(|(d, _)| d.same_device(device)) {
            Some((_, indices)) => indices.push(i),
            None => devices.push((device, vec![i])),
        }
    }
    let group = |indices: Vec<usize>| {
        let tensors = indices.iter().map(|&i| tensors(&slots[i]));
        Ok(Group {
            kernels: MultiTensorAdamW::new(tensors.collect::<candle_core::Result<_>>()?)?,
            slots: indices,
        })
    };
    devices
        .into_iter()
        .map(|(_, indices)| group(indices))
        .collect()
}

fn tensors(slot: &Slot) -> candle_core::Result<AdamWTensors> {
    let Moments::Tensors(state) = &slot.moments else {
        candle_core::bail!("variable `{}`: its moments are on the host", slot.name)
    };
    Ok(AdamWTensors {
        var: slot.var.as_detached_tensor(),
        exp_avg: state.exp_avg.clone(),
        exp_avg_sq: state.exp_avg_sq.clone(),
        master: state.master.clone(),
        decays: slot.decays,
    })
}

pub(super) fn hyperparameters(config: &AdamWConfig) -> AdamWHyperparameters {
    AdamWHyperparameters {
        lr: config.lr,
        beta1: config.beta1,
        beta2: config.beta2,
        eps: config.eps,
        decay: 1.0 - config.lr * config.weight_decay,
        max_grad_norm: config.max_grad_norm,
    }
}

impl Group {
    /// The group's gradients out of those of all slots, contiguous.
    fn pick(&self, grads: &[Option<Tensor>]) -> candle_core::Result<Vec<Option<Tensor>>> {
        self.slots
            .iter()
            .map(|&i| grads[i].as_ref().map(Tensor::contiguous).transpose())
            .collect()
    }

    /// A whole step decided by the device: what [`MultiTensorAdamW::step`] returns.
    pub(super) fn step(
        &mut self,
        grads: &[Option<Tensor>],
        hyper: &AdamWHyperparameters,
        counter: &Tensor,
    ) -> Result<Tensor> {
        let grads = self.pick(grads)?;
        self.kernels.step(&grads, hyper, counter)
    }

    /// The sum of the squares of the group's gradients, on its device.
    pub(super) fn sum_of_squares(&mut self, grads: &[Option<Tensor>]) -> Result<Tensor> {
        let grads = self.pick(grads)?;
        self.kernels.sum_of_squares(&grads)
    }

    /// The update of a step that the host has decided on.
    pub(super) fn update(
        &mut self,
        grads: &[Option<Tensor>],
        hyper: &AdamWHyperparameters,
        decision: &AdamWDecision,
    ) -> Result<()> {
        let grads = self.pick(grads)?;
        self.kernels.update(&grads, hyper, decision)
    }
}
