//! Saving and loading the state of an engine.

use std::collections::{BTreeSet, HashMap, HashSet};

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::engine::Engine;
use super::error::{OptimError, Result};
use super::groups::ParamGroup;
use super::parameter::Parameter;
use super::plain::Variable;
use super::rounding::{RoundTo, ScaledCounts};
use super::rule::{Rule, checked_settings};
use super::state::{OptimizerState, ResumableOptimizer, STEP_NAME};
use super::state_reader::{StateReader, count_tensor};

/// The hyperparameters in a state.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hyperparameters<R> {
    config: R,
    /// Only of scaled parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    round: Option<RoundTo>,
    /// Names of the parameters that do not decay.
    no_decay: BTreeSet<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    groups: Vec<ParamGroup>,
}

impl<R: Rule, P: Parameter<R>> Engine<R, P> {
    fn tensors(&self) -> Result<HashMap<String, Tensor>> {
        if self.unfinished {
            return Err(OptimError::UnfinishedStep);
        }
        let mut state = HashMap::with_capacity(3 * self.slots.len() + 2);
        let mut begun = 0;
        for slot in &self.slots {
            begun += u64::from(slot.parameter.save(&mut state)?);
        }
        state.insert(STEP_NAME.to_string(), count_tensor(self.counter.get()?)?);
        if let Some(name) = R::MOMENT_COUNT {
            state.insert(name.to_string(), count_tensor(begun)?);
        }
        Ok(state)
    }

    /// The step, moments and masters of a state.
    fn check(&self, state: &HashMap<String, Tensor>) -> Result<(u64, Vec<P::Loaded>)> {
        let mut reader = StateReader::new(state);
        let parameters = self.slots.iter().map(|slot| &slot.parameter);
        let loaded = parameters.clone().map(|p| p.check(&mut reader));
        let (loaded, has_moments): (Vec<_>, Vec<bool>) =
            loaded.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let step = reader.count(STEP_NAME);
        // An unknown name is reported before a missing count.
        let begun = R::MOMENT_COUNT.map(|name| reader.count(name));
        reader.finish()?;
        let step = step?;
        if let (Some(begun), Some(count_name)) = (begun.transpose()?, R::MOMENT_COUNT) {
            // Otherwise a moment missing from a damaged file would look like one that has not begun.
            if begun != has_moments.iter().filter(|has| **has).count() as u64 {
                let missing = parameters.zip(has_moments).find(|(_, has)| !has);
                let name = |p: &P| format!("{}.{}", p.name(), R::MOMENTS[0].name);
                return Err(OptimError::MissingState {
                    name: missing.map_or(count_name.to_string(), |(p, _)| name(p)),
                });
            }
        }
        Ok((step, loaded))
    }

    fn restore(&mut self, (step, loaded): (u64, Vec<P::Loaded>)) -> Result<()> {
        self.counter.set(step)?;
        for (slot, loaded) in self.slots.iter_mut().zip(loaded) {
            slot.parameter.restore(loaded);
        }
        self.shared.forget_kernels();
        self.shared.counts = ScaledCounts::default();
        self.unfinished = false;
        Ok(())
    }

    fn check_hyperparameters(&self, saved: &Hyperparameters<R>) -> Result<()> {
        checked_settings(&saved.config)?;
        let here: HashSet<&str> = self.names().collect();
        let mut no_decay = saved.no_decay.iter();
        if let Some(name) = no_decay.find(|name| !here.contains(name.as_str())) {
            return Err(OptimError::UnexpectedState { name: name.clone() });
        }
        let reason = match (self.shared.round, saved.round) {
            (Some(_), None) => "missing field `round`",
            (None, Some(_)) => "unknown field `round`",
            _ => return Ok(()),
        };
        Err(OptimError::StateHyperparameters {
            kind: P::KIND.to_string(),
            reason: reason.to_string(),
        })
    }
}

