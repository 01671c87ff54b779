//! Outliers of a norm's results that move into the weights of the layers that read them, by powers of two.

use super::shifts::{Group, plain_error};
use super::stage::{Fed, Tried};
use super::task::Task;
use crate::models::error::Result;
use crate::models::families::Blocks;
use candle_core::{D, DType, Tensor};
use fp8_files::names::weight_name;
use fp8_files::search::{inverse_shift, shifts_exactly, shifts_to_try};

/// A shift must reduce the squared error to less than this share. Most models have no outliers that E4M3 could not hold, and then shifts
/// differ only by chance.
const WORTH: f64 = 0.98;

/// The shift by powers of two under which plain rounding of the searched layers has the smallest error; None if none reduces it by much.
pub(super) fn choose<B: Blocks>(
    group: &Group,
    block: &B::Block,
    fed: &[Fed<'_>],
    task: &Task<'_>,
) -> Result<Option<Vec<f32>>> {
    let (mut inputs, mut weights): (Option<Tensor>, Option<Tensor>) = (None, None);
    for fed in fed {
        for (x, _) in &fed.inputs {
            largest(&mut inputs, x)?;
        }
        for weight in &fed.weights {
            largest(&mut weights, weight)?;
        }
    }
    let (Some(inputs), Some(weights)) = (inputs, weights) else {
        return Ok(None);
    };
    let mut best = (plain_error(fed, None, task)? * WORTH, None);
    for shift in shifts_to_try(&inputs.to_vec1::<f32>()?, &weights.to_vec1::<f32>()?) {
        if !is_exact::<B>(group, block, &shift, task)? {
            continue;
        }
        let error = plain_error(fed, Some(&shift), task)?;
        if error < best.0 {
            best = (error, Some(shift));
        }
    }
    Ok(best.1)
}

/// Merges the largest magnitudes of the features of `x` into `all`.
fn largest(all: &mut Option<Tensor>, x: &Tensor) -> Result<()> {
    let x = x.to_dtype(DType::F32)?.reshape(((), x.dim(D::Minus1)?))?;
    let own = x.abs()?.max(0)?;
    *all = Some(match all.take() {
        None => own,
        Some(all) => all.maximum(&own)?,
    });
    Ok(())
}

/// Whether this shift leaves every tensor of the files exact. Layers that are searched are read in f32.
fn is_exact<B: Blocks>(
    group: &Group,
    block: &B::Block,
    shift: &[f32],
    task: &Task<'_>,
) -> Result<bool> {
    let stored = |name: &str| task.source.dtype(name).unwrap_or(DType::F32);
    let inverse = inverse_shift(shift);
    let mut block = block.clone();
    for readers in B::norms(&mut block) {
        if readers.norm.path() != Some(&group.norm) {
            continue;
        }
        let dtype = stored(&weight_name(&group.norm));
        if !shifts_exactly(readers.norm.weight(), shift, dtype)? {
            return Ok(false);
        }
        if let Some(router) = &readers.router
            && !shifts_exactly(router.tensor(), &inverse, stored(router.path()))?
        {
            return Ok(false);
        }
        for layer in readers.layers {
            let dtype = match task.wanted.contains_key(layer.path()) {
                true => DType::F32,
                false => stored(&weight_name(layer.path())),
            };
            if !shifts_exactly(&layer.searchable()?.weight()?, &inverse, dtype)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Whether the layers that were searched with `shift` have smaller errors on all samples than those without it: together, and none of
/// them a larger one.
pub(super) fn is_better(
    fed: &[Fed<'_>],
    [without, with]: [&[Vec<Tried>]; 2],
    shift: &[f32],
    task: &Task<'_>,
) -> Result<bool> {
    let (mut before, mut after) = (0f64, 0f64);
    for (fed, (without, with)) in fed.iter().zip(without.iter().zip(with)) {
        for (at, (without, with)) in without.iter().zip(with).enumerate() {
            let values = |tried: &Tried| tried.searched.codes.dequantize(DType::F32);
            let own = fed.error(at, &values(without)?, None, None, task)?;
            let shifted = fed.error(at, &values(with)?, Some(shift), None, task)?;
            // Not if it is NaN either.
            if !(shifted <= own && with.searched.error <= without.searched.plain_error) {
                return Ok(false);
            }
            before += own;
            after += shifted;
        }
    }
    Ok(after < before)
}
