//! Saving and loading the state of SGD.

use std::collections::{BTreeSet, HashMap, HashSet};

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::checkpoint::{CheckpointOptimizer, OptimizerState};
use super::error::Result;
use super::sgd_slot::SgdSlot;
use super::state::{check_names, check_values, checked, step_count};
use super::{OptimError, ParamGroup, STEP_NAME, Sgd, SgdConfig};

const KIND: &str = "fp8.Sgd";

/// How many variables have a momentum buffer: a buffer that is missing from a file is not one that has not begun.
const BUFFERS: &str = "momentum_buffers";

fn buffer_name(slot: &SgdSlot) -> String {
    format!("{}.momentum_buffer", slot.name)
}

fn master_name(slot: &SgdSlot) -> String {
    format!("{}.master_param", slot.name)
}

impl Sgd {
    /// A snapshot of everything the updates depend on beside variables and hyperparameters.
    ///
    /// # Returns
    /// `{variable}.momentum_buffer` in the variable's shape (f32, or f64 for an f64 variable) for each variable that has had a
    /// gradient while there was momentum, `{variable}.master_param` for each variable with a master copy
    /// ([`MasterDType`](super::MasterDType)), the number of buffers as `momentum_buffers` and the step as [`STEP_NAME`] (i64, shape
    /// `[]`). Later steps do not change the tensors of a snapshot.
    ///
    /// # Errors
    /// candle's, when a tensor cannot be made.
    pub fn state(&self) -> Result<HashMap<String, Tensor>> {
        let mut state = HashMap::with_capacity(2 * self.slots.len() + 2);
        let mut buffers = 0i64;
        for slot in &self.slots {
            let (buffer, master) = slot.snapshot()?;
            if let Some(buffer) = buffer {
                buffers += 1;
                state.insert(buffer_name(slot), buffer);
            }
            if let Some(master) = master {
                state.insert(master_name(slot), master);
            }
        }
        let step = i64::try_from(self.steps()).unwrap_or(i64::MAX);
        state.insert(STEP_NAME.to_string(), Tensor::new(step, &Device::Cpu)?);
        state.insert(BUFFERS.to_string(), Tensor::new(buffers, &Device::Cpu)?);
        Ok(state)
    }

    /// Restores a state made by [`Sgd::state`], on whatever devices its tensors are. Steps from here on give the same bits as steps of
    /// the optimizer that was saved, if the variables and hyperparameters are the same too.
    ///
    /// Nothing is changed unless the whole state fits.
    ///
    /// # Errors
    /// As [`AdamW::load_state`](super::AdamW::load_state).
    pub fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let mut known = HashSet::from([STEP_NAME, BUFFERS].map(String::from));
        let mut loaded = Vec::with_capacity(self.slots.len());
        let (mut buffers, mut without) = (0, None);
        for slot in &self.slots {
            let mut take = |name: String, dtype| -> Result<_> {
                let tensor = checked(state, &name, dtype, slot.var.shape())?;
                check_values(&name, tensor, false)?;
                known.insert(name);
                Ok(tensor)
            };
            let name = buffer_name(slot);
            let buffer = match state.contains_key(&name) {
                true => {
                    buffers += 1;
                    Some(take(name, slot.buffer_dtype())?)
                }
                false => {
                    without = without.or(Some(name));
                    None
                }
            };
            let master = match slot.kept.copy_dtype() {
                Some(dtype) => Some(take(master_name(slot), dtype)?),
                None => None,
            };
            loaded.push(SgdSlot::momentum_of(&slot.var, buffer, master)?);
        }
        check_names(state, &known)?;
        let step = step_count(state, STEP_NAME)?;
        if step_count(state, BUFFERS)? != buffers {
            let name = without.unwrap_or_else(|| BUFFERS.to_string());
            return Err(OptimError::MissingState { name });
        }
        self.step = step;
        for (slot, momentum) in self.slots.iter_mut().zip(loaded) {
            slot.momentum = momentum;
        }
        Ok(())
    }
}

/// The hyperparameters in a checkpoint.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hyperparameters {
    config: SgdConfig,
    /// Names of the variables that do not decay.
    no_decay: BTreeSet<String>,
    groups: Vec<ParamGroup>,
}

/// Complete: steps after loading give the bits that the saved optimizer's would have given. The hyperparameters come back too, the
/// learning rate of the next step and the groups' among them, which have to have the same patterns here.
impl CheckpointOptimizer for Sgd {
    fn optimizer_state(&self) -> Result<OptimizerState> {
        let still = self.slots.iter().filter(|slot| !slot.decays);
        let hyperparameters = Hyperparameters {
            config: self.config().clone(),
            no_decay: still.map(|slot| slot.name.clone()).collect(),
            groups: self.groups().to_vec(),
        };
        OptimizerState::new(KIND)
            .with_tensors(self.state()?)
            .with_hyperparameters(hyperparameters)
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.check_kind(KIND)?;
        let Some(saved) = state.hyperparameters::<Hyperparameters>()? else {
            return self.load_state(state.tensors());
        };
        saved.config.validate()?;
        let here: HashSet<&str> = self.names().collect();
        if let Some(name) = saved
            .no_decay
            .iter()
            .find(|name| !here.contains(name.as_str()))
        {
            return Err(OptimError::UnexpectedState { name: name.clone() });
        }
        let groups = self.groups.resumed(saved.groups, self.names())?;
        self.load_state(state.tensors())?;
        self.groups = groups;
        for slot in &mut self.slots {
            slot.decays = !saved.no_decay.contains(&slot.name);
        }
        // The tensors have decided about master weights.
        self.put_config(SgdConfig {
            masters: self.config().masters,
            ..saved.config
        });
        Ok(())
    }

    fn announces_changes(&self) -> bool {
        true
    }
}
