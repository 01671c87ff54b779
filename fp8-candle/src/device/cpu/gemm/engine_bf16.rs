//! The engine of processors with bf16 units: AVX-512 BF16, and AMX if available.

use super::super::shared::Shared;
use super::kernel::{Engine, Matrix, Mode, Panel, Sums, prefetch_part, prefetch_rows};
use super::layout::{DEPTH, Order, PANEL, ROWS, SLICE, SLICE_STRIDE};
use super::pack_bf16::{self, Decoder};
use super::tile_amx::Tiles;
use super::tile_bf16::{self, Columns};
use fp8_core::{Format, Isa, IsaLevel};
use std::ops::Range;

/// Kernels that multiply bf16.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bf16Engine {
    amx: bool,
}

/// Up to this many rows, `vdpbf16ps` on decoded registers is faster than AMX, whose operands go through memory.
const FEW_ROWS_OF_AMX: usize = 2;

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

    fn few_rows(self) -> usize {
        if self.amx {
            FEW_ROWS_OF_AMX
        } else {
            tile_bf16::ROWS
        }
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
            pack_bf16::pack_a(&decoder, matrix, rows, first, padded_rows, dst);
        }
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

    unsafe fn session(self, format: Format, few: bool) -> Session {
        Session {
            // SAFETY: an engine exists only where these instructions do.
            decoder: unsafe { Decoder::new(format) },
            // SAFETY: as above; the caller has no other session on this thread.
            tiles: (self.amx && !few).then(|| unsafe { Tiles::new() }),
        }
    }

    fn multiply<'b>(
        session: &Session,
        a: &[u16],
        rows: usize,
        panels: usize,
        panel: impl Fn(usize) -> Panel<'b, u16>,
        sums: Sums<'_>,
        Mode { few, accumulate }: Mode,
    ) {
        let Sums { values, stride } = sums;
        for index in 0..panels {
            let b = panel(index);
            let next = match (index + 1 < panels).then(|| panel(index + 1)) {
                Some(Panel::Values(next)) => next,
                _ => &[],
            };
            let tiles = session.tiles.as_ref();
            let height = tiles.map_or(tile_bf16::ROWS, |_| 2 * ROWS);
            let steps = rows.div_ceil(height);
            // A panel stays in the first-level cache for all rows.
            for (step, row) in (0..rows).step_by(height).enumerate() {
                prefetch_part(next, step, steps);
                if index == 0 {
                    prefetch_rows(a, row + height..row + 2 * height, SLICE);
                }
                let a = &a[row * SLICE_STRIDE..];
                let mut sums = Sums {
                    values: &mut values[row * stride + index * PANEL..],
                    stride,
                };
                match (tiles, b) {
                    (Some(tiles), Panel::Values(b)) => {
                        tiles.multiply(rows - row <= ROWS, a, b, &mut sums, accumulate);
                    }
                    (Some(tiles), Panel::Packed(codes)) => {
                        let (pieces, _) = codes.as_chunks::<{ PANEL * DEPTH }>();
                        let piece = |step: usize, values: &mut [u16]| {
                            // SAFETY: a session exists only where these instructions do.
                            unsafe {
                                pack_bf16::decode_panel(&session.decoder, &pieces[step], values);
                            }
                        };
                        let short = rows - row <= ROWS;
                        let count = pieces.len();
                        tiles.multiply_pieces(short, a, count, piece, &mut sums, accumulate);
                    }
                    (None, b) => {
                        let columns = match b {
                            Panel::Values(b) if few => Columns::FewValues(b),
                            Panel::Values(b) => Columns::Values(b),
                            Panel::Packed(codes) => Columns::FewPacked(codes),
                        };
                        let height = (rows - row).min(height);
                        // SAFETY: a session exists only where these instructions do.
                        unsafe {
                            let decoder = &session.decoder;
                            tile_bf16::multiply(decoder, height, a, columns, sums, accumulate);
                        };
                    }
                }
            }
        }
    }
}
