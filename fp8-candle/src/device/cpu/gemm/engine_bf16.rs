//! The engine of processors with bf16 units: AVX-512 BF16, and AMX if available.

use super::decoder::Decoder;
use super::exponents::Exponents;
use super::few_amx;
use super::finish_avx512;
use super::kernel::{Engine, Matrix, Mode, PackedPanel, Panel, Sums, part, rows_of_a};
use super::layout::{DEPTH, Order, PANEL, ROWS, SLICE, SLICE_STRIDE};
use super::pack_bf16::{self, Source};
use super::prefetch::Ahead;
use super::results::Block;
use super::source_bf16::Bits;
use super::stage::Finished;
use super::tile_amx::{self, Tiles};
use super::tile_bf16::{self, Columns, Rows, To};
use crate::base::parallel::shared::Shared;
use fp8_core::{Contraction, Format, HighPrecision, Isa, IsaLevel};
use std::ops::Range;

/// Kernels that multiply bf16.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bf16Engine {
    amx: bool,
}

/// Up to this many rows, panels of packed codes are summed to their end one after the other.
const FEW_ROWS: usize = 3;

impl Bf16Engine {
    /// The engine for `isa`, if there is one.
    pub(super) fn of(isa: Isa) -> Option<Self> {
        match isa.level() {
            IsaLevel::Avx512Bf16 => Some(Self { amx: false }),
            IsaLevel::Amx => Some(Self { amx: true }),
            _ => None,
        }
    }
}

impl Bf16Engine {
    /// # Safety
    /// As for [`Engine::pack_a`].
    unsafe fn pack_a_from<S: Source>(
        self,
        source: S,
        matrix: Matrix<'_, S::Element>,
        rows: Range<usize>,
        first: usize,
        padded_rows: usize,
        dst: Shared<'_, u16>,
    ) {
        // SAFETY: an engine exists only where these instructions do; the caller guarantees the rest.
        unsafe {
            if self.packs_pairs(matrix.kept) && matrix.contraction == Contraction::Rows {
                pack_bf16::pack_a_pairs(source, matrix, rows, first, padded_rows, dst);
            } else {
                pack_bf16::pack_a(source, matrix, rows, first, padded_rows, dst);
            }
        }
    }
}

