//! The engine of processors without bf16 units: f32 multiply-adds of AVX-512, AVX2 or NEON.
//!
//! Codes are decoded directly into the tiles and panels that are multiplied; no decoded copy in another order is made first.

use super::kernel::{Engine, Matrix, Mode, Panel, Sums, part, rows_of_a};
use super::layout::{DEPTH, Order, ROWS_STEP, SLICE, SLICE_STRIDE};
use super::pack_f32;
use super::packed_f32::{TileRows, panels_at_once};
use super::prefetch::Ahead;
use super::results::Block;
use crate::base::parallel::shared::Shared;
use fp8_core::{Contraction, Format, Isa, IsaLevel};
use std::marker::PhantomData;
use std::ops::Range;

/// What a tile does with its sums.
pub(super) struct To<'a> {
    /// Where they are.
    pub(super) sums: Sums<'a>,
    /// Add to the existing values instead of starting with zero.
    pub(super) accumulate: bool,
    /// What is fetched beside.
    pub(super) ahead: Ahead,
}

/// Steps of a tile's sum from one fetch of what later tiles read to the next. Products of f32 have a load for each of their rows in each
/// step, and two more loads there would hold them up.
pub(super) const STEPS: usize = 4;

/// How the vectors of one instruction set multiply.
///
/// # Safety
/// The level must have what packing uses (AVX2, FMA and F16C; NEON), and the instructions of its tiles.
pub(super) unsafe trait Tiles: Copy + Send + Sync + 'static {
    /// The level that multiplies this way.
    const LEVEL: IsaLevel;

    /// The order of packed codes, whose panels are as wide as a tile.
    const ORDER: Order;

    /// The most rows of a tile: a divisor of [`ROWS_STEP`], and no more than [`pack_f32::MOST_ROWS`].
    const ROWS: usize;

    /// See [`Engine::task_size`].
    const TASK_SIZE: (usize, usize);

    /// Computes the sums of `rows` rows by one panel, or adds to them.
    ///
    /// `a`: one tile of a slice, packed as A, from the first index of the sum on; `b`: one panel from that index on, whose
    /// length is that of the sum.
    ///
    /// # Safety
    /// The processor must have this level.
    unsafe fn multiply(rows: usize, a: &[f32], b: &[f32], to: To<'_>);

    /// [`Tiles::multiply`] for packed codes of neighbouring panels, at most as many as [`panels_at_once`] says, with
    /// the same sums to the bit, of codes that tiles [read](super::packed_f32::reads).
    ///
    /// # Safety
    /// The processor must have this level.
    unsafe fn multiply_packed(
        format: Format,
        rows: usize,
        a: TileRows<'_>,
        codes: &[&[u8]],
        sums: &mut Sums<'_>,
        accumulate: bool,
    );
}

