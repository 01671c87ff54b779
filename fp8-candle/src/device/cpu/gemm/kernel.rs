//! The kernels of one processor behind one face. The rest of the GEMM does not know instruction sets.

use super::amx::{self, Tiles};
use super::bf16::{self, Columns};
use super::layout::{DEPTH, PANEL, ROWS, SLICE_STRIDE};
use super::pack::{self, Decoder, Matrix};
use super::shared::Shared;
use fp8_core::{Format, Isa, IsaLevel};
use std::ops::Range;

/// Kernels that multiply bf16. Owning one is the proof that the processor has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Engine {
    amx: bool,
}

/// Rows for which `vdpbf16ps` on decoded registers is faster than AMX, whose operands go through memory.
const DIRECT_ROWS: usize = 2;

/// One panel of B from some sum index on.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a> {
    /// B's form.
    Values(&'a [u16]),
    /// Packed codes.
    Packed(&'a [u8]),
}

impl Engine {
    /// The engine of an instruction set that has one.
    pub(super) fn of(isa: Isa) -> Option<Self> {
        match isa.level() {
            IsaLevel::Avx512Bf16 => Some(Self { amx: false }),
            IsaLevel::Amx => Some(Self { amx: true }),
            _ => None,
        }
    }

    /// Up to so many rows, packed codes are better decoded within the kernel than before it.
    pub(super) fn packed_rows(self) -> usize {
        if self.amx { 2 * ROWS } else { bf16::ROWS }
    }

    /// Packs kept indices `rows` of `matrix` into A's form, `first` being the kept index of the form's first row.
    ///
    /// # Safety
    /// No other task may use these rows of `dst` meanwhile. `rows.start - first` is a multiple of 32.
    pub(super) unsafe fn pack_a(
        self,
        format: Format,
        matrix: Matrix<'_>,
        rows: Range<usize>,
        first: usize,
        padded_rows: usize,
        dst: Shared<'_, u16>,
    ) {
        // SAFETY: an engine exists only where these instructions do; the rest is the caller's promise.
        unsafe {
            let decoder = Decoder::new(format);
            pack::pack_a(&decoder, matrix, rows, first, padded_rows, dst);
        }
    }

    /// Packs the panel of kept indices from `first` on into B's form, `range` of its sum, which begins and ends at
    /// multiples of the depth of a tile.
    pub(super) fn pack_b(
        self,
        format: Format,
        matrix: Matrix<'_>,
        first: usize,
        range: Range<usize>,
        dst: &mut [u16],
    ) {
        // SAFETY: an engine exists only where these instructions do.
        unsafe { pack::pack_b(&Decoder::new(format), matrix, first, range, dst) }
    }

    /// Decodes packed codes into B's form.
    pub(super) fn decode_panel(self, format: Format, packed: &[u8], dst: &mut [u16]) {
        // SAFETY: an engine exists only where these instructions do.
        unsafe { pack::decode_panel(&Decoder::new(format), packed, dst) }
    }

    /// The engine made ready on this thread, for a B of `format`. One at a time on a thread.
    pub(super) fn session(self, format: Format) -> Session {
        Session {
            // SAFETY: an engine exists only where these instructions do.
            decoder: unsafe { Decoder::new(format) },
            // SAFETY: as above.
            tiles: self.amx.then(|| unsafe { Tiles::new() }),
        }
    }
}

/// An [`Engine`] made ready on a thread.
pub(super) struct Session {
    decoder: Decoder,
    tiles: Option<Tiles>,
}

impl Session {
    /// Adds to (or begins with zero) the sums of `rows` rows by `panels` panels, `stride` apart from row to row; for
    /// AMX the rows of `a` and `sums` go on up to a multiple of 16.
    ///
    /// `a`: rows of one slice in A's form, from the sum's first index on.
    pub(super) fn multiply<'b>(
        &self,
        a: &[u16],
        rows: usize,
        panels: usize,
        panel: impl Fn(usize) -> Panel<'b>,
        sums: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        let mut row = 0;
        while row < rows {
            let a = &a[row * SLICE_STRIDE..];
            let mut height = (rows - row).min(bf16::ROWS);
            for index in 0..panels {
                let sums = &mut sums[row * stride + index * PANEL..];
                let panel = panel(index);
                let in_registers = matches!(panel, Panel::Packed(_)) && rows <= DIRECT_ROWS;
                if let Some(tiles) = self.tiles.as_ref().filter(|_| !in_registers) {
                    let short = rows - row <= ROWS;
                    height = if short { ROWS } else { 2 * ROWS };
                    let mut sums = amx::Sums {
                        values: sums,
                        stride,
                    };
                    match panel {
                        Panel::Values(b) => tiles.multiply(short, a, b, &mut sums, accumulate),
                        Panel::Packed(codes) => {
                            let (pieces, _) = codes.as_chunks::<{ PANEL * DEPTH }>();
                            tiles.multiply_pieces(
                                short,
                                a,
                                pieces.len(),
                                // SAFETY: a session exists only where these instructions do.
                                |step, values| unsafe {
                                    pack::decode_panel(&self.decoder, &pieces[step], values);
                                },
                                &mut sums,
                                accumulate,
                            );
                        }
                    }
                    continue;
                }
                let columns = match panel {
                    Panel::Values(b) => Columns::Values(b),
                    Panel::Packed(codes) => Columns::Packed(&self.decoder, codes),
                };
                // SAFETY: a session exists only where these instructions do.
                unsafe { bf16::multiply(height, a, columns, sums, stride, accumulate) };
            }
            row += height;
        }
    }
}
