//! Tiles of sums with AMX: 16 or 32 rows by one panel of 32 columns, in the processor's tile registers.
//!
//! Rust has no stable intrinsics for them, so this is assembly. Registers 0 to 3 keep the sums from one statement to the
//! next; the compiler itself never uses these registers.

use super::kernel::{Mode, Sums};
use super::layout::{DEPTH, PANEL, ROWS, SLICE, SLICE_STRIDE};
use std::arch::asm;
use std::marker::PhantomData;

/// Rows packed as A by panels packed as B.
pub(super) struct Factors<'a, P> {
    /// From the first slice of the sum on.
    pub(super) a: &'a [u16],
    pub(super) rows: usize,
    pub(super) panels: usize,
    /// A panel by its number, whose length, a multiple of 32, is that of the sum.
    pub(super) panel: P,
    /// Whether to read A past the first-level cache, so that a panel stays there: if it is used for several tiles.
    pub(super) streamed: bool,
}

/// The tile registers of this thread, set up as sixteen rows of 64 bytes each, until dropped.
pub(in super::super) struct Tiles {
    thread: PhantomData<*const ()>,
}

#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    /// # Safety
    /// The processor must have AMX with bf16 and this process may use it: `Isa::available` lists `IsaLevel::Amx`. A thread
    /// must have only one at a time.
    pub(in super::super) unsafe fn new() -> Self {
        static CONFIG: Config = {
            let (mut bytes_per_row, mut rows) = ([0; 16], [0; 16]);
            let mut tile = 0;
            while tile < 8 {
                bytes_per_row[tile] = 64;
                rows[tile] = 16;
                tile += 1;
            }
            Config {
                palette: 1,
                start_row: 0,
                reserved: [0; 14],
                bytes_per_row,
                rows,
            }
        };
        // SAFETY: the instruction exists here, and reads the 64 bytes of the configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, readonly)) };
        Self {
            thread: PhantomData,
        }
    }

    /// Computes the sums of rows by panels, or adds to them.
    pub(super) fn multiply<'b, P: Fn(usize) -> &'b [u16]>(
        &self,
        factors: &Factors<'_, P>,
        sums: &mut Sums<'_>,
        mode: Mode,
    ) {
        for index in 0..factors.panels {
            let b = (factors.panel)(index);
            // A panel stays in the first-level cache for all rows, if it fits.
            for row in (0..factors.rows).step_by(2 * ROWS) {
                let short = factors.rows - row <= ROWS;
                let at = row * sums.stride + index * PANEL;
                let sums = (&mut sums.values[at..], sums.stride);
                self.start(short, mode.accumulate.then_some((&*sums.0, sums.1)));
                let a = &factors.a[row * SLICE_STRIDE..];
                assert!(b.len().is_multiple_of(STEP));
                for step in 0..b.len() / STEP {
                    let at = mode.skip + step * DEPTH;
                    let at = at / SLICE * mode.next_slice + at % SLICE;
                    let panel = (&b[step * STEP..][..STEP], 2 * PANEL);
                    self.step(short, factors.streamed, (&a[at..], SLICE_STRIDE), panel);
                }
                self.finish(short, sums);
            }
        }
    }

    /// The sums of `32 x 32`, or `16 x 32` if `short`, with `steps` pieces of B's panel, each made by `piece` just before it is
    /// multiplied. Rows of `sums` are `stride` apart; `a`: rows of a slice packed as A, from the first index of the sum on.
    ///
    /// The next piece is made while the tiles work on the previous one.
    pub(super) fn multiply_pieces(
        &self,
        short: bool,
        a: &[u16],
        steps: usize,
        mut piece: impl FnMut(usize, &mut [u16]),
        sums: &mut Sums<'_>,
        accumulate: bool,
    ) {
        #[repr(C, align(64))]
        struct Pieces([[u16; STEP]; 2]);
        let mut pieces = Pieces([[0; STEP]; 2]);
        self.start(short, accumulate.then_some((&*sums.values, sums.stride)));
        if steps > 0 {
            piece(0, &mut pieces.0[0]);
        }
        for step in 0..steps {
            if step + 1 < steps {
                piece(step + 1, &mut pieces.0[(step + 1) % 2]);
            }
            let a = (&a[step * DEPTH..], SLICE_STRIDE);
            self.step(short, false, a, (&pieces.0[step % 2], 2 * PANEL));
        }
        self.finish(short, (&mut *sums.values, sums.stride));
    }

    /// Begins with zeros, or with the sums `before` and their distance from row to row.
    pub(in super::super) fn start(&self, short: bool, before: Option<(&[f32], usize)>) {
        let Some((values, stride)) = before else {
            // SAFETY: the tiles are set up while `self` lives.
            return unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, nomem)
                );
            };
        };
        let [top, bottom] =
            rows_of(short, values.len(), stride).map(|at| values.as_ptr().wrapping_add(at));
        let stride = 4 * stride;
        // SAFETY: the tiles are set up while `self` lives; `rows_of` has checked the rows that are read.
        unsafe {
            asm!("tileloadd tmm0, [{c} + {s}]", "tileloadd tmm1, [{c} + {s} + 64]",
                c = in(reg) top, s = in(reg) stride, options(nostack, readonly));
            if !short {
                asm!("tileloadd tmm2, [{d} + {s}]", "tileloadd tmm3, [{d} + {s} + 64]",
                    d = in(reg) bottom, s = in(reg) stride, options(nostack, readonly));
            }
        }
    }

    /// [`DEPTH`] indices of the sum, from rows of A and of B, each of 64 and 128 bytes, with their distances in elements: 16 or 32 rows,
    /// and 16 pairs of indices. `streamed`: see [`Factors`].
    #[inline]
    pub(in super::super) fn step<T>(
        &self,
        short: bool,
        streamed: bool,
        (a, a_stride): (&[T], usize),
        (b, b_stride): (&[T], usize),
    ) {
        let (rows, line) = (if short { ROWS } else { 2 * ROWS }, 64 / size_of::<T>());
        assert!(a.len() >= (rows - 1) * a_stride + line);
        assert!(b.len() >= (DEPTH / 2 - 1) * b_stride + 2 * line);
        let (a, b) = (a.as_ptr(), b.as_ptr());
        let [a_stride, b_stride] = [a_stride, b_stride].map(|stride| stride * size_of::<T>());
        macro_rules! multiply {
            ($a:literal, $b:literal, short) => {
                asm!(
                    concat!($a, " tmm4, [{a} + {sa}]"),
                    concat!($b, " tmm6, [{b} + {sb}]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    concat!($b, " tmm7, [{b} + {sb} + 64]"),
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    a = in(reg) a, b = in(reg) b, sa = in(reg) a_stride, sb = in(reg) b_stride,
                    out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly)
                )
            };
            ($a:literal, $b:literal) => {
                asm!(
                    concat!($a, " tmm4, [{a} + {sa}]"),
                    concat!($b, " tmm6, [{b} + {sb}]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    concat!($b, " tmm7, [{b} + {sb} + 64]"),
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    concat!($a, " tmm5, [{d} + {sa}]"),
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    a = in(reg) a, d = in(reg) a.byte_add(ROWS * a_stride), b = in(reg) b,
                    sa = in(reg) a_stride, sb = in(reg) b_stride,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly)
                )
            };
        }
        // SAFETY: the tiles are set up while `self` lives. Sixteen rows of A are a tile, each of 64 bytes (DEPTH
        // elements); rows of B are pairs of sum indices, 64 bytes for 16 columns. The assertions bound what is read.
        unsafe {
            match (short, streamed) {
                (true, false) => multiply!("tileloadd", "tileloadd", short),
                (true, true) => multiply!("tileloaddt1", "tileloadd", short),
                (false, false) => multiply!("tileloadd", "tileloadd"),
                (false, true) => multiply!("tileloaddt1", "tileloadd"),
            }
        }
    }

    /// Writes the sums, in rows that are `stride` apart.
    pub(in super::super) fn finish(&self, short: bool, (values, stride): (&mut [f32], usize)) {
        let [top, bottom] =
            rows_of(short, values.len(), stride).map(|at| values.as_mut_ptr().wrapping_add(at));
        let stride = 4 * stride;
        // SAFETY: the tiles are set up while `self` lives; `rows_of` has checked the rows that are written.
        unsafe {
            asm!("tilestored [{c} + {s}], tmm0", "tilestored [{c} + {s} + 64], tmm1",
                c = in(reg) top, s = in(reg) stride, options(nostack));
            if !short {
                asm!("tilestored [{d} + {s}], tmm2", "tilestored [{d} + {s} + 64], tmm3",
                    d = in(reg) bottom, s = in(reg) stride, options(nostack));
            }
        }
    }
}

/// Elements of B that a step multiplies.
const STEP: usize = PANEL * DEPTH;

/// Where the upper and the lower sixteen of these rows of sums begin.
fn rows_of(short: bool, len: usize, stride: usize) -> [usize; 2] {
    let rows = if short { ROWS } else { 2 * ROWS };
    assert!(len >= (rows - 1) * stride + PANEL);
    [0, ROWS * stride]
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the instruction exists where the value was made; it only releases the registers.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
