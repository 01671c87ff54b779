//! When a weight that is elsewhere is fetched, and what is kept of it between a forward pass and its backward pass.

use super::plan::{GemmPlan, LinearPlan, SavedCasts};
use super::source::WeightSource;
use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::replay::RecordedCast;
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::cast::weight_version::Seen;
use crate::graph::wide::is_second_run;
use candle_core::Tensor;
use fp8_core::Contraction;

/// The cast of a weight that was fetched for it.
fn fetch(
    source: &dyn WeightSource,
    cast: &Quantizer,
    (contraction, both): (Contraction, bool),
    plan: &LinearPlan,
) -> Result<(Quantized, Option<Tensor>)> {
    if plan.fetches_codes
        && let Some(codes) = source.codes(cast, contraction)?
    {
        return Ok((codes, None));
    }
    let values = source.values()?;
    let quantized = cast.quantize_for(&values, contraction, both)?;
    Ok((quantized, Some(values)))
}

/// The codes for the forward pass. What the backward pass needs to fetch them again goes into `saved`, or, if this is a second forward
/// pass, the codes or values themselves.
pub(crate) fn codes_for_forward(
    source: &dyn WeightSource,
    plan: &LinearPlan,
    gemm: &GemmPlan,
    x_tracks: bool,
    saved: &mut SavedCasts<Fp8Tensor>,
) -> Result<Fp8Tensor> {
    saved.seen = x_tracks.then(|| Seen::of(source.variable())).transpose()?;
    let serves = (plan.grad_input.as_ref()).is_some_and(|second| gemm.b.serves(&second.b));
    let both = x_tracks && serves && is_second_run();
    let (quantized, values) = fetch(source, &gemm.b, (Contraction::Cols, both), plan)?;
    match (x_tracks, serves, is_second_run()) {
        (true, true, true) => saved.weight = Some(quantized.tensor.clone()),
        (true, true, false) => saved.weight_again = Some(RecordedCast::of(&quantized)?),
        (true, false, true) => saved.weight_values = values,
        _ => {}
    }
    Ok(quantized.tensor)
}

/// The values for a forward pass in high precision.
pub(crate) fn values_for_forward(
    source: &dyn WeightSource,
    x_tracks: bool,
    saved: &mut SavedCasts<Fp8Tensor>,
) -> Result<Tensor> {
    saved.seen = x_tracks.then(|| Seen::of(source.variable())).transpose()?;
    let values = source.values()?;
    if x_tracks && is_second_run() {
        saved.weight_values = Some(values.clone());
    }
    Ok(values)
}

/// The values for the backward pass.
pub(crate) fn values_again(
    source: &dyn WeightSource,
    plan: &LinearPlan,
    saved: &SavedCasts<Fp8Tensor>,
) -> Result<Tensor> {
    let values = match &saved.weight_values {
        Some(values) => values.clone(),
        None => source.values()?,
    };
    saved.check(source.variable(), &plan.path)?;
    Ok(values)
}

/// The codes for the backward pass: those of the forward pass if it has left how they were made, else made by `cast`.
pub(crate) fn codes_again(
    source: &dyn WeightSource,
    cast: &Quantizer,
    plan: &LinearPlan,
    saved: &SavedCasts<Fp8Tensor>,
) -> Result<Fp8Tensor> {
    let recorded = saved.weight_again.clone().map(Quantizer::from);
    let cast = recorded.as_ref().unwrap_or(cast);
    let codes = match &saved.weight_values {
        Some(values) => cast.quantize(values, Contraction::Rows)?.tensor,
        None => {
            fetch(source, cast, (Contraction::Rows, false), plan)?
                .0
                .tensor
        }
    };
    saved.check(source.variable(), &plan.path)?;
    Ok(codes)
}
