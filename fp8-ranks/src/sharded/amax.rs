//! The amax of a parameter in parts: reduced when it is needed, or for all weights at once after the optimizer's step.

use super::map::ShardedVarMap;
use super::var::ShardedVar;
use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use fp8_candle::device::backend;
use fp8_candle::fingerprint;
use fp8_candle::state::ReductionGroup;
use fp8_candle::weight_version::WeightVersion;
use fp8_core::ScaleGrid;

/// Reduces the amaxes of all weights that travel as FP8 codes with scales of their own (dynamic and current ones), in one collective. Call it
/// on all ranks after each step of the optimizer, as torchao's function of this name: weights are gathered twice until the next step,
/// and each forward pass would otherwise reduce the amax of each weight by itself. The weights are known after their first forward
/// pass; before it, and in runs whose weights do not travel as codes, there is nothing to reduce.
///
/// Returns how many amaxes were reduced. The next step of an optimizer of [`ShardedVarMap`] forgets them.
///
/// # Errors
/// Those of the group.
pub fn precompute_float8_dynamic_scale_for_fsdp(map: &ShardedVarMap) -> Result<usize> {
    let mut vars = map.vars();
    vars.retain(|var| var.amax().is_wanted());
    if vars.is_empty() {
        return Ok(0);
    }
    let own = vars.iter().map(ShardedVar::own_amax);
    let own = own.collect::<Result<Vec<_>>>()?;
    let group = map.group();
    let failed = |error: candle_core::Error| group.give_up(error);
    let all = Tensor::cat(&own, 0).map_err(failed)?;
    let all = group.all_reduce_max(&all).map_err(|error| match error {
        fp8_candle::Error::Group(error) => match error.downcast::<Error>() {
            Ok(own) => *own,
            Err(other) => group.give_up(other),
        },
        other => group.give_up(other),
    })?;
    for (index, var) in vars.iter().enumerate() {
        let amax = all.narrow(0, index, 1).map_err(failed)?;
        var.amax().know(amax, var.stamp()?);
    }
    Ok(vars.len())
}

impl ShardedVar {
    /// The amax of the whole, f32 `[1]`. All ranks call it.
    pub(super) fn whole_amax(&self, wanted_again: bool) -> Result<Tensor, fp8_candle::Error> {
        if wanted_again {
            self.amax().want();
        }
        match self.amax().known() {
            Some((amax, stamp)) if stamp == self.stamp()? => Ok(amax),
            Some(_) => {
                let name = self.name().to_string();
                Err(self.group().give_up(Error::StaleAmax { name }).into())
            }
            None => self.group().all_reduce_max(&self.own_amax()?),
        }
    }

    /// The amax of this rank's range, f32 `[1]`; 0 without elements.
    fn own_amax(&self) -> Result<Tensor> {
        let shard = self.shard().as_detached_tensor();
        let amax = || match shard.elem_count() {
            0 => Ok(Tensor::zeros(1, candle_core::DType::F32, shard.device())?),
            count => {
                let grid = ScaleGrid::tensorwise(1, count);
                let amax = backend(shard.device())?.amax(&shard, &grid)?;
                Ok::<_, fp8_candle::Error>(amax.reshape(1)?)
            }
        };
        amax().map_err(|error| self.group().give_up(error))
    }

    /// A number that another one follows when the range changes.
    fn stamp(&self) -> Result<u64> {
        let shard = self.shard();
        match (shard.elem_count(), shard.device()) {
            (0, _) => Ok(0),
            (_, Device::Cpu) => fingerprint(shard).map_err(|error| self.group().give_up(error)),
            // Without a copy to the host: optimizers announce changes.
            _ => Ok(WeightVersion::of(shard).get()),
        }
    }
}
