//! Outliers of a norm's results that move into the weights of the layers that read them, by powers of two.

use super::found::FoundCodes;
use super::stage::{Fed, Tried};
use super::task::Task;
use crate::models::error::Result;
use crate::models::families::Blocks;
use candle_core::{D, DType, Tensor};
use fp8_files::names::weight_name;
use fp8_files::search::{inverse_shift, shifted, shifts_exactly, shifts_to_try};

/// Tokens of all samples together on which lists of exponents are compared with plain rounding.
const TOKENS: usize = 1024;

/// A list has to make the squared error smaller than this part of it. Most models have no outliers that E4M3 would not hold, and then the
/// lists differ by chance.
const WORTH: f64 = 0.98;

/// A norm that the files can hold with other numbers, and all that reads its result.
pub(super) struct Group {
    /// The path of the norm.
    norm: String,
    /// Paths of its linear layers.
    pub(super) layers: Vec<String>,
}

/// The norms of a block that can be shifted: every tensor that takes part is one of the files' own.
pub(super) fn groups<B: Blocks>(block: &B::Block, task: &Task<'_>) -> Vec<Group> {
    if !task.search.outliers {
        return vec![];
    }
    let tied = task.source.tied();
    let is_own = |name: &str, features: usize| {
        let shared = tied.iter().any(|(a, b)| a == name || b == name);
        let shape = task.source.shape(name);
        !shared && shape.is_some_and(|shape| shape.last() == Some(&features))
    };
    let mut block = block.clone();
    let groups = B::norms(&mut block).into_iter().filter_map(|readers| {
        let norm = readers.norm.path()?.to_string();
        let features = readers.norm.weight().dims1().ok()?;
        let router = readers.router.map(|router| router.path().to_string());
        let layers: Vec<String> = readers.layers.iter().map(|l| l.path().into()).collect();
        let weights = layers.iter().chain([&norm]).map(|path| weight_name(path));
        let are_own = weights.chain(router).all(|name| is_own(&name, features));
        let are_plain = readers
            .layers
            .iter()
            .all(|layer| layer.searchable().is_ok());
        (are_own && are_plain).then_some(Group { norm, layers })
    });
    groups.collect()
}

/// The exponents of the norm's features under which plain rounding of the searched layers has the smallest error; None if it is hardly
/// smaller than without.
pub(super) fn choose<B: Blocks>(
    group: &Group,
    block: &B::Block,
    fed: &[Fed<'_>],
    task: &Task<'_>,
) -> Result<Option<Vec<i8>>> {
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
    let samples = fed.iter().map(|fed| fed.inputs.len()).sum::<usize>();
    let most = Some(TOKENS.div_ceil(samples.max(1)));
    let plainly = |shift: Option<&[i8]>| -> Result<f64> {
        let mut sum = 0.;
        for fed in fed {
            for (at, (path, weight)) in fed.stage.paths.iter().zip(&fed.weights).enumerate() {
                let weight = weight.to_dtype(DType::F32)?;
                let weight = match shift {
                    None => weight,
                    Some(shift) => shifted(&weight, &inverse_shift(shift))?,
                };
                let scheme = task.wanted[path].0.scheme;
                let codes = scheme.quantize(&weight, None, false, path)?;
                let values = codes.dequantize(DType::F32)?;
                sum += fed.error(at, &values, shift, most, task)?;
            }
        }
        Ok(sum)
    };
    let mut best = (plainly(None)? * WORTH, None);
    let lists = shifts_to_try(&inputs.to_vec1::<f32>()?, &weights.to_vec1::<f32>()?);
    for list in lists {
        if !is_exact::<B>(group, block, &list, task)? {
            continue;
        }
        let error = plainly(Some(&list))?;
        if error < best.0 {
            best = (error, Some(list));
        }
    }
    Ok(best.1)
}

/// Takes the largest magnitudes of the features of `x` into `all`.
fn largest(all: &mut Option<Tensor>, x: &Tensor) -> Result<()> {
    let x = x.to_dtype(DType::F32)?.reshape(((), x.dim(D::Minus1)?))?;
    let own = x.abs()?.max(0)?;
    *all = Some(match all.take() {
        None => own,
        Some(all) => all.maximum(&own)?,
    });
    Ok(())
}

/// Whether no tensor of the files loses anything by these exponents. Layers that are searched are read in f32.
fn is_exact<B: Blocks>(
    group: &Group,
    block: &B::Block,
    shift: &[i8],
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
    shift: &[i8],
    task: &Task<'_>,
) -> Result<bool> {
    let (mut before, mut after) = (0f64, 0f64);
    for (fed, (without, with)) in fed.iter().zip(without.iter().zip(with)) {
        for (at, (without, with)) in without.iter().zip(with).enumerate() {
            let values = |tried: &Tried| tried.searched.codes.dequantize(DType::F32);
            let own = fed.error(at, &values(without)?, None, None, task)?;
            let shifted = fed.error(at, &values(with)?, Some(shift), None, task)?;
            // Also not if it is no number.
            if !(shifted <= own && with.searched.error <= without.searched.plain_error) {
                return Ok(false);
            }
            before += own;
            after += shifted;
        }
    }
    Ok(after < before)
}

/// Multiplies the norm by these powers of two, divides all that reads it, and notes both.
pub(super) fn apply<B: Blocks>(
    group: &Group,
    block: &mut B::Block,
    shift: &[i8],
    found: &mut FoundCodes,
) -> Result<()> {
    let (chosen, inverse) = (&mut found.chosen, inverse_shift(shift));
    found.shifted.push(group.norm.clone());
    for readers in B::norms(block) {
        if readers.norm.path() != Some(&group.norm) {
            continue;
        }
        let weight = shifted(readers.norm.weight(), shift)?;
        let name = weight_name(&group.norm);
        *readers.norm = crate::nn::RmsNorm::new(weight, readers.norm.eps()).with_path(&*group.norm);
        chosen.shifts.insert(name, shift.to_vec());
        if let Some(router) = readers.router {
            let weight = shifted(router.tensor(), &inverse)?;
            *router = crate::nn::NamedTensor::new(router.path(), weight);
            chosen.shifts.insert(router.path().into(), inverse.clone());
        }
        for layer in readers.layers {
            layer.set_weight(shifted(&layer.searchable()?.weight()?, &inverse)?);
            chosen
                .shifts
                .insert(weight_name(layer.path()), inverse.clone());
        }
    }
    Ok(())
}