/// The tensors of a state.
impl<R: Rule> Engine<R, Variable> {
    /// A copy of everything that updates depend on, except variables and hyperparameters.
    ///
    /// # Returns
    /// `{variable}.{moment}` in the variable's shape (f32, or f64 for an f64 variable) for each variable that has moments; for moments in
    /// FP8 ([`MomentStorage`](super::MomentStorage)) U8 codes, with `{variable}.{moment}.amax` (f32) and `{variable}.{moment}.curve` (U8:
    /// the exponents 1, 2, 4 and 1/2 by number), one for each 128 elements;
    /// `{variable}.master_param` for each variable with a master copy ([`MasterDType`](super::MasterDType)), the step as [`STEP_NAME`]
    /// (i64, shape `[]`), and where moments begin with the first gradient the number of variables that have them. The moments are
    /// `exp_avg` and `exp_avg_sq` for AdamW, `momentum_buffer` (counted by `momentum_buffers`) for SGD.
    ///
    /// Tensors are on the devices of their variables, counts on the CPU: reading the step waits for a CUDA device. Later steps do not change
    /// the tensors. The learning rate is not among them: it follows from the schedule and the step.
    ///
    /// # Errors
    /// candle's, when a tensor cannot be made.
    pub fn state(&self) -> Result<HashMap<String, Tensor>> {
        self.tensors()
    }

    /// Restores a state made by [`Engine::state`], on whatever devices its tensors are. Later steps give the same bits as steps of the
    /// optimizer that was saved, if the variables and hyperparameters are the same too.
    ///
    /// Nothing changes unless the whole state fits.
    ///
    /// # Errors
    /// [`OptimError::MissingState`], [`OptimError::UnexpectedState`], [`OptimError::StateShape`], [`OptimError::StateDtype`],
    /// [`OptimError::StateValue`] (NaN or an infinity anywhere, a negative square) or [`OptimError::NegativeStep`], each naming the tensor.
    /// A state with master weights fits only an optimizer with master weights of their dtype, and one without only an optimizer without.
    pub fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let checked = self.check(state)?;
        self.restore(checked)
    }
}

/// Steps after loading give the bits that the saved optimizer's steps would have given. The hyperparameters are restored too, with
/// the learning rate of the next step and those of the groups, which must have the same patterns here. How masters and moments are stored is
/// not restored. Change hyperparameters after loading with [`Engine::set_lr`] or [`Engine::set_config`], or keep your own with
/// `ResumeOptions::keep_hyperparameters`.
impl<R: Rule, P: Parameter<R>> ResumableOptimizer for Engine<R, P> {
    fn optimizer_state(&self) -> Result<OptimizerState> {
        let still = self.slots.iter().filter(|slot| !slot.decays);
        let hyperparameters = Hyperparameters {
            config: self.rule.clone(),
            round: self.shared.round,
            no_decay: still
                .map(|slot| slot.parameter.name().to_string())
                .collect(),
            groups: self.groups.all().to_vec(),
        };
        OptimizerState::new(P::KIND)
            .with_tensors(self.tensors()?)
            .with_hyperparameters(hyperparameters)
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.check_kind(P::KIND)?;
        let saved = state.hyperparameters::<Hyperparameters<R>>()?;
        let mut groups = None;
        if let Some(saved) = &saved {
            self.check_hyperparameters(saved)?;
            groups = Some(self.groups.resumed(saved.groups.clone(), self.names())?);
        }
        let checked = self.check(state.tensors())?;
        self.restore(checked)?;
        if let (Some(mut saved), Some(groups)) = (saved, groups) {
            self.groups = groups;
            for slot in &mut self.slots {
                slot.decays = !saved.no_decay.contains(slot.parameter.name());
            }
            self.shared.round = saved.round;
            // The tensors fit this optimizer's choice of master weights.
            saved.config.keep_storage(&self.rule);
            self.put_config(saved.config);
        }
        Ok(())
    }

    fn announces_changes(&self) -> bool {
        true
    }
}