/// Calls `$tile::<$rows>`; `$rows` is one of the counts.
macro_rules! tiles {
    ($rows:expr, $tile:ident, $arguments:tt, $($count:literal)+) => {
        match $rows {
            $($count => $tile::<$count> $arguments,)+
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(in super::super) use tiles;

/// Kernels that multiply f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct F32Engine<T>(PhantomData<T>);

impl<T: Tiles> F32Engine<T> {
    /// The engine for `isa`, if it is its level.
    pub(super) fn of(isa: Isa) -> Option<Self> {
        const { assert!(ROWS_STEP.is_multiple_of(T::ROWS) && T::ROWS <= pack_f32::MOST_ROWS) };
        (isa.level() == T::LEVEL).then_some(Self(PhantomData))
    }
}

impl<T: Tiles> Engine for F32Engine<T> {
    type Value = f32;
    /// The format of B.
    type Session = Format;

    const ORDER: Order = T::ORDER;

    fn task_size(self) -> (usize, usize) {
        T::TASK_SIZE
    }

    fn packed_rows(self) -> usize {
        // Taller products share decoded panels among so many tiles that multiply-adds alone take less time.
        4 * T::ROWS
    }

    fn packed_panels(self, rows: usize) -> Option<usize> {
        // More rows read A from the caches, so several panels share a slice of it.
        (rows <= T::ROWS).then(|| panels_at_once(rows))
    }

    fn packed_slices_at_once(self, rows: usize) -> usize {
        // Several tiles share the codes of a slice, which stay in the first-level cache.
        if rows <= T::ROWS { usize::MAX } else { 1 }
    }

    unsafe fn pack_a(
        self,
        format: Format,
        matrix: Matrix<'_>,
        rows: Range<usize>,
        first: usize,
        padded_rows: usize,
        dst: Shared<'_, f32>,
    ) {
        let k = matrix.contracted;
        for slice in 0..k.div_ceil(SLICE) {
            let start = (slice * padded_rows + rows.start - first) * SLICE_STRIDE;
            // SAFETY: the caller guarantees that only this call uses these rows.
            let dst = unsafe { dst.part(start..start + rows.len() * SLICE_STRIDE) };
            let range = slice * SLICE..k.min((slice + 1) * SLICE);
            self.pack_slice(format, matrix, rows.clone(), range, dst);
        }
    }

    fn packs_slices(self) -> bool {
        true
    }

    fn pack_slice(
        self,
        format: Format,
        matrix: Matrix<'_>,
        rows: Range<usize>,
        range: Range<usize>,
        dst: &mut [f32],
    ) {
        // Lines of the cache hold the codes of one index of the sum for several tiles, which are packed while these lines are there.
        let step = match matrix.contraction {
            Contraction::Rows => DEPTH,
            Contraction::Cols => SLICE,
        };
        for begin in range.clone().step_by(step) {
            let part = begin..range.end.min(begin + step);
            let mut row = 0;
            while row < rows.len() {
                let height = height::<T>(row, rows.len());
                let tile = rows.start + row..rows.start + row + height;
                let skipped = (begin - range.start) * height;
                let dst = &mut dst[row * SLICE_STRIDE + skipped..(row + height) * SLICE_STRIDE];
                // SAFETY: an engine exists only where its instructions do.
                unsafe { pack_f32::tile(format, matrix, tile, part.clone(), dst) };
                row += height;
            }
        }
    }

    fn pack_b(
        self,
        format: Format,
        matrix: Matrix<'_>,
        first: usize,
        range: Range<usize>,
        dst: &mut [f32],
    ) {
        let width = T::ORDER.panel();
        let cols = first..matrix.kept.min(first + width);
        let rows = range.start..matrix.contracted.min(range.end).max(range.start);
        let (dst, rest) = dst[..range.len() * width].split_at_mut(rows.len() * width);
        rest.fill(0.);
        // SAFETY: an engine exists only where its instructions do.
        unsafe {
            match matrix.contraction {
                Contraction::Rows => {
                    pack_f32::panel_of_rows(format, matrix, cols, rows, width, dst)
                }
                Contraction::Cols => {
                    pack_f32::panel_of_cols(format, matrix, cols, rows, width, dst)
                }
            }
        }
    }

    fn decode_panel(self, format: Format, packed: &[u8], dst: &mut [f32]) {
        // SAFETY: an engine exists only where its instructions do.
        unsafe { pack_f32::decode_panel(format, packed, T::ORDER.panel(), dst) };
    }

    unsafe fn session(self, format: Format) -> Format {
        format
    }

    fn multiply<'b>(
        &format: &Format,
        a: &[f32],
        rows: usize,
        panels: usize,
        panel: impl Fn(usize) -> Panel<'b, f32>,
        sums: Sums<'_>,
        _: Option<Block<'_>>,
        mode: Mode,
    ) {
        if panels > 0 && matches!(panel(0), Panel::Packed(_)) {
            let codes = |index| match panel(index) {
                Panel::Packed(panel) => panel.codes,
                Panel::Values(_) => unreachable!("panels of a task are all packed or all decoded"),
            };
            return multiply_packed::<T>(format, a, rows, panels, codes, sums, mode);
        }
        let Mode {
            accumulate,
            skip,
            out,
            ..
        } = mode;
        let Sums { values, stride } = sums;
        let tiles = rows.div_ceil(T::ROWS);
        for index in 0..panels {
            let Panel::Values(b) = panel(index) else {
                unreachable!("panels of a task are all packed or all decoded");
            };
            let next = match (index + 1 < panels).then(|| panel(index + 1)) {
                Some(Panel::Values(next)) => next,
                _ => &[],
            };
            let (mut row, mut tile) = (0, 0);
            while row < rows {
                let height = height::<T>(row, rows);
                let ahead = [
                    part(next, tile, tiles),
                    match index {
                        0 => rows_of_a(a, row + height, height),
                        _ => &[],
                    },
                ];
                let col = index * T::ORDER.panel();
                if let Some(out) = out {
                    out.prefetch(row..row + height, col);
                }
                let sums = Sums {
                    values: &mut values[row * stride + col..],
                    stride,
                };
                let a = &a[row * SLICE_STRIDE + skip * height..];
                let to = To {
                    sums,
                    accumulate,
                    ahead: Ahead::new(ahead, SLICE / STEPS, a),
                };
                // SAFETY: an engine exists only where its instructions do.
                unsafe { T::multiply(height, a, b, to) };
                row += height;
                tile += 1;
            }
        }
    }
}

/// The height of the tile that begins at row `row` of `rows`. Each run of [`ROWS_STEP`] rows is cut independently of the rows
/// after it, into tiles of about the same height: a tile of few rows would wait for its own sums.
pub(super) fn height<T: Tiles>(row: usize, rows: usize) -> usize {
    let left = rows.min((row / ROWS_STEP + 1) * ROWS_STEP) - row;
    left.div_ceil(left.div_ceil(T::ROWS))
}

/// [`Engine::multiply`] for packed codes.
fn multiply_packed<'b, T: Tiles>(
    format: Format,
    a: &[f32],
    rows: usize,
    panels: usize,
    codes: impl Fn(usize) -> &'b [u8],
    sums: Sums<'_>,
    mode: Mode,
) {
    let Sums { values, stride } = sums;
    let width = T::ORDER.panel();
    let at_once = panels_at_once(rows);
    for first in (0..panels).step_by(at_once) {
        let count = at_once.min(panels - first);
        let mut together: [&[u8]; panels_at_once(1)] = Default::default();
        for (index, panel) in together[..count].iter_mut().enumerate() {
            *panel = codes(first + index);
        }
        let together = &together[..count];
        let mut next = 0;
        while next < rows {
            let (row, height) = (next, height::<T>(next, rows));
            next += height;
            let a = TileRows {
                values: &a[row * SLICE_STRIDE..],
                skip: mode.skip,
                next_slice: mode.next_slice,
            };
            let mut sums = Sums {
                values: &mut values[row * stride + first * width..],
                stride,
            };
            // SAFETY: an engine exists only where its instructions do.
            unsafe { T::multiply_packed(format, height, a, together, &mut sums, mode.accumulate) };
        }
    }
}
