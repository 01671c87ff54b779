//! Tiles of sums with AMX: 16 or 32 rows by one panel of 32 columns, in the processor's tile registers.
//!
//! Rust has no stable intrinsics for them, so this is assembly. Registers 0 to 3 keep the sums from one statement to the
//! next; the compiler itself never uses these registers.

use super::kernel::Sums;
use super::layout::{DEPTH, PANEL, SLICE_STRIDE};
use std::arch::asm;
use std::marker::PhantomData;

/// The tile registers of this thread, set up as sixteen rows of 64 bytes each, until dropped.
pub(super) struct Tiles(PhantomData<*const ()>);

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
    pub(super) unsafe fn new() -> Self {
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
        Self(PhantomData)
    }

    /// Computes the `32 x 32` sums in `sums`, or `16 x 32` if `short`, or adds to them. Rows are `stride` apart.
    ///
    /// `a`: rows of a slice packed as A, from the first index of the sum on; `b`: one panel packed as B from that index on,
    /// whose length, a multiple of 32, is that of the sum.
    pub(super) fn multiply(
        &self,
        short: bool,
        a: &[u16],
        b: &[u16],
        sums: &mut Sums<'_>,
        accumulate: bool,
    ) {
        let steps = b.len() / STEP;
        assert!(b.len().is_multiple_of(STEP));
        self.start(short, sums, accumulate);
        self.steps(short, a, b, steps);
        self.finish(short, sums);
    }

    /// [`Tiles::multiply`] with `steps` pieces of B's panel, each made by `piece` just before it is multiplied.
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
        self.start(short, sums, accumulate);
        if steps > 0 {
            piece(0, &mut pieces.0[0]);
        }
        for step in 0..steps {
            if step + 1 < steps {
                piece(step + 1, &mut pieces.0[(step + 1) % 2]);
            }
            self.steps(short, &a[step * DEPTH..], &pieces.0[step % 2], 1);
        }
        self.finish(short, sums);
    }

    fn start(&self, short: bool, sums: &mut Sums<'_>, accumulate: bool) {
        let (top, bottom, stride) = sums.tiles(short);
        // SAFETY: the tiles are set up while `self` lives; `Sums::tiles` has checked the rows that are read.
        unsafe {
            match (accumulate, short) {
                (true, true) => asm!(
                    "tileloadd tmm0, [{c} + {s}]", "tileloadd tmm1, [{c} + {s} + 64]",
                    c = in(reg) top, s = in(reg) stride, options(nostack, readonly)),
                (true, false) => asm!(
                    "tileloadd tmm0, [{c} + {s}]", "tileloadd tmm1, [{c} + {s} + 64]",
                    "tileloadd tmm2, [{d} + {s}]", "tileloadd tmm3, [{d} + {s} + 64]",
                    c = in(reg) top, d = in(reg) bottom, s = in(reg) stride,
                    options(nostack, readonly)),
                (false, _) => asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, nomem)
                ),
            }
        }
    }

    /// `steps` times [`DEPTH`] indices of the sum.
    #[inline]
    fn steps(&self, short: bool, a: &[u16], b: &[u16], steps: usize) {
        const A_STRIDE: usize = SLICE_STRIDE * 2;
        const B_STRIDE: usize = PANEL * 4;
        let rows = if short { 16 } else { 32 };
        assert!(steps > 0 && a.len() >= (rows - 1) * SLICE_STRIDE + steps * DEPTH);
        assert!(b.len() >= steps * STEP);
        let (a, b) = (a.as_ptr(), b.as_ptr());
        // SAFETY: the tiles are set up while `self` lives. Rows of A lie A_STRIDE bytes apart, sixteen of them in a
        // tile, each of 64 bytes (DEPTH elements); rows of B are pairs of sum indices, B_STRIDE bytes apart, 64 bytes
        // for 16 columns. The assertions bound what is read.
        unsafe {
            if short {
                asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {sa}]",
                    "tileloadd tmm6, [{b} + {sb}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {sb} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "add {a}, 64",
                    "add {b}, 2048",
                    "dec {n}",
                    "jnz 2b",
                    a = inout(reg) a => _, b = inout(reg) b => _, n = inout(reg) steps => _,
                    sa = in(reg) A_STRIDE, sb = in(reg) B_STRIDE,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly)
                );
            } else {
                asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {sa}]",
                    "tileloadd tmm6, [{b} + {sb}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {sb} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{d} + {sa}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {a}, 64",
                    "add {d}, 64",
                    "add {b}, 2048",
                    "dec {n}",
                    "jnz 2b",
                    a = inout(reg) a => _, d = inout(reg) a.byte_add(16 * A_STRIDE) => _,
                    b = inout(reg) b => _, n = inout(reg) steps => _,
                    sa = in(reg) A_STRIDE, sb = in(reg) B_STRIDE,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly)
                );
            }
        }
    }

    fn finish(&self, short: bool, sums: &mut Sums<'_>) {
        let (top, bottom, stride) = sums.tiles(short);
        // SAFETY: the tiles are set up while `self` lives; `Sums::tiles` has checked the rows that are written.
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

impl Sums<'_> {
    /// The upper and the lower sixteen rows, and the bytes from row to row.
    fn tiles(&mut self, short: bool) -> (*mut f32, *mut f32, usize) {
        let rows = if short { 16 } else { 32 };
        assert!(self.values.len() >= (rows - 1) * self.stride + PANEL);
        let top = self.values.as_mut_ptr();
        (top, top.wrapping_add(16 * self.stride), self.stride * 4)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the instruction exists where the value was made; it only releases the registers.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
