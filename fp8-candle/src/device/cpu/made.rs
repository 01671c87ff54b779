//! Casts of rows that are made for them alone, a few at a time in a core's own cache, and sums over the rows beside a cast.

use super::cast::{larger, piece_len, task_len};
use super::elements::{tensor, with_scales};
use super::fill::filled_in_pieces;
use super::groups::{Casting, GroupCodes, Groups};
use super::rows::MadeRows;
use super::scratch::Plain;
use super::sums;
use crate::base::error::{Result, internal};
use candle_core::{DType, Tensor};
use fp8_core::{Cast, HighPrecision, ScaleGrid};

/// What is made beside a cast of rows.
pub(crate) struct Beside<'a, T> {
    /// The sums over the rows before the cast, in this dtype.
    pub(crate) sum_rows: Option<DType>,
    /// The codes of another matrix with the same number of rows, which the rows are made from.
    pub(crate) groups: Option<Groups<'a, T>>,
}

/// The cast of rows.
pub(crate) struct CastRows {
    /// One row behind the other.
    pub(crate) codes: Tensor,
    pub(crate) amax: f32,
    pub(crate) sums: Option<Tensor>,
    pub(crate) groups: Option<GroupCodes>,
}

/// Casts all rows of a matrix, which has one scale: a dequant_scale if the cast divides.
pub(crate) fn encode_rows<T: HighPrecision + Plain>(
    grid: &ScaleGrid,
    scale: &Tensor,
    cast: &Cast,
    beside: Beside<'_, T>,
    made: &impl MadeRows<T>,
) -> Result<CastRows> {
    crate::base::simd::check()?;
    let Beside { sum_rows, groups } = beside;
    if let Some(groups) = groups.filter(|groups| !groups.fit_beside(grid)) {
        internal!("{} rows beside {}", groups.grid.rows(), grid.rows());
    }
    let (cols, len) = (grid.cols().max(1), grid.rows() * grid.cols());
    let task = match sum_rows {
        Some(_) => sums::block_len(grid.rows(), grid.cols()),
        None => task_len(cols),
    };
    let mut group_codes = groups.as_ref().map(GroupCodes::room);
    let casting = groups.zip(group_codes.as_mut());
    let casting = casting.map(|(groups, room)| Casting::new(groups, room));
    let (codes, parts) = with_scales("quantize", scale, |scales| {
        Ok(filled_in_pieces(
            0u8,
            len,
            [task, piece_len(cols)],
            |pieces| {
                let mut room = None;
                let mut sums = vec![0.; if sum_rows.is_some() { cols } else { 0 }];
                let mut amax = 0f32;
                for (start, codes) in pieces {
                    let row = start / cols;
                    if let Some(casting) = &casting {
                        // SAFETY: each row belongs to one piece of one task.
                        unsafe { casting.rows(row..row + codes.len() / cols) };
                    }
                    let values = made.rows(start, codes.len(), &mut room);
                    let part =
                        fp8_core::encode_rows_with_amax(cast, values, row, grid, scales, codes);
                    amax = larger(amax, part);
                    if sum_rows.is_some() {
                        sums::add_rows(&mut sums, values);
                    }
                }
                (amax, sums)
            },
        ))
    })?;
    let group_codes = groups.zip(group_codes).map(|(groups, room)| {
        // SAFETY: the pieces of all tasks are all rows.
        unsafe { room.filled(&groups) }
    });
    let (amaxes, blocks): (Vec<f32>, Vec<Vec<f32>>) = parts.into_iter().unzip();
    let sums = sum_rows.map(|dtype| sums::rounded(&sums::of_blocks(grid.cols(), blocks), dtype));
    Ok(CastRows {
        codes: tensor(codes, len)?,
        amax: amaxes.into_iter().fold(0., larger),
        sums: sums.transpose()?,
        groups: group_codes,
    })
}
