//! Collectives as operations of candle's graph.
//!
//! A tensor that ranks hold whole has one gradient, the same on all of them; a tensor that they hold in parts has parts of it. Each
//! operation says which of its tensors are which. All ranks go through the same operations in the same order, forward and backward.

use crate::error::Failure;
use crate::group::ProcessGroup;
use crate::sum::ReduceOp;
use candle_core::{D, Tensor};
use fp8_candle::Error;
use fp8_candle::wide::node;

type Result<T> = fp8_candle::Result<T>;

fn other(error: crate::Error) -> Error {
    Error::Group(Box::new(error))
}

fn sum(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    group.all_reduce(x, ReduceOp::Sum).map_err(other)
}

/// The parts of all ranks along the last dimension, in their order. The parts are of one size.
fn joined(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let ranks = group.size();
    let part = x.contiguous()?.unsqueeze(0)?;
    let all = group.all_gather(&part, &vec![1; ranks]).map_err(other)?;
    let parts = (0..ranks).map(|rank| all.get(rank));
    Ok(Tensor::cat(
        &parts.collect::<candle_core::Result<Vec<_>>>()?,
        D::Minus1,
    )?)
}

/// This rank's part along the last dimension.
fn own(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let (len, ranks) = (x.dim(D::Minus1)?, group.size());
    if !len.is_multiple_of(ranks) {
        return Err(Error::Group(Box::new(Failure::Uneven { len, ranks })));
    }
    let part = len / ranks;
    Ok(x.narrow(D::Minus1, group.rank() * part, part)?
        .contiguous()?)
}

/// The sum over the ranks: each holds a summand of `x`, and the result is the same on all. Its gradient is that of every summand.
///
/// # Errors
/// Errors of the group, and of candle.
pub fn sum_of_summands(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let result = sum(&x.detach(), group)?;
    node("sum_of_summands", x, &result, |grad| Ok(grad.clone()))
}

/// `x` itself, which all ranks hold and use for parts of the same result: its gradient is the sum of the gradients of all ranks.
///
/// # Errors
/// Errors of the group, and of candle.
pub fn used_in_parts(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let group = group.clone();
    node("used_in_parts", x, x, move |grad| sum(grad, &group))
}

/// The whole tensor from parts of its last dimension. Every rank uses the whole in the same way, so each has the whole gradient, of
/// which it keeps its part.
///
/// # Errors
/// Errors of the group, and of candle.
pub fn gathered(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let result = joined(&x.detach(), group)?;
    let group = group.clone();
    node("gathered", x, &result, move |grad| own(grad, &group))
}

/// The whole tensor from parts of its last dimension. Every rank uses the whole for its own part of a batch; a rank gets its part of the
/// mean of their gradients, as data parallel training averages them.
///
/// # Errors
/// Errors of the group, and of candle.
pub fn gathered_for_own_data(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let result = joined(&x.detach(), group)?;
    let group = group.clone();
    node("gathered_for_own_data", x, &result, move |grad| {
        let ranks = group.size();
        let parts = (0..ranks).map(|rank| {
            let part = grad.dim(D::Minus1)? / ranks;
            grad.narrow(D::Minus1, rank * part, part)?.contiguous()
        });
        let parts = Tensor::stack(&parts.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
        let own = group.reduce_scatter(&parts, &vec![1; ranks], ReduceOp::Sum);
        Ok((own.map_err(other)?.squeeze(0)? / ranks as f64)?)
    })
}

/// This rank's part of the last dimension of a tensor that all ranks hold whole: its gradient is gathered from theirs.
///
/// # Errors
/// [`Failure::Uneven`] unless the dimension is a multiple of the ranks, errors of the group, and of candle.
pub fn own_part(x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let result = own(&x.detach(), group)?;
    let group = group.clone();
    node("own_part", x, &result, move |grad| joined(grad, &group))
}
