//! Factors by which a norm's features move to where they are rounded less.
//!
//! The steps of E4M3 are an eighth of the power of two below them, so a number is rounded by up to 6% just above a power of two and by
//! half of that just below one. A scale that is a power of two leaves numbers where they are among these steps. Features whose large values
//! are about the same for all tokens, as a model's outliers are, gain from a factor that moves these values; the weights that read them
//! are divided by it before their codes are chosen.

use super::shifts::{Group, plain_error};
use super::stage::Fed;
use super::task::Task;
use crate::models::error::Result;
use crate::models::families::Blocks;
use candle_core::{D, DType, Tensor};
use fp8_candle::InputScaling;
use fp8_core::{Contraction, Format, Granularity, MX_BLOCK, decode_rows, encode_groups};
use fp8_files::names::weight_name;
use fp8_files::search::shifted;
use rayon::prelude::*;

/// Factors that are tried, in equal steps over a factor of two.
const FACTORS: usize = 16;

/// A factor must reduce a feature's squared error to less than this share.
const WORTH: f64 = 0.97;

fn factor(index: usize) -> f32 {
    (index as f32 / FACTORS as f32 - 0.5).exp2()
}

/// The squared error of each feature, as a part of the inputs, under each factor.
type Errors = Vec<Vec<f64>>;

