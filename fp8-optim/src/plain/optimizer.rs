//! Optimizers of variables: construction, one step, candle's interface.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use fp8_candle::profile;
use fp8_candle::weight_version::WeightVersion;

#[cfg(not(feature = "cuda"))]
use super::super::counter::Counter;
use super::super::engine::{Decision, Engine};
use super::super::error::{OptimError, Result};
use super::super::gradients::vars_of;
use super::super::masters::Keeping;
use super::super::parameter::Parameter;
use super::super::report::StepReport;
use super::super::rule::{Rule, checked_settings};
use super::super::shared::Shared;
use super::super::veto::{CastVeto, JudgedCasts};
use super::sharded::check_parts;
use super::variable::Variable;

/// An optimizer that knows its variables by name and reports on its steps: [`AdamW`](super::super::AdamW),
/// [`Sgd`](super::super::Sgd), or your own. [`DynamicLossScaler`](super::super::DynamicLossScaler) drives any.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use fp8_optim::{AdamW, AdamWConfig, NamedOptimizer, Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// fn train(optimizer: &mut impl NamedOptimizer, loss: &Tensor) -> Result<(), Box<dyn std::error::Error>> {
///     let report = optimizer.apply_gradients(&loss.backward()?)?;
///     assert_eq!(report.updated, optimizer.named_vars().len());
///     Ok(())
/// }
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let named = vec![("w".to_string(), w.clone())];
/// train(&mut AdamW::from_named(named.clone(), AdamWConfig::default())?, &w.sum_all()?)?;
/// train(&mut Sgd::from_named(named, SgdConfig::default())?, &w.sum_all()?)?;
/// # Ok(()) }
/// ```
pub trait NamedOptimizer {
    /// The variables that it updates, sorted by name.
    fn named_vars(&self) -> Vec<(String, Var)>;

    /// One step with these gradients.
    ///
    /// # Errors
    /// A gradient that does not fit its variable, or an error of the device.
    fn apply_gradients(&mut self, grads: &GradStore) -> Result<StepReport>;

    /// How many gradients are not finite, from how many there are on this rank: if several ranks take a step together, all of them must
    /// skip it together. All ranks call it.
    ///
    /// # Errors
    /// Those of the ranks' group.
    fn agreed_non_finite(&self, own: usize) -> Result<usize> {
        Ok(own)
    }

    /// A loss scaler has skipped a step of these variables: their step has come, and what casts have seen until now is judged, and vetoes no
    /// later step. By default each variable's [`note_step`](WeightVersion::note_step).
    ///
    /// # Errors
    /// If a device fails.
    fn note_skipped(&mut self) -> Result<()> {
        for (_, var) in self.named_vars() {
            WeightVersion::of(&var).note_step();
        }
        Ok(())
    }
}

impl<R: Rule> NamedOptimizer for Engine<R, Variable> {
    fn named_vars(&self) -> Vec<(String, Var)> {
        let vars = self.vars();
        vars.map(|(name, var)| (name.to_string(), var.clone()))
            .collect()
    }

    fn apply_gradients(&mut self, grads: &GradStore) -> Result<StepReport> {
        self.apply(grads)
    }

    fn agreed_non_finite(&self, own: usize) -> Result<usize> {
        match (&self.shared.exchange, &self.shared.divided) {
            (Some(exchange), _) => exchange.most(own),
            (None, Some(divided)) => divided.most(own),
            (None, None) => Ok(own),
        }
    }

    fn note_skipped(&mut self) -> Result<()> {
        self.judged = self.veto()?.1;
        // As after a step that this optimizer skips itself: a GPU makes codes again, and so sees again what they hide.
        for slot in &self.slots {
            slot.parameter.version.announce_change();
        }
        Ok(())
    }
}