/// Some neighbouring packed panels.
fn packed_of<'b>(
    panel: impl Fn(usize) -> Panel<'b, u16>,
    panels: Range<usize>,
) -> [PackedPanel<'b>; tile_bf16::panels_at_once(1)] {
    let mut all: [PackedPanel<'_>; tile_bf16::panels_at_once(1)] = Default::default();
    for (panel, to) in panels.map(panel).zip(&mut all) {
        if let Panel::Packed(packed) = panel {
            *to = packed;
        }
    }
    all
}

/// A [`Bf16Engine`] set up on a thread.
pub(super) struct Session {
    decoder: Decoder,
    tiles: Option<Tiles>,
}

impl Engine for Bf16Engine {
    type Value = u16;
    type Session = Session;

    const ORDER: Order = Order::Pairs;

    fn task_size(self) -> (usize, usize) {
        // Larger for AMX, whose tiles are faster than the third-level cache; its processors have 2 MiB of second-level cache.
        if self.amx { (384, 16) } else { (192, 8) }
    }

    fn packed_rows(self) -> usize {
        if self.amx { 2 * ROWS } else { tile_bf16::ROWS }
    }

    fn packed_panels(self, rows: usize) -> Option<usize> {
        // More rows read A from the caches, so several panels share a slice of it.
        match self.amx {
            true => (rows <= few_amx::ROWS).then(|| few_amx::panels_at_once(rows)),
            false => (rows <= FEW_ROWS).then(|| tile_bf16::panels_at_once(rows)),
        }
    }

    fn packs_pairs(self, kept: usize) -> bool {
        !self.amx && kept > self.packed_rows()
    }

    fn folds(self) -> bool {
        true
    }

    fn fold(self, exponents: &Exponents, kept: Range<usize>, start: usize, values: &mut [u16]) {
        exponents.apply(kept, start, values);
    }

    fn tile_rows(self, pairs: bool, row: usize, rows: usize) -> usize {
        if pairs {
            tile_bf16::height(row, rows)
        } else {
            1
        }
    }

    fn writes_results(self) -> bool {
        // AMX would write short runs of results, and its tiles would wait for the memory.
        !self.amx
    }

    fn finish<T: HighPrecision>(self, finished: &mut Finished<'_, T>) -> bool {
        // SAFETY: an engine exists only where these instructions do.
        unsafe { finish_avx512::finish(finished) }
    }

    fn slices_at_once(self) -> usize {
        // The panel fills two thirds of the first-level cache; tiles come back to memory half as often as with one slice.
        if self.amx { 2 } else { 1 }
    }

    fn packs_in_tasks(self) -> bool {
        self.amx
    }

    unsafe fn pack_a(
        self,
        format: Format,
        matrix: Matrix<'_>,
        rows: Range<usize>,
        first: usize,
        padded_rows: usize,
        dst: Shared<'_, u16>,
    ) {
        // SAFETY: an engine exists only where these instructions do; the caller guarantees the rest.
        unsafe {
            let decoder = Decoder::new(format);
            self.pack_a_from(&decoder, matrix, rows, first, padded_rows, dst);
        }
    }

    unsafe fn pack_a_bf16(
        self,
        matrix: Matrix<'_, u16>,
        rows: Range<usize>,
        first: usize,
        padded_rows: usize,
        dst: Shared<'_, u16>,
    ) {
        // SAFETY: an engine exists only where these instructions do; the caller guarantees the rest.
        unsafe { self.pack_a_from(Bits, matrix, rows, first, padded_rows, dst) }
    }

    fn pack_b_bf16(
        self,
        matrix: Matrix<'_, u16>,
        first: usize,
        range: Range<usize>,
        dst: &mut [u16],
    ) {
        // SAFETY: an engine exists only where these instructions do.
        unsafe { pack_bf16::pack_b(Bits, matrix, first, range, dst) }
    }

    fn pack_b(
        self,
        format: Format,
        matrix: Matrix<'_>,
        first: usize,
        range: Range<usize>,
        dst: &mut [u16],
    ) {
        // SAFETY: an engine exists only where these instructions do.
        unsafe { pack_bf16::pack_b(&Decoder::new(format), matrix, first, range, dst) }
    }

    fn decode_panel(self, format: Format, packed: &[u8], dst: &mut [u16]) {
        // SAFETY: an engine exists only where these instructions do.
        unsafe { pack_bf16::decode_panel(&Decoder::new(format), packed, dst) }
    }

    unsafe fn session(self, format: Format) -> Session {
        Session {
            // SAFETY: an engine exists only where these instructions do.
            decoder: unsafe { Decoder::new(format) },
            // SAFETY: as above; the caller has no other session on this thread.
            tiles: self.amx.then(|| unsafe { Tiles::new() }),
        }
    }

    fn multiply<'b>(
        session: &Session,
        a: &[u16],
        rows: usize,
        panels: usize,
        panel: impl Fn(usize) -> Panel<'b, u16>,
        sums: Sums<'_>,
        results: Option<Block<'_>>,
        mode: Mode,
    ) {
        let Sums { values, stride } = sums;
        let tiles = session.tiles.as_ref();
        let height = |row: usize| match tiles {
            Some(_) => 2 * ROWS,
            None => tile_bf16::height(row, rows),
        };
        if let (Some(tiles), true, Panel::Values(_)) = (tiles, panels > 0, panel(0)) {
            let factors = tile_amx::Factors {
                a,
                rows,
                panels,
                panel: |index| match panel(index) {
                    Panel::Values(values) => values,
                    Panel::Packed(_) => &[],
                },
                streamed: rows > 2 * ROWS,
            };
            let sums = &mut Sums { values, stride };
            tiles.multiply(&factors, sums, mode);
            return;
        }
        let mut index = 0;
        while index < panels {
            let b = panel(index);
            let next = match (index + 1 < panels).then(|| panel(index + 1)) {
                Some(Panel::Values(next)) => next,
                _ => &[],
            };
            let steps = rows.div_ceil(height(0));
            // A panel stays in the first-level cache for all rows.
            let (mut row, mut step, mut together) = (0, 0, 1);
            while row < rows {
                let height = height(row);
                let ahead = [
                    part(next, step, steps),
                    match index {
                        0 => rows_of_a(a, row + height, height),
                        _ => &[],
                    },
                ];
                let a = &a[row * SLICE_STRIDE..];
                let at = row * stride + index * PANEL;
                let mut sums = Sums {
                    // Empty if no intermediate sums are kept.
                    values: values.get_mut(at..).unwrap_or_default(),
                    stride,
                };
                let accumulate = mode.accumulate;
                match (tiles, b) {
                    (Some(_), Panel::Values(_)) => unreachable!("multiplied above"),
                    (Some(_), Panel::Packed(_)) if rows <= few_amx::ROWS => {
                        together = few_amx::panels_at_once(rows).min(panels - index);
                        let packed = packed_of(&panel, index..index + together);
                        let (packed, a) = (&packed[..together], &a[mode.skip..]);
                        // SAFETY: a session exists only where these instructions do.
                        unsafe {
                            few_amx::multiply(&session.decoder, rows, a, packed, sums, accumulate);
                        }
                    }
                    (Some(tiles), Panel::Packed(packed)) => {
                        let a = &a[mode.skip..];
                        let (pieces, _) = packed.codes.as_chunks::<{ PANEL * DEPTH }>();
                        let piece = |step: usize, values: &mut [u16]| {
                            let (decoder, codes) = (&session.decoder, &pieces[step]);
                            // SAFETY: a session exists only where these instructions do.
                            unsafe {
                                if packed.added.is_empty() {
                                    pack_bf16::decode_panel(decoder, codes, values);
                                } else {
                                    let added = packed.added_at(step);
                                    pack_bf16::decode_scaled(decoder, codes, added, values);
                                }
                            }
                        };
                        let short = rows - row <= ROWS;
                        let count = pieces.len();
                        tiles.multiply_pieces(short, a, count, piece, &mut sums, accumulate);
                    }
                    (None, b) => {
                        let packed;
                        let columns = match b {
                            Panel::Values(b) => Columns::Values(b),
                            Panel::Packed(_) => {
                                together = tile_bf16::panels_at_once(height).min(panels - index);
                                packed = packed_of(&panel, index..index + together);
                                Columns::Packed(&packed[..together])
                            }
                        };
                        let a = Rows {
                            values: a,
                            skip: mode.skip,
                            pairs: mode.pairs,
                        };
                        let to = To {
                            sums,
                            accumulate,
                            results: results.map(|results| results.at(row, index * PANEL)),
                            ahead: Ahead::new(ahead, SLICE / 2, a.values),
                        };
                        // SAFETY: a session exists only where these instructions do.
                        unsafe {
                            tile_bf16::multiply(&session.decoder, height, a, columns, to);
                        };
                    }
                }
                row += height;
                step += 1;
            }
            index += together;
        }
    }
}
