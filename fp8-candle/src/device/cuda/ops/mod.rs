//! Launches of the fused differentiable building blocks: f32, bf16 and f16, computed in f32 and rounded once.
//!
//! Arguments are contiguous tensors of checked shapes, at any offset of their storage. Nothing is copied to the host.

pub(crate) mod activation;
pub(crate) mod cross_entropy;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod softmax;

use super::kernels::{Arg, Shape};

/// The kernels of each file, for the test that compares declarations with the PTX.
#[cfg(test)]
pub(crate) const KERNELS: &[&[&[super::kernels::Kernel]]] = &[
    activation::KERNELS,
    cross_entropy::KERNELS,
    norm::KERNELS,
    rope::KERNELS,
    softmax::KERNELS,
];

/// The launch of a kernel that works by rows: its blocks, and its last argument, which says whether each warp takes a row.
///
/// How many threads sum a row depends only on its length, so a row has the same result in any matrix.
fn by_rows(rows: usize, cols: usize) -> (Shape, Arg) {
    const LONGEST_OF_A_WARP: usize = 1024;
    const WARPS: usize = 4;
    if cols <= LONGEST_OF_A_WARP {
        let shape = Shape::blocks(rows.div_ceil(WARPS), WARPS as u32 * 32);
        return (shape, Arg::Int(1));
    }
    // About two chunks of eight for each thread, and no more threads than `ROW_THREADS` in kernels/rows.cuh.
    let threads = (cols / 16).next_power_of_two().clamp(128, 512) as u32;
    (Shape::blocks(rows, threads), Arg::Int(0))
}