/// The variables of floating point dtypes sorted by name, each once.
fn sorted(mut vars: Vec<(String, Var)>, masters: bool) -> Result<Vec<(String, Var)>> {
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(pair) = vars.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(OptimError::DuplicateName {
            name: pair[0].0.clone(),
        });
    }
    let integer = vars.iter().find(|(_, var)| !is_trainable(var.dtype()));
    if let (true, Some((name, var))) = (masters, integer) {
        return Err(OptimError::MasterOfInteger {
            name: name.clone(),
            dtype: var.dtype(),
        });
    }
    let mut seen = HashSet::new();
    vars.retain(|(_, var)| is_trainable(var.dtype()) && seen.insert(var.id()));
    Ok(vars)
}

fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16)
}

/// Optimizers of variables.
impl<R: Rule> Engine<R, Variable> {
    /// An optimizer over named variables.
    ///
    /// Variables of integer dtypes are left out, or refused where the configuration asks for master weights. A variable given under two
    /// names (tied weights) is kept once, under the name that sorts first.
    ///
    /// # Errors
    /// [`DuplicateName`](super::super::OptimError::DuplicateName), [`MasterOfInteger`](super::super::OptimError::MasterOfInteger),
    /// [`MasterOverflow`](super::super::OptimError::MasterOverflow),
    /// [`InvalidHyperparameter`](super::super::OptimError::InvalidHyperparameter), or candle's when there is no memory for moments or
    /// masters.
    pub fn from_named(vars: Vec<(String, Var)>, config: R) -> Result<Self> {
        let settings = checked_settings(&config)?;
        let vars = sorted(vars, settings.masters.is_some())?.into_iter();
        let variables = vars.map(|(name, var)| Variable::new::<R>(name, var, &settings));
        let variables = variables.collect::<Result<Vec<_>>>()?;
        #[cfg(feature = "cuda")]
        let counter = super::cuda::counter(&config, &variables)?;
        #[cfg(not(feature = "cuda"))]
        let counter = Counter::Host(0);
        let shared = Shared::default();
        Ok(Self::with_parameters(variables, config, counter, shared))
    }

    /// An optimizer over all variables of a [`VarMap`], under their names there.
    ///
    /// # Errors
    /// As [`Engine::from_named`].
    pub fn from_varmap(varmap: &VarMap, config: R) -> Result<Self> {
        Self::from_named(vars_of(varmap), config)
    }

    /// Replaces the hyperparameters and keeps moments and step. Which variables decay follows the new decay scope. Where master weights were
    /// off or of another dtype, copies are made of the variables as they are; where they are turned off, the copies are dropped. Moments are
    /// brought into the form of [`MomentStorage`](super::super::MomentStorage).
    ///
    /// # Errors
    /// [`InvalidHyperparameter`](super::super::OptimError::InvalidHyperparameter),
    /// [`MasterOverflow`](super::super::OptimError::MasterOverflow), those of [`Engine::from_sharded`] where each rank has a part of the
    /// parameters, or candle's when there is no memory for the copies; the old hyperparameters stay.
    pub fn set_config(&mut self, config: R) -> Result<()> {
        let settings = checked_settings(&config)?;
        if self.slots.iter().any(|slot| slot.parameter.is_part()) {
            check_parts(&settings)?;
        }
        let mut moments = Vec::new();
        for slot in &self.slots {
            moments.push(slot.parameter.moments_as::<R>(settings.moments)?);
        }
        let mut changed = Vec::new();
        for (i, slot) in self.slots.iter().enumerate() {
            let Variable {
                name, var, keeping, ..
            } = &slot.parameter;
            let next = Keeping::of(var, settings.masters);
            if next != *keeping {
                changed.push((i, next, next.new_copy(name, var)?));
            }
        }
        for (slot, moments) in self.slots.iter_mut().zip(moments) {
            slot.parameter.state.moments = moments;
            slot.parameter.storage = settings.moments;
        }
        for (i, keeping, copy) in changed {
            let variable = &mut self.slots[i].parameter;
            (variable.keeping, variable.state.master) = (keeping, copy);
        }
        for slot in &mut self.slots {
            slot.decays = settings
                .decay_scope
                .includes(Parameter::<R>::whole(&slot.parameter).rank());
        }
        self.put_config(config);
        Ok(())
    }

