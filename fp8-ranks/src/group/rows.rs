//! Tensors as an engine takes them, and back.

use super::started::Then;
use crate::error::Failure;
use candle_core::{Shape, Tensor};

/// The elements in order, without a graph.
pub(super) fn flat(tensor: &Tensor) -> Result<Tensor, Failure> {
    Ok(tensor.detach().flatten_all()?.contiguous()?)
}

/// The elements of a tensor that must have `expected` rows, and how many elements a row has.
pub(super) fn rows(tensor: &Tensor, expected: usize) -> Result<(Tensor, usize), Failure> {
    match tensor.dims() {
        [got, rest @ ..] if *got == expected => Ok((flat(tensor)?, rest.iter().product())),
        dims => Err(Failure::Rows {
            shape: dims.to_vec(),
            got: dims.first().copied().unwrap_or(0),
            expected,
        }),
    }
}

/// Gives elements the shape of `tensor`'s rows.
pub(super) fn shaped(tensor: &Tensor, rows: usize) -> Then {
    let mut dims = tensor.dims().to_vec();
    dims[0] = rows;
    Box::new(move |flat| Ok(flat.reshape(Shape::from(dims))?))
}
