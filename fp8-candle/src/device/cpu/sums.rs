//! Sums over the rows of a matrix.
//!
//! Rows are added in blocks, then the sums of the blocks, in order. The sizes of a matrix alone decide on its blocks, so the sums have
//! the same bits with any number of threads, and whether or not a cast reads the rows in the same pass.

use super::elements::{for_dtype, tensor};
use crate::base::error::Result;
use crate::base::simd::simd;
use candle_core::{DType, Tensor};
use fp8_core::HighPrecision;

/// The most blocks, and the fewest elements of a block but the last.
const BLOCKS: usize = 64;
const LEAST: usize = 1 << 14;

/// Elements of a block.
pub(super) fn block_len(rows: usize, cols: usize) -> usize {
    let cols = cols.max(1);
    rows.div_ceil(BLOCKS).max(LEAST.div_ceil(cols)) * cols
}

/// Adds whole rows to `sums`, which are as many as a row has elements.
pub(super) fn add_rows<T: HighPrecision>(sums: &mut [f32], rows: &[T]) {
    simd(
        #[inline(always)]
        || {
            for row in rows.chunks_exact(sums.len().max(1)) {
                for (sum, x) in sums.iter_mut().zip(row) {
                    *sum += x.to_f32();
                }
            }
        },
    );
}

/// The sums of all rows, from those of the blocks.
pub(super) fn of_blocks(cols: usize, blocks: impl IntoIterator<Item = Vec<f32>>) -> Vec<f32> {
    let mut sums = vec![0.; cols];
    for block in blocks {
        add_rows(&mut sums, &block);
    }
    sums
}

/// The sums over the rows of `x`.
pub(super) fn sum_rows<T: HighPrecision>(x: &[T], cols: usize) -> Vec<f32> {
    let rows = x.len().checked_div(cols).unwrap_or(0);
    let blocks = x.chunks(block_len(rows, cols));
    let blocks = crate::base::parallel::map(blocks, |rows| {
        let mut sums = vec![0.; cols];
        add_rows(&mut sums, rows);
        sums
    });
    of_blocks(cols, blocks)
}

/// Sums in `dtype`, rounded once.
pub(super) fn rounded(sums: &[f32], dtype: DType) -> Result<Tensor> {
    for_dtype!("sum_rows", "the output", dtype, T => {
        let mut rounded = vec![T::default(); sums.len()];
        fp8_core::narrow(sums, &mut rounded);
        tensor(rounded, sums.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_all_rows() {
        for (rows, cols) in [
            (0, 3),
            (1, 1),
            (7, 300),
            (1000, 9),
            (300, 1000),
            (3, 20_000),
        ] {
            let x: Vec<f32> = (0..rows * cols).map(|i| (i % 101) as f32 - 50.).collect();
            // Whole numbers: each sum is exact.
            let expected: Vec<f32> = (0..cols)
                .map(|col| x.iter().skip(col).step_by(cols).sum())
                .collect();
            assert_eq!(sum_rows(&x, cols), expected, "{rows}x{cols}");
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (rows, cols) = (777, 130);
        let x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin()).collect();
        let bits = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let sums = pool.build().unwrap().install(|| sum_rows(&x, cols));
            sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(bits(1), bits(2));
        assert_eq!(bits(1), bits(5));
    }
}