    /// Bytes of moments and masters. Moments that begin with the first gradient count from then on.
    pub fn state_bytes(&self) -> u64 {
        let variables = self.slots.iter().map(|slot| &slot.parameter);
        variables.map(Variable::state_bytes).sum()
    }

    /// Steps taken, without skipped ones. Waits for the device if all variables are on one CUDA device, which counts then.
    ///
    /// # Errors
    /// candle's, when the count cannot be copied from the device.
    pub fn steps(&self) -> Result<u64> {
        Ok(self.counter.get()?)
    }

    /// The variables with their names, in the order of the updates.
    pub fn vars(&self) -> impl Iterator<Item = (&str, &Var)> {
        let variables = self.slots.iter().map(|slot| &slot.parameter);
        variables.map(|variable| (variable.name.as_str(), &variable.var))
    }

    /// One step with these gradients: clips, updates every variable that has a gradient, and reports. A skipped step is also a warning in
    /// `tracing`: at once where the host decides, and when the report is first read where a CUDA device does.
    ///
    /// When kernels update all variables on one CUDA device, nothing here copies to the host or waits for the device. Variables on several
    /// devices share one norm, so a step waits once for each CUDA device among them. Strided gradients are copied first.
    ///
    /// # Errors
    /// A gradient of another shape or device than its variable, or of a dtype that is neither the variable's nor f32 for a 16-bit one; an
    /// invalid learning rate from candle's interface (both before anything is changed);
    /// [`TooManySkipped`](super::super::OptimError::TooManySkipped); an error of the device; or, after such an error in the middle of the
    /// updates, [`UnfinishedStep`](super::super::OptimError::UnfinishedStep) until a state is loaded.
    pub fn apply(&mut self, grads: &GradStore) -> Result<StepReport> {
        let _scope = profile::enter(profile::Kind::Optimizer);
        let grads = self.gradients(grads)?;
        let (veto, judged) = self.veto()?;
        let done = self.apply_checked(&grads, veto);
        // After another error before the first update, the step may be tried again.
        if matches!(done, Ok(_) | Err(OptimError::TooManySkipped { .. })) {
            self.judged = judged;
        }
        // After errors and skipped steps too: an unneeded announcement only costs a cast.
        for (slot, grad) in self.slots.iter().zip(&grads) {
            let version = &slot.parameter.version;
            match grad {
                Some(_) => version.announce_change(),
                None => version.note_step(),
            }
        }
        done
    }

    /// What casts have seen since this optimizer has last judged them, and what it has judged then.
    fn veto(&self) -> Result<(CastVeto, JudgedCasts)> {
        let versions = self.slots.iter().map(|slot| &slot.parameter.version);
        CastVeto::of(versions, &self.judged)
    }

    fn apply_checked(&mut self, grads: &[Option<Tensor>], veto: CastVeto) -> Result<StepReport> {
        if let Some(squares) = self.agreed_squares(grads, &veto)? {
            return self.apply_together(grads, veto, squares);
        }
        #[cfg(feature = "cuda")]
        if let Some(report) = self.step_on_device(grads, &veto)? {
            return Ok(report);
        }
        let by_kernels = self.by_kernels(grads);
        let updated = grads.iter().flatten().count();
        self.shared.sum.clear();
        for ((slot, grad), by_kernels) in self.slots.iter().zip(grads).zip(&by_kernels) {
            if !by_kernels {
                let len = slot.parameter.var.elem_count();
                self.shared.sum.add(len, grad.as_ref())?;
            }
        }
        #[cfg(feature = "cuda")]
        self.add_kernel_sums(grads, &by_kernels)?;
        self.shared.sum.add_marks(veto.marks()?)?;
        let grad_norm = self.shared.sum.total()?.sqrt();
        self.shared.sum.clear();
        let (step, clip) = match self.decide(grad_norm, updated, veto)? {
            Decision::Take { step, clip } => (step, clip),
            Decision::Skip(report) => return Ok(report),
        };
        self.update_each(grads, step, clip, |i| !by_kernels[i])?;
        #[cfg(feature = "cuda")]
        {
            self.update_by_kernels(grads, &by_kernels, step, clip)?;
            let replaced = |i: usize| grads[i].is_some() && !by_kernels[i];
            let mut slots = self.slots.iter().enumerate();
            if slots.any(|(i, slot)| replaced(i) && slot.parameter.var.device().is_cuda()) {
                // The step has replaced their moments.
                self.shared.forget_kernels();
            }
        }
        Ok(self.taken(updated, grad_norm, clip))
    }

