//! Saving and loading the optimizer's state as named tensors.

use std::collections::{BTreeSet, HashMap, HashSet};

use candle_core::{DType, Device, Shape, Tensor};

use serde::{Deserialize, Serialize};

use super::checkpoint::{CheckpointOptimizer, OptimizerState};
use super::fused::State;
use super::slot::Slot;
use super::{AdamW, AdamWConfig, OptimError, ParamGroup};
use fp8_files::first_outside;

/// Name of the step counter in the state: i64, shape `[]`. No other tensor can have it, since those
/// end in `.exp_avg`, `.exp_avg_sq` or `.master_param`.
pub const STEP_NAME: &str = "step";

fn exp_avg_name(slot: &Slot) -> String {
    format!("{}.exp_avg", slot.name)
}

fn exp_avg_sq_name(slot: &Slot) -> String {
    format!("{}.exp_avg_sq", slot.name)
}

fn master_name(slot: &Slot) -> String {
    format!("{}.master_param", slot.name)
}

impl AdamW {
    /// A snapshot of everything the updates depend on beside variables and hyperparameters.
    ///
    /// # Returns
    /// `{variable}.exp_avg` and `{variable}.exp_avg_sq` in the variable's shape (f32, or f64 for an
    /// f64 variable), `{variable}.master_param` (in [`AdamWConfig::master_dtype`]) for each variable of another
    /// dtype under [`AdamWConfig::master_weights`], and [`STEP_NAME`]. They
    /// are on the devices of their variables, [`STEP_NAME`] on the CPU: reading it waits for a CUDA
    /// device. Later steps do not change the tensors of a snapshot. The learning rate is not part of
    /// it: it follows from the schedule and the step.
    ///
    /// # Errors
    /// candle's, when a tensor cannot be made.
    pub fn state(&self) -> Result<HashMap<String, Tensor>, OptimError> {
        let mut state = HashMap::with_capacity(3 * self.slots.len() + 1);
        for slot in &self.slots {
            let snapshot = slot.snapshot()?;
            state.insert(exp_avg_name(slot), snapshot.exp_avg);
            state.insert(exp_avg_sq_name(slot), snapshot.exp_avg_sq);
            if let Some(master) = snapshot.master {
                state.insert(master_name(slot), master);
            }
        }
        let step = i64::try_from(self.steps()?).unwrap_or(i64::MAX);
        state.insert(STEP_NAME.to_string(), Tensor::new(step, &Device::Cpu)?);
        Ok(state)
    }

    /// Restores a state made by [`AdamW::state`], on whatever devices its tensors are. Steps from
    /// here on give the same bits as steps of the optimizer that was saved, if the variables and
    /// hyperparameters are the same too.
    ///
    /// Nothing is changed unless the whole state fits.
    ///
    /// # Errors
    /// [`OptimError::MissingState`], [`OptimError::UnexpectedState`], [`OptimError::StateShape`],
    /// [`OptimError::StateDtype`], [`OptimError::StateValue`] (NaN or an infinity anywhere, a negative
    /// square) or [`OptimError::NegativeStep`], each naming the tensor. Saved
    /// with master weights, a state fits only an optimizer with master weights of their dtype, and the other way
    /// round.
    pub fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<(), OptimError> {
        let mut known = HashSet::from([STEP_NAME.to_string()]);
        let mut loaded = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            let mut take = |name: String, dtype| {
                let tensor = checked(state, &name, dtype, slot.shape());
                known.insert(name);
                tensor
            };
            let found = State {
                exp_avg: take(exp_avg_name(slot), slot.moment_dtype())?,
                exp_avg_sq: take(exp_avg_sq_name(slot), slot.moment_dtype())?,
                master: match slot.kept.copy_dtype() {
                    Some(dtype) => Some(take(master_name(slot), dtype)?),
                    None => None,
                },
            };
            check_values(&exp_avg_name(slot), found.exp_avg, false)?;
            check_values(&exp_avg_sq_name(slot), found.exp_avg_sq, true)?;
            if let Some(master) = found.master {
                check_values(&master_name(slot), master, false)?;
            }
            loaded.push(slot.moments_from(&found)?);
        }
        check_names(state, &known)?;
        let step = step_count(state, STEP_NAME)?;
        self.counter.set(step)?;
        for (slot, moments) in self.slots.iter_mut().zip(loaded) {
            slot.moments = moments;
        }
        self.slots_changed();
        Ok(())
    }
}

/// What kind of state a checkpoint from before kinds were written holds.
pub(crate) const KIND: &str = "fp8.AdamW";

