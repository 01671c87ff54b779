//! The state that ranks hold in parts.

use super::prepared::{check_between_steps, prepared_layers};
use crate::autocast::end_step;
use crate::error::Result;
use crate::module::Fp8Module;
use candle_core::{Device, Tensor};
use fp8_candle::StateTable;
use fp8_ranks::ProcessGroup;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Prepares for a checkpoint that one rank writes with [`save_training`](super::save_training): ends the step on all ranks
/// ([`end_step`](crate::end_step)), after which saving needs no other rank, and gives each rank the counts of stochastic roundings that
/// the others have made. All ranks call it; then any of them may save, and any number of ranks may resume from the file.
///
/// Counts of Inf and NaN stay those of the rank that saves.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8_ranks::threads;
/// # use fp8_recipes as fp8;
/// use fp8::checkpoint::gather_state;
/// use fp8::{Autocast, PrepareOptions, RecipeName, fp8_autocast, nn, prepare_fp8};
/// use std::sync::Arc;
///
/// threads::run(2, |group| -> fp8::Result<()> {
///     let vars = VarMap::new();
///     let vb = VarBuilder::from_varmap(&vars, candle_core::DType::F32, &Device::Cpu);
///     let model = nn::linear(16, 8, vb.pp("fc"))?;
///     prepare_fp8(&model, &PrepareOptions::default())?;
///     let autocast = Autocast::new(RecipeName::Delayed).reduction_group(Arc::new(group.clone()));
///     let guard = fp8_autocast(autocast)?;
///     let y = model.forward(&Tensor::randn(0f32, 1., (4, 16), &Device::Cpu)?)?;
///     fp8::backward(&y.sqr()?.mean_all()?)?;
///     guard.close()?;
///     gather_state(&model, &group)?;
///     if group.rank() == 0 {
///         // save_training(..)
///     }
///     Ok(())
/// })
/// .into_iter()
/// .collect::<fp8::Result<Vec<()>>>()?;
/// # Ok::<(), fp8::Error>(())
/// ```
///
/// # Errors
/// If the group fails. In the middle of a step it ends the step and warns, once, since it does not know the optimizer.
pub fn gather_state<M: Fp8Module + ?Sized>(model: &M, group: &ProcessGroup) -> Result<()> {
    gather_state_of(model, group, false)
}

/// [`gather_state`] for an optimizer that `announces` each of its steps, or perhaps does not. In the middle of a step of one that does,
/// [`UnfinishedStep`](crate::TrainingCheckpointError::UnfinishedStep) ends the job of all ranks.
pub(super) fn gather_state_of<M: Fp8Module + ?Sized>(
    model: &M,
    group: &ProcessGroup,
    announces: bool,
) -> Result<()> {
    let layers = prepared_layers(model);
    check_between_steps(&layers, announces).inspect_err(|error| {
        // The others do not wait for this rank.
        group.give_up(error);
    })?;
    end_step()?;
    let mut tables: Vec<Arc<StateTable>> = vec![];
    for layer in layers {
        let table = layer.state.table();
        if !tables.iter().any(|known| Arc::ptr_eq(known, table)) {
            tables.push(table.clone());
        }
    }
    let own: Vec<Vec<BTreeMap<u32, u32>>> = tables.iter().map(|table| table.draws()).collect();
    for others in gathered(&own, group)? {
        for (table, draws) in tables.iter().zip(&others) {
            table.merge_draws(draws);
        }
    }
    Ok(())
}

/// The values of all ranks.
pub(super) fn gathered<T: serde::Serialize + serde::de::DeserializeOwned>(
    own: &T,
    group: &ProcessGroup,
) -> Result<Vec<T>> {
    let bytes = serde_json::to_vec(own).map_err(candle_core::Error::wrap)?;
    let ranks = group.size();
    let len = Tensor::new(&[bytes.len() as u32], &Device::Cpu)?;
    let lens = group.all_gather(&len, &vec![1; ranks])?.to_vec1::<u32>()?;
    let lens: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
    let count = bytes.len();
    let bytes = Tensor::from_vec(bytes, count, &Device::Cpu)?;
    let all = group.all_gather(&bytes, &lens)?.to_vec1::<u8>()?;
    let mut rest = &all[..];
    let mut values = vec![];
    for len in lens {
        let (own, others) = rest.split_at(len);
        values.push(serde_json::from_slice(own).map_err(candle_core::Error::wrap)?);
        rest = others;
    }
    Ok(values)
}
