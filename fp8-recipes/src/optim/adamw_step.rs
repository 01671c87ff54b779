//! One step of AdamW.

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use fp8_candle::profile;

#[cfg(feature = "cuda")]
use super::counter::Counter;
use super::counter::correction;
#[cfg(feature = "cuda")]
use super::cuda;
use super::error::Result;
use super::fused::Coefficients;
use super::named::gradients;
use super::norm::clip_coefficient;
use super::params::check_lr;
use super::veto::CastVeto;
use super::{AdamW, AdamWConfig, StepReport};

impl AdamW {
    /// One step with these gradients: clips, updates every variable that has a gradient, and says
    /// what it did. A skipped step is also a warning in `tracing`: at once where the host decides,
    /// and when the report is first read where a CUDA device does.
    ///
    /// With all variables on one CUDA device nothing here copies to the host or waits for the
    /// device. Variables on several devices share one norm, so each CUDA device among them is waited
    /// for once per step. Strided gradients are copied first.
    ///
    /// # Errors
    /// A gradient of another shape, dtype or device than its variable, or a rate that candle's interface could
    /// not refuse (before anything is changed), [`TooManySkipped`](super::OptimError::TooManySkipped), or an error of the device.
    pub fn apply(&mut self, grads: &GradStore) -> Result<StepReport> {
        let _scope = profile::enter(profile::Kind::Optimizer);
        self.refused_lr.map_or(Ok(()), check_lr)?;
        let vars = self
            .slots
            .iter()
            .map(|slot| (slot.name.as_str(), &slot.var));
        let grads = gradients(vars, grads)?;
        let seen = CastVeto::of(self.slots.iter().map(|slot| &slot.version))?;
        let done = self.update(&grads, seen);
        // Also after an error in the middle, and a step that turns out to be skipped: to say it too often costs a cast.
        for (slot, _) in self.slots.iter().zip(&grads).filter(|(_, g)| g.is_some()) {
            slot.version.announce_change();
        }
        done
    }

    fn update(&mut self, grads: &[Option<Tensor>], seen: CastVeto) -> Result<StepReport> {
        #[cfg(feature = "cuda")]
        {
            if self.devices.is_none() {
                self.devices = Some(cuda::groups(&self.slots, &self.groups)?);
            }
            let by_kernels = |i: usize| cuda::by_kernels(&self.slots, &self.groups, i, grads);
            let all = (0..self.slots.len()).all(by_kernels);
            if let (true, Counter::Device(counter), Some([group])) =
                (all, &self.counter, self.devices.as_deref_mut())
            {
                // Of reports that were read.
                let vars = self.slots.iter();
                let vars = vars.map(|slot| (slot.name.as_str(), slot.var.as_tensor()));
                let limit = self.config.max_skipped_steps;
                let checked = self.streak.check(limit, &seen, vars);
                if checked.is_err() {
                    self.streak.end();
                }
                checked?;
                let hyper = cuda::hyperparameters(&self.config);
                let mut marked = grads.to_vec();
                seen.poison(marked.iter_mut().flatten())?;
                let outcome = group.step(&marked, &hyper, counter)?;
                let updated = grads.iter().flatten().count();
                let (lr, streak) = (self.config.lr, self.streak.clone());
                return Ok(StepReport::on_device(lr, updated, outcome, seen, streak));
            }
        }
        self.apply_from_host(grads, seen)
    }

    /// A step whose norm the host reads.
    fn apply_from_host(&mut self, grads: &[Option<Tensor>], seen: CastVeto) -> Result<StepReport> {
        let lr = self.config.lr;
        let updated = grads.iter().flatten().count();
        let step = self.counter.get()?;
        self.sum.clear();
        let by_kernels: Vec<bool> = (0..self.slots.len())
            .map(|i| self.by_kernels(i, grads))
            .collect();
        for ((slot, grad), by_kernels) in self.slots.iter().zip(grads).zip(&by_kernels) {
            if !by_kernels {
                self.sum.add(slot.var.elem_count(), grad.as_ref())?;
            }
        }
        #[cfg(feature = "cuda")]
        let for_kernels: Vec<Option<Tensor>> = (grads.iter().zip(&by_kernels))
            .map(|(grad, own)| grad.clone().filter(|_| *own))
            .collect();
        #[cfg(feature = "cuda")]
        for group in self.devices.iter_mut().flatten() {
            self.sum
                .add_device_sum(group.sum_of_squares(&for_kernels)?)?;
        }
        self.sum.add_marks(seen.marks()?)?;
        let grad_norm = self.sum.total()?.sqrt();
        self.sum.clear();
        if !grad_norm.is_finite() {
            self.streak.add();
            let vars = self.slots.iter();
            let vars = vars.map(|slot| (slot.name.as_str(), slot.var.as_tensor()));
            self.streak
                .check(self.config.max_skipped_steps, &seen, vars)?;
            return StepReport::left_out(lr, updated, grad_norm, step, seen);
        }
        self.streak.end();
        let clip = clip_coefficient(self.config.max_grad_norm, grad_norm);
        self.counter.set(step + 1)?;
        let coefficients = self.coefficients(step + 1, clip);
        let AdamWConfig {
            weight_decay, seed, ..
        } = self.config;
        #[cfg(feature = "cuda")]
        let mut replaced = false;
        for (i, (slot, grad)) in self.slots.iter_mut().zip(grads).enumerate() {
            let (Some(grad), false) = (grad, by_kernels[i]) else {
                continue;
            };
            let (lr, decay) = self.groups.rates(i, lr, weight_decay, slot.decays);
            let own = Coefficients {
                lr,
                decay: 1.0 - lr * decay,
                ..coefficients
            };
            #[cfg(feature = "cuda")]
            {
                replaced |= slot.var.device().is_cuda();
            }
            let key = slot.kept.key(seed, step + 1, i as u32);
            slot.update(grad, &own, key).map_err(|error| {
                error.context(format!("optimizer step of variable `{}`", slot.name))
            })?;
        }
        #[cfg(feature = "cuda")]
        for group in self.devices.iter_mut().flatten() {
            let decision = fp8_candle::optim::AdamWDecision {
                correction1: coefficients.correction1,
                correction2: coefficients.correction2,
                clip,
            };
            group.update(
                &for_kernels,
                &cuda::hyperparameters(&self.config),
                &decision,
            )?;
        }
        // Their moments are other tensors now.
        #[cfg(feature = "cuda")]
        if replaced {
            self.slots_changed();
        }
        Ok(StepReport::taken(lr, updated, grad_norm, clip))
    }

    /// Whether kernels update variable number `i`, together with others of its CUDA device.
    fn by_kernels(&self, i: usize, grads: &[Option<Tensor>]) -> bool {
        #[cfg(feature = "cuda")]
        return cuda::by_kernels(&self.slots, &self.groups, i, grads);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (i, grads);
            false
        }
    }

    /// Those of a variable without a group that does not decay.
    fn coefficients(&self, step: u64, clip: f64) -> Coefficients {
        let AdamWConfig {
            lr,
            beta1,
            beta2,
            eps,
            ..
        } = self.config;
        Coefficients {
            lr,
            beta1,
            beta2,
            eps,
            decay: 1.0,
            correction1: correction(beta1, step),
            correction2: correction(beta2, step),
            clip,
        }
    }
}