/// The hyperparameters in a checkpoint.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hyperparameters {
    config: AdamWConfig,
    /// Names of the variables that do not decay.
    no_decay: BTreeSet<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    groups: Vec<ParamGroup>,
}

/// Complete: steps after loading give the bits that the saved optimizer's would have given. The hyperparameters come back too,
/// the learning rate of the next step and the groups' among them, which have to have the same patterns here: change them after loading, with [`AdamW::set_lr`] or
/// [`AdamW::set_config`], or keep your own with
/// [`ResumeOptions::keep_hyperparameters`](crate::checkpoint::ResumeOptions::keep_hyperparameters).
impl CheckpointOptimizer for AdamW {
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
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

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
        state.check_kind(KIND)?;
        let hyperparameters = state.hyperparameters::<Hyperparameters>()?;
        let mut groups = None;
        if let Some(Hyperparameters {
            config,
            no_decay,
            groups: saved,
        }) = &hyperparameters
        {
            config.validate()?;
            groups = Some(self.groups.resumed(saved.clone(), self.names())?);
            let here: HashSet<&String> = self.slots.iter().map(|slot| &slot.name).collect();
            if let Some(name) = no_decay.iter().find(|name| !here.contains(name)) {
                return Err(OptimError::UnexpectedState { name: name.clone() });
            }
        }
        self.load_state(state.tensors())?;
        if let (
            Some(Hyperparameters {
                config, no_decay, ..
            }),
            Some(groups),
        ) = (hyperparameters, groups)
        {
            self.groups = groups;
            for slot in &mut self.slots {
                slot.decays = !no_decay.contains(&slot.name);
            }
            // The tensors have decided about master weights.
            self.put_config(AdamWConfig {
                master_weights: self.config().master_weights,
                master_dtype: self.config().master_dtype,
                ..config
            });
        }
        Ok(())
    }

    fn announces_changes(&self) -> bool {
        true
    }
}

fn find<'a>(state: &'a HashMap<String, Tensor>, name: &str) -> Result<&'a Tensor, OptimError> {
    state.get(name).ok_or_else(|| OptimError::MissingState {
        name: name.to_string(),
    })
}

/// The tensor `name`, which has this dtype and shape.
pub(super) fn checked<'a>(
    state: &'a HashMap<String, Tensor>,
    name: &str,
    dtype: DType,
    shape: &Shape,
) -> Result<&'a Tensor, OptimError> {
    let tensor = find(state, name)?;
    if tensor.shape() != shape {
        let (expected, got) = (shape.clone(), tensor.shape().clone());
        return Err(OptimError::StateShape {
            name: name.to_string(),
            expected,
            got,
        });
    }
    check_dtype(name, dtype, tensor)?;
    Ok(tensor)
}

/// Fails with the first name that is not known.
pub(super) fn check_names(
    state: &HashMap<String, Tensor>,
    known: &HashSet<String>,
) -> Result<(), OptimError> {
    let unexpected = state.keys().filter(|name| !known.contains(*name));
    match unexpected.min() {
        None => Ok(()),
        Some(name) => Err(OptimError::UnexpectedState { name: name.clone() }),
    }
}

fn check_dtype(name: &str, expected: DType, tensor: &Tensor) -> Result<(), OptimError> {
    let got = tensor.dtype();
    if got == expected {
        Ok(())
    } else {
        Err(OptimError::StateDtype {
            name: name.to_string(),
            expected,
            got,
        })
    }
}

/// Running means are finite, and those of squares are not negative: a step whose gradients are not finite
/// is skipped.
pub(super) fn check_values(name: &str, tensor: &Tensor, squares: bool) -> Result<(), OptimError> {
    let fits = |value: f64| value.is_finite() && !(squares && value < 0.0);
    let Some((index, value)) = first_outside(tensor, fits)? else {
        return Ok(());
    };
    Err(OptimError::StateValue {
        name: name.to_string(),
        index,
        value,
        expected: match squares {
            true => "finite and not negative",
            false => "finite",
        },
    })
}

/// The number of this name, which counts something.
pub(super) fn step_count(state: &HashMap<String, Tensor>, name: &str) -> Result<u64, OptimError> {
    let tensor = find(state, name)?;
    check_dtype(name, DType::I64, tensor)?;
    if tensor.elem_count() != 1 {
        let (expected, got) = (().into(), tensor.shape().clone());
        return Err(OptimError::StateShape {
            name: name.to_string(),
            expected,
            got,
        });
    }
    let got = tensor.flatten_all()?.to_vec1::<i64>()?[0];
    u64::try_from(got).map_err(|_| OptimError::NegativeStep {
        name: name.to_string(),
        got,
    })
}
