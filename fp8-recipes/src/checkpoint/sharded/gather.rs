//! A training checkpoint in one file, gathered from parameters in parts.

use super::super::meta::TrainingMeta;
use super::super::prepared::prepared_layers;
use super::super::ranks::{gather_state_of, gathered};
use super::super::save::write;
use super::parts::{Parts, of_optimizer};
use crate::error::Result;
use crate::module::Fp8Module;
use crate::optim::ResumableOptimizer;
use candle_core::{DType, Device, Tensor};
use fp8_ranks::ShardedVarMap;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Gathers parameters in parts, their optimizer and the FP8 state, and lets rank 0 write them to one file, which is the one that
/// [`save_training`](super::super::save_training) writes for whole parameters: [`resume_training`](super::super::resume_training) reads it,
/// and candle can build the model from it. All ranks call it. One parameter at a time is gathered, but rank 0 holds all of them at the end.
///
/// Ends the step first, on all ranks.
///
/// # Errors
/// Those of the group, [`UnfinishedStep`](crate::TrainingCheckpointError::UnfinishedStep) as for
/// [`save_training`](super::super::save_training), and on rank 0 those of writing the file; each ends the job of the others too.
pub fn save_gathered<M: Fp8Module + ?Sized, O: ResumableOptimizer + ?Sized>(
    path: impl AsRef<Path>,
    model: &M,
    map: &ShardedVarMap,
    optimizer: &O,
    meta: &TrainingMeta,
) -> Result<()> {
    let group = map.group();
    gather_state_of(model, group, optimizer.announces_changes())?;
    let here = group.rank() == 0;
    let mut tensors = BTreeMap::new();
    let keep = |whole: Tensor| here.then(|| whole.to_device(&Device::Cpu)).transpose();
    for var in map.vars() {
        let whole = keep(var.gather()?)?;
        tensors.extend(whole.map(|whole| (var.name().to_string(), whole)));
    }
    let state = optimizer.optimizer_state()?;
    let Parts { ranges, others } = of_optimizer(&state, map);
    // A rank that holds no part of a parameter has no moments for it.
    let names: BTreeSet<(String, String)> = ranges.keys().cloned().collect();
    let names: BTreeSet<(String, String)> =
        gathered(&names, group)?.into_iter().flatten().collect();
    let mut whole_state = vec![];
    for (name, part) in names {
        let Some(var) = map.get(&name) else { continue };
        let own = match ranges.get(&(name.clone(), part.clone())) {
            Some(own) => own.clone(),
            None => Tensor::zeros(0, DType::F32, map.device())?,
        };
        let whole = keep(var.gather_like(&own)?)?;
        whole_state.extend(whole.map(|whole| (format!("{name}.{part}"), whole)));
    }
    if here {
        whole_state.extend(others);
        let state = super::parts::with_tensors(&state, whole_state)?;
        let layers = prepared_layers(model);
        let written = write(path.as_ref(), tensors, Some(&layers), &state, meta);
        written.inspect_err(|error| {
            group.give_up(error);
        })?;
    }
    Ok(group.barrier()?)
}
