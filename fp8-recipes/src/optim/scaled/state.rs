//! Saving and loading.
//!
//! `{name}.exp_avg`, `{name}.exp_avg_root` and `{name}.momentum_buffer` in the shape and dtype of the parameter, the scale of each under
//! its name with `.data_scale` (f32 `[1]`), and `step`.

use super::super::error::Result;
use super::super::state::{STEP_NAME, check_names, check_values, checked, step_count};
use super::super::{AdamWConfig, CheckpointOptimizer, OptimError, OptimizerState, ParamGroup};
use super::super::{SgdConfig, masters::HostMaster};
use super::core::Core;
use super::slot::{Moment, Slot};
use super::value::amax_of_moment;
use super::{RoundTo, ScaledAdamW, ScaledCounts, ScaledSgd};
use candle_core::{DType, Device, Shape, Tensor};
use fp8_scaled::Scale;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap, HashSet};

const ADAMW: &str = "fp8.ScaledAdamW";
const SGD: &str = "fp8.ScaledSgd";
/// Names of the moments.
const ADAMW_MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_root"];
/// How many variables have a momentum buffer: a buffer that is missing from a file is not one that has not begun.
const BUFFERS: &str = "momentum_buffers";
const SGD_MOMENTS: [&str; 1] = ["momentum_buffer"];

/// In a checkpoint.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hyperparameters<C> {
    config: C,
    round: RoundTo,
    /// Names of the variables that do not decay.
    no_decay: BTreeSet<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    groups: Vec<ParamGroup>,
}

/// What a state holds, checked.
struct Loaded<const N: usize> {
    step: u64,
    moments: Vec<Option<[Moment; N]>>,
}

fn tensor_names<const N: usize>(slot: &Slot<N>, moment: &str) -> (String, String) {
    let data = format!("{}.{moment}", slot.var.name());
    let scale = format!("{data}.data_scale");
    (data, scale)
}

impl<const N: usize> Core<N> {
    fn tensors(&self, names: [&str; N]) -> Result<HashMap<String, Tensor>> {
        let step = i64::try_from(self.step).unwrap_or(i64::MAX);
        let mut tensors = HashMap::from([(STEP_NAME.into(), Tensor::new(step, &Device::Cpu)?)]);
        for slot in &self.slots {
            let Some(moments) = &slot.moments else {
                continue;
            };
            let shape = Shape::from(slot.var.dims());
            for (moment, name) in moments.iter().zip(names) {
                let (data, scale) = tensor_names(slot, name);
                tensors.insert(data, moment.values.to_tensor(&shape)?);
                let number = Tensor::new(&[moment.scale.to_f32()], &Device::Cpu)?;
                tensors.insert(scale, number);
            }
        }
        Ok(tensors)
    }

    fn hyperparameters<C>(&self, config: C) -> Hyperparameters<C> {
        let still = self.slots.iter().filter(|slot| !slot.decays);
        Hyperparameters {
            config,
            round: self.round,
            no_decay: still.map(|slot| slot.var.name().to_string()).collect(),
            groups: self.groups.all().to_vec(),
        }
    }

    /// The state of `tensors`; moments that are wholly missing are none where that is `optional`.
    fn check(
        &self,
        tensors: &HashMap<String, Tensor>,
        names: [&str; N],
        optional: bool,
    ) -> Result<Loaded<N>> {
        let mut known = HashSet::from([STEP_NAME.to_string()]);
        if optional {
            known.insert(BUFFERS.to_string());
        }
        let mut all = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            let mut moments = Vec::with_capacity(N);
            for name in names {
                let (data, scale) = tensor_names(slot, name);
                if !(optional && !tensors.contains_key(&data) && !tensors.contains_key(&scale)) {
                    moments.push(moment(slot, tensors, &data, &scale)?);
                }
                known.extend([data, scale]);
            }
            all.push(<[Moment; N]>::try_from(moments).ok());
        }
        check_names(tensors, &known)?;
        Ok(Loaded {
            step: step_count(tensors, STEP_NAME)?,
            moments: all,
        })
    }

    fn check_hyperparameters<C>(&self, saved: &Hyperparameters<C>) -> Result<()> {
        self.groups.resumed(saved.groups.clone(), self.names())?;
        let here: HashSet<&str> = self.names().collect();
        match saved
            .no_decay
            .iter()
            .find(|name| !here.contains(name.as_str()))
        {
            None => Ok(()),
            Some(name) => Err(OptimError::UnexpectedState { name: name.clone() }),
        }
    }

    fn put<C>(
        &mut self,
        loaded: Loaded<N>,
        saved: Option<Hyperparameters<C>>,
    ) -> Result<Option<C>> {
        let mut config = None;
        if let Some(saved) = saved {
            self.groups = self.groups.resumed(saved.groups, self.names())?;
            self.round = saved.round;
            for slot in &mut self.slots {
                slot.decays = !saved.no_decay.contains(slot.var.name());
            }
            config = Some(saved.config);
        }
        self.step = loaded.step;
        self.counts = ScaledCounts::default();
        for (slot, moments) in self.slots.iter_mut().zip(loaded.moments) {
            slot.moments = moments;
        }
        Ok(config)
    }
}

