//! Casts of rows that are made for them alone, a few at a time in a core's own cache, and sums over the rows beside a cast.

use super::cast::{larger, task_len};
use super::elements::{tensor, with_scales};
use super::fill::filled;
use super::sums;
use crate::base::error::Result;
use candle_core::{DType, Tensor};
use fp8_core::{Cast, HighPrecision, ScaleGrid};

/// Rows of a matrix.
pub(crate) trait MadeRows<T>: Sync {
    /// `len` elements of whole rows from `start` on; `room` may be used for them.
    fn rows<'a>(&'a self, start: usize, len: usize, room: &'a mut Vec<T>) -> &'a [T];
}

impl<T: Default + Copy, F: Fn(usize, &mut [T]) + Sync> MadeRows<T> for F {
    fn rows<'a>(&'a self, start: usize, len: usize, room: &'a mut Vec<T>) -> &'a [T] {
        room.resize(len, T::default());
        self(start, room);
        room
    }
}

/// Rows that are there.
pub(crate) struct Stored<'a, T>(pub(crate) &'a [T]);

impl<T: Sync> MadeRows<T> for Stored<'_, T> {
    fn rows<'a>(&'a self, start: usize, len: usize, _: &'a mut Vec<T>) -> &'a [T] {
        &self.0[start..start + len]
    }
}

/// Elements that are made and cast at a time: they stay in the core's own cache.
const PIECE: usize = 1 << 12;

/// The cast of rows.
pub(crate) struct CastRows {
    /// One row behind the other.
    pub(crate) codes: Tensor,
    pub(crate) amax: f32,
    /// The sums over the rows before the cast, if asked for.
    pub(crate) sums: Option<Tensor>,
}

/// Casts all rows of a matrix, which has one scale; with `sum_rows`, sums over them in that dtype.
pub(crate) fn encode_rows<T: HighPrecision>(
    grid: &ScaleGrid,
    quant_scale: &Tensor,
    cast: &Cast,
    sum_rows: Option<DType>,
    made: &impl MadeRows<T>,
) -> Result<CastRows> {
    crate::base::simd::check()?;
    let (cols, len) = (grid.cols().max(1), grid.rows() * grid.cols());
    let piece = cols * (PIECE / cols).max(1);
    let task = match sum_rows {
        Some(_) => sums::block_len(grid.rows(), grid.cols()),
        None => task_len(cols),
    };
    let (codes, parts) = with_scales("quantize", quant_scale, |scales| {
        Ok(filled(0u8, len, task, |start, codes| {
            let mut room = Vec::new();
            let mut sums = vec![0.; if sum_rows.is_some() { cols } else { 0 }];
            let mut amax = 0f32;
            for (index, codes) in codes.chunks_mut(piece).enumerate() {
                let start = start + index * piece;
                let values = made.rows(start, codes.len(), &mut room);
                let row = start / cols;
                let part = fp8_core::encode_rows_with_amax(cast, values, row, grid, scales, codes);
                amax = larger(amax, part);
                if sum_rows.is_some() {
                    sums::add_rows(&mut sums, values);
                }
            }
            (amax, sums)
        }))
    })?;
    let (amaxes, blocks): (Vec<f32>, Vec<Vec<f32>>) = parts.into_iter().unzip();
    let sums = sum_rows.map(|dtype| sums::rounded(&sums::of_blocks(grid.cols(), blocks), dtype));
    Ok(CastRows {
        codes: tensor(codes, len)?,
        amax: amaxes.into_iter().fold(0., larger),
        sums: sums.transpose()?,
    })
}
