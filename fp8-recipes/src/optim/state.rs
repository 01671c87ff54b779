//! Saving and loading the optimizer's state as named tensors.

use std::collections::{HashMap, HashSet};

use candle_core::{DType, Device, Tensor};

use super::slot::Slot;
use super::{AdamW, OptimError};

/// Name of the step counter in the state: i64, shape `[]`. No moment can have it, since those end
/// in `.exp_avg` or `.exp_avg_sq`.
pub const STEP_NAME: &str = "step";

fn exp_avg_name(slot: &Slot) -> String {
    format!("{}.exp_avg", slot.name)
}

fn exp_avg_sq_name(slot: &Slot) -> String {
    format!("{}.exp_avg_sq", slot.name)
}

impl AdamW {
    /// A snapshot of everything the updates depend on beside variables and hyperparameters.
    ///
    /// # Returns
    /// `{variable}.exp_avg` and `{variable}.exp_avg_sq` in the variable's shape (f32, or f64 for an
    /// f64 variable) and [`STEP_NAME`]. Later steps do not change the tensors of a snapshot. The
    /// learning rate is not part of it: it follows from the schedule and the step.
    ///
    /// # Errors
    /// candle's, when a tensor cannot be made.
    pub fn state(&self) -> Result<HashMap<String, Tensor>, OptimError> {
        let mut state = HashMap::with_capacity(2 * self.slots.len() + 1);
        for slot in &self.slots {
            let (exp_avg, exp_avg_sq) = slot.snapshot()?;
            state.insert(exp_avg_name(slot), exp_avg);
            state.insert(exp_avg_sq_name(slot), exp_avg_sq);
        }
        let step = i64::try_from(self.step).unwrap_or(i64::MAX);
        state.insert(STEP_NAME.to_string(), Tensor::new(step, &Device::Cpu)?);
        Ok(state)
    }

    /// Restores a state made by [`AdamW::state`]. Steps from here on give the same bits as steps of
    /// the optimizer that was saved, if the variables and hyperparameters are the same too.
    ///
    /// Nothing is changed unless the whole state fits.
    ///
    /// # Errors
    /// [`OptimError::MissingState`], [`OptimError::UnexpectedState`], [`OptimError::StateShape`],
    /// [`OptimError::StateDtype`] or [`OptimError::NegativeStep`], each naming the tensor.
    pub fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<(), OptimError> {
        let mut known = HashSet::from([STEP_NAME.to_string()]);
        let mut loaded = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            let names = [exp_avg_name(slot), exp_avg_sq_name(slot)];
            let exp_avg = checked(state, &names[0], slot)?;
            let exp_avg_sq = checked(state, &names[1], slot)?;
            loaded.push(slot.moments_from(exp_avg, exp_avg_sq)?);
            known.extend(names);
        }
        let mut unexpected: Vec<&String> =
            state.keys().filter(|name| !known.contains(*name)).collect();
        unexpected.sort();
        if let Some(name) = unexpected.first() {
            return Err(OptimError::UnexpectedState {
                name: (*name).clone(),
            });
        }
        let step = step_count(state)?;
        for (slot, moments) in self.slots.iter_mut().zip(loaded) {
            slot.moments = moments;
        }
        self.step = step;
        Ok(())
    }
}

fn find<'a>(state: &'a HashMap<String, Tensor>, name: &str) -> Result<&'a Tensor, OptimError> {
    state.get(name).ok_or_else(|| OptimError::MissingState {
        name: name.to_string(),
    })
}

fn checked<'a>(
    state: &'a HashMap<String, Tensor>,
    name: &str,
    slot: &Slot,
) -> Result<&'a Tensor, OptimError> {
    let tensor = find(state, name)?;
    if tensor.shape() != slot.shape() {
        let (expected, got) = (slot.shape().clone(), tensor.shape().clone());
        return Err(OptimError::StateShape {
            name: name.to_string(),
            expected,
            got,
        });
    }
    check_dtype(name, slot.moment_dtype(), tensor)?;
    Ok(tensor)
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

fn step_count(state: &HashMap<String, Tensor>) -> Result<u64, OptimError> {
    let tensor = find(state, STEP_NAME)?;
    check_dtype(STEP_NAME, DType::I64, tensor)?;
    if tensor.elem_count() != 1 {
        let (expected, got) = (().into(), tensor.shape().clone());
        return Err(OptimError::StateShape {
            name: STEP_NAME.to_string(),
            expected,
            got,
        });
    }
    let got = tensor.flatten_all()?.to_vec1::<i64>()?[0];
    u64::try_from(got).map_err(|_| OptimError::NegativeStep {
        name: STEP_NAME.to_string(),
        got,
    })
}
