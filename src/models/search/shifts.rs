//! Shifts: factors by which a norm is multiplied and the weights that read it are divided.

use super::found::FoundCodes;
use super::stage::Fed;
use super::task::Task;
use crate::models::error::Result;
use crate::models::families::Blocks;
use candle_core::DType;
use fp8_files::names::weight_name;
use fp8_files::search::{inverse_shift, shifted};

/// Tokens of all samples together on which shifts are compared with plain rounding.
const TOKENS: usize = 1024;

/// A norm whose tensors the files can hold with other numbers, and everything that reads its result.
pub(super) struct Group {
    /// The path of the norm.
    pub(super) norm: String,
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

/// The squared errors of the searched layers' outputs with plain rounding under `shift`, each over its own squares.
pub(super) fn plain_error(fed: &[Fed<'_>], shift: Option<&[f32]>, task: &Task<'_>) -> Result<f64> {
    let samples = fed.iter().map(|fed| fed.inputs.len()).sum::<usize>();
    let most = Some(TOKENS.div_ceil(samples.max(1)));
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
}

/// Multiplies the norm by this shift, divides everything that reads it, and records both.
pub(super) fn apply<B: Blocks>(
    group: &Group,
    block: &mut B::Block,
    shift: &[f32],
    found: &mut FoundCodes,
) -> Result<()> {
    let (chosen, inverse) = (&mut found.chosen, inverse_shift(shift));
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