fn moment<const N: usize>(
    slot: &Slot<N>,
    tensors: &HashMap<String, Tensor>,
    data: &str,
    scale_name: &str,
) -> Result<Moment> {
    let shape = Shape::from(slot.var.dims());
    let values = checked(tensors, data, slot.var.dtype(), &shape)?;
    check_values(data, values, data.ends_with(ADAMW_MOMENTS[1]))?;
    let scale = checked(tensors, scale_name, DType::F32, &1.into())?;
    let number = scale.flatten_all()?.to_vec1::<f32>()?;
    let number = number.first().copied().unwrap_or(f32::NAN);
    let scale = match number {
        0.0 => Scale::ZERO,
        number => Scale::new(number).map_err(|_| OptimError::StateValue {
            name: scale_name.to_string(),
            index: 0,
            value: number.into(),
            expected: "0 or a power of two from 2^-126 to 2^127, as the scale of a moment is",
        })?,
    };
    let values = HostMaster::from_tensor(values)?;
    Ok(Moment {
        amax: amax_of_moment(&values),
        values,
        scale,
    })
}

/// Complete: steps after loading give the bits that the saved optimizer's would have given, hyperparameters included. The groups have to
/// have the same patterns here.
impl CheckpointOptimizer for ScaledAdamW {
    fn optimizer_state(&self) -> Result<OptimizerState> {
        OptimizerState::new(ADAMW)
            .with_tensors(self.core.tensors(ADAMW_MOMENTS)?)
            .with_hyperparameters(self.core.hyperparameters(&self.config))
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.check_kind(ADAMW)?;
        let saved = state.hyperparameters::<Hyperparameters<AdamWConfig>>()?;
        if let Some(saved) = &saved {
            saved.config.validate()?;
            self.core.check_hyperparameters(saved)?;
        }
        let loaded = self.core.check(state.tensors(), ADAMW_MOMENTS, false)?;
        if let Some(config) = self.core.put(loaded, saved)? {
            self.config = config;
        }
        Ok(())
    }

    fn announces_changes(&self) -> bool {
        true
    }
}

/// As for [`ScaledAdamW`].
impl CheckpointOptimizer for ScaledSgd {
    fn optimizer_state(&self) -> Result<OptimizerState> {
        let begun = self.core.slots.iter().filter(|slot| slot.moments.is_some());
        let begun = i64::try_from(begun.count()).unwrap_or(i64::MAX);
        OptimizerState::new(SGD)
            .with_tensors(self.core.tensors(SGD_MOMENTS)?)
            .with_tensor(BUFFERS, Tensor::new(begun, &Device::Cpu)?)
            .with_hyperparameters(self.core.hyperparameters(&self.config))
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.check_kind(SGD)?;
        let saved = state.hyperparameters::<Hyperparameters<SgdConfig>>()?;
        if let Some(saved) = &saved {
            saved.config.validate()?;
            self.core.check_hyperparameters(saved)?;
        }
        let loaded = self.core.check(state.tensors(), SGD_MOMENTS, true)?;
        let begun = loaded.moments.iter().flatten().count() as u64;
        if begun < step_count(state.tensors(), BUFFERS)? {
            let slots = self.core.slots.iter().zip(&loaded.moments);
            let missing = slots.into_iter().find(|(_, moments)| moments.is_none());
            return Err(OptimError::MissingState {
                name: missing.map_or(BUFFERS.to_string(), |(slot, _)| {
                    tensor_names(slot, SGD_MOMENTS[0]).0
                }),
            });
        }
        if let Some(config) = self.core.put(loaded, saved)? {
            self.config = config;
        }
        Ok(())
    }

    fn announces_changes(&self) -> bool {
        true
    }
}