/// `shift` with each feature's best factor on top of it; None if the norm cannot be retuned, or gains nothing.
pub(super) fn choose<B: Blocks>(
    group: &Group,
    block: &B::Block,
    fed: &[Fed<'_>],
    shift: Option<&[f32]>,
    task: &Task<'_>,
) -> Result<Option<Vec<f32>>> {
    let Some(norm) = own_norm::<B>(group, block, task)? else {
        return Ok(None);
    };
    let features = norm.elem_count();
    let before = shift.map_or_else(|| vec![1.; features], <[f32]>::to_vec);
    let mut errors: Errors = vec![vec![0.; features]; FACTORS];
    for fed in fed {
        let (_, scaling) = &task.wanted[fed.stage.first()];
        let Some(group) = group_of_powers(scaling, features) else {
            return Ok(None);
        };
        for (x, _) in &fed.inputs {
            let x = shifted(&x.to_dtype(DType::F32)?, &before)?;
            add(&mut errors, &errors_of(&x, group)?);
        }
    }
    let best = (0..features).map(|feature| {
        let error = |index: &usize| errors[*index][feature];
        let best = (0..FACTORS).min_by(|a, b| error(a).total_cmp(&error(b)));
        let best = best.filter(|best| error(best) < WORTH * error(&(FACTORS / 2)));
        best.map_or(1., factor)
    });
    let best: Vec<f32> = best.collect();
    // The norm's weight is rounded in the files, which decides on the factors.
    let stored = task.source.dtype(&weight_name(&group.norm));
    let own = shifted(&norm.to_dtype(DType::F32)?, &before)?;
    let moved = shifted(&own, &best)?.to_dtype(norm.dtype())?;
    let moved = moved.to_dtype(stored.unwrap_or(DType::F32))?;
    let weights = own.to_vec1::<f32>()?.into_iter();
    let weights = weights.zip(moved.to_dtype(DType::F32)?.to_vec1::<f32>()?);
    let after = before.iter().zip(weights).map(|(shift, (own, moved))| {
        let factor = moved / own;
        // Not if the weight is zero, or has no digits left.
        match (0.5..2.).contains(&factor) {
            true => shift * factor,
            false => *shift,
        }
    });
    let after: Vec<f32> = after.collect();
    let gains = after != before
        && plain_error(fed, Some(&after), task)? < plain_error(fed, Some(&before), task)?;
    Ok(gains.then_some(after))
}

/// The number of neighbouring features whose scale is a power of two; None if scales are other numbers.
fn group_of_powers(scaling: &InputScaling, features: usize) -> Option<usize> {
    match scaling {
        InputScaling::DynamicMx => Some(MX_BLOCK),
        scaling if !scaling.has_power_of_two_scales() => None,
        InputScaling::DynamicPerGroup { size, .. } => Some((*size).max(1)),
        // A scale for more than a token's features differs by powers of two, which changes nothing but what the smallest ones become.
        _ => Some(features),
    }
}

fn add(all: &mut Errors, errors: &Errors) {
    for (all, errors) in all.iter_mut().flatten().zip(errors.iter().flatten()) {
        *all += errors;
    }
}

/// The errors of casts of `x`, `[.., features]` in f32, in groups of `group` features.
fn errors_of(x: &Tensor, group: usize) -> Result<Errors> {
    let features = x.dim(D::Minus1)?;
    let x = x.flatten_all()?.to_vec1::<f32>()?;
    let groups = Granularity::Blockwise {
        rows: 1,
        cols: group,
    };
    let grid = groups.grid(1, features, Contraction::Cols);
    let errors = (0..FACTORS).into_par_iter().map(|index| {
        let factor = factor(index);
        let (mut errors, mut codes) = (vec![0.; features], vec![0; features]);
        let (mut moved, mut rounded) = (vec![0.; features], vec![0.; features]);
        let mut scales = vec![0.; grid.len()];
        for row in x.chunks_exact(features.max(1)) {
            for (moved, x) in moved.iter_mut().zip(row) {
                *moved = x * factor;
            }
            encode_groups(&moved, features, group, &mut codes, &mut scales);
            decode_rows(Format::E4M3, &codes, 0, &grid, &scales, &mut rounded);
            for ((error, moved), rounded) in errors.iter_mut().zip(&moved).zip(&rounded) {
                let missing = (moved - rounded) / factor;
                *error += f64::from(missing * missing);
            }
        }
        errors
    });
    Ok(errors.collect())
}

/// The weight of the group's norm in this block, if codes are chosen for all that reads it.
fn own_norm<B: Blocks>(group: &Group, block: &B::Block, task: &Task<'_>) -> Result<Option<Tensor>> {
    let all_have_codes = |path: &String| task.wanted.contains_key(path);
    if !(task.search.retuning && group.layers.iter().all(all_have_codes)) {
        return Ok(None);
    }
    let mut block = block.clone();
    let own = B::norms(&mut block)
        .into_iter()
        .find(|readers| readers.norm.path() == Some(&group.norm));
    Ok(own.and_then(|readers| match readers.router {
        Some(_) => None,
        None => Some(readers.norm.weight().clone()),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// The errors are those of the casts that a served model makes, and numbers that tokens share are moved off the widest steps.
    #[test]
    fn errors_are_those_of_the_served_cast() {
        let (tokens, features) = (40, 64);
        let number = |i: usize| {
            let noise = ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608. - 1.;
            match i % features {
                5 => 1.06 + 0.01 * noise,
                _ => noise,
            }
        };
        let x = Tensor::from_iter((0..tokens * features).map(number), &Device::Cpu).unwrap();
        let x = x.reshape((1, tokens, features)).unwrap();
        for scaling in [
            InputScaling::DynamicMx,
            InputScaling::per_token().with_power_of_two(true),
            InputScaling::per_group(64).with_power_of_two(true),
        ] {
            let group = group_of_powers(&scaling, features).unwrap();
            let errors = errors_of(&x, group).unwrap();
            for (index, errors) in errors.iter().enumerate() {
                let moved = (&x * f64::from(factor(index))).unwrap();
                let missing = (scaling.multiplied(&moved).unwrap() - &moved).unwrap();
                let served = missing.sqr().unwrap().sum(1).unwrap();
                let served = served.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                for (error, served) in errors.iter().zip(served) {
                    let served = f64::from(served / factor(index) / factor(index));
                    assert!(
                        (error - served).abs() <= 1e-4 * served + 1e-9,
                        "{error} {served}"
                    );
                }
            }
            let of_5 = |index: usize| errors[index][5];
            let least = (0..FACTORS).map(of_5).fold(f64::INFINITY, f64::min);
            assert!(least < 0.5 * of_5(FACTORS / 2), "{least}");
        }
        assert_eq!(group_of_powers(&InputScaling::per_token(), features), None);
        assert_eq!(group_of_powers(&InputScaling::None, features), None);
    }
}