    /// The sum of squares over the gradients of all ranks, if they decide about the step together.
    fn agreed_squares(&mut self, grads: &[Option<Tensor>], veto: &CastVeto) -> Result<Option<f64>> {
        if let Some(exchange) = &self.shared.exchange {
            let sum = &mut self.shared.sum;
            sum.clear();
            for (slot, grad) in self.slots.iter().zip(grads) {
                let len = slot.parameter.var.elem_count();
                // The blocks of an accelerator's sums are not known here.
                let grad = grad.as_ref().map(|grad| grad.to_device(&Device::Cpu));
                sum.add(len, grad.transpose()?.as_ref())?;
            }
            let squares = exchange.sum_of_squares(sum.partials(), veto)?;
            sum.clear();
            return Ok(Some(squares));
        }
        let Some(divided) = &self.shared.divided else {
            return Ok(None);
        };
        let slots = self.slots.iter();
        let lens = slots.map(|slot| slot.parameter.var.elem_count());
        Ok(Some(divided.sum_of_squares(lens, grads, veto)?))
    }

    /// [`Engine::apply_checked`] where the ranks take the step together, with the sum of squares over the gradients of all.
    fn apply_together(
        &mut self,
        grads: &[Option<Tensor>],
        veto: CastVeto,
        squares: f64,
    ) -> Result<StepReport> {
        let updated = grads.iter().flatten().count();
        let grad_norm = squares.sqrt();
        let (step, clip) = match self.decide(grad_norm, updated, veto)? {
            Decision::Take { step, clip } => (step, clip),
            Decision::Skip(report) => return Ok(report),
        };
        self.update_each(grads, step, clip, |_| true)?;
        if let Some(exchange) = &self.shared.exchange {
            exchange.changed();
        }
        #[cfg(feature = "cuda")]
        self.shared.forget_kernels();
        Ok(self.taken(updated, grad_norm, clip))
    }

    /// Without CUDA no kernels update several variables together.
    #[cfg(not(feature = "cuda"))]
    fn by_kernels(&self, grads: &[Option<Tensor>]) -> Vec<bool> {
        vec![false; grads.len()]
    }
}

/// candle-nn's interface. Variables get the names `000000`, `000001`, .. in the order given; prefer [`Engine::from_named`] or
/// [`Engine::from_varmap`] when the state is to be saved.
impl<R: Rule> Optimizer for Engine<R, Variable> {
    type Config = R;

    fn new(vars: Vec<Var>, config: R) -> candle_core::Result<Self> {
        let named = vars.into_iter().enumerate();
        let named = named.map(|(i, var)| (format!("{i:06}"), var));
        Ok(Self::from_named(named.collect(), config)?)
    }

    /// As [`Engine::apply`], without the report.
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        self.apply(grads)?;
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.lr()
    }

    /// As [`Engine::set_lr`]. This interface cannot return an error: after an invalid rate the next step fails and changes nothing.
    fn set_learning_rate(&mut self, lr: f64) {
        if self.set_lr(lr).is_err() {
            self.invalid_lr = Some(lr);
        }
    }
}
