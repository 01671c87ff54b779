//! Tiles of sums in lanes with AVX-512 and AVX2, with fused multiply-adds.

use super::tile::{Adds, LANES, Tiles, Weights, check_rows};
use fp8_core::{Isa, IsaLevel};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// AVX-512.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

/// AVX2 with FMA.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx512 {
    pub(super) fn of(isa: Isa) -> Option<Self> {
        (isa.level() >= IsaLevel::Avx512).then_some(Self(()))
    }
}

impl Avx2 {
    pub(super) fn of(isa: Isa) -> Option<Self> {
        (isa.level() >= IsaLevel::Avx2).then_some(Self(()))
    }
}

/// A type that kernels load as f32.
pub(in super::super) trait Load: Copy + Send + Sync {
    /// 16 values.
    ///
    /// # Safety
    /// 16 elements can be read from `at` on, and the processor has AVX-512 (F, BW, VL, DQ).
    unsafe fn avx512(at: *const Self) -> __m512;

    /// 8 values.
    ///
    /// # Safety
    /// 8 elements can be read from `at` on, and the processor has AVX2 and F16C.
    unsafe fn avx2(at: *const Self) -> __m256;
}

/// `$type` is loaded by `$wide` and by `$narrow`.
macro_rules! load {
    ($type:ty, $at:ident, $wide:expr, $narrow:expr) => {
        impl Load for $type {
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
            unsafe fn avx512($at: *const Self) -> __m512 {
                // SAFETY: the caller guarantees that the elements can be read.
                unsafe { $wide }
            }

            #[inline]
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn avx2($at: *const Self) -> __m256 {
                // SAFETY: the caller guarantees that the elements can be read.
                unsafe { $narrow }
            }
        }
    };
}
load!(f32, at, _mm512_loadu_ps(at), _mm256_loadu_ps(at));
load!(
    bf16,
    at,
    // The bits of a bf16 are the upper half of those of its f32.
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
        _mm256_loadu_si256(at.cast())
    ))),
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(
        _mm_loadu_si128(at.cast())
    )))
);
load!(
    f16,
    at,
    _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())),
    _mm256_cvtph_ps(_mm_loadu_si128(at.cast()))
);

macro_rules! tiles {
    ($tiles:ident, $rows:literal x $cols:literal, $tile:ident, $totals:ident, $($count:literal)+) => {
        impl<W: Load> Adds<W> for $tiles {
            type Sum = f32;

            fn add(
                self,
                rows: usize,
                x: (&[f32], usize),
                w: Weights<'_, W>,
                steps: usize,
                lanes: &mut [f32],
                add: bool,
            ) {
                // SAFETY: there is a value of this type only where the processor has the instructions.
                unsafe {
                    match rows {
                        $($count => $tile::<W, $count>(x, w, steps, lanes, add),)+
                        rows => unreachable!("a tile of {rows} rows"),
                    }
                }
            }
        }

        impl Tiles for $tiles {
            type Value = f32;
            const ROWS: usize = $rows;
            const COLS: usize = $cols;

            fn total(self, lanes: &[f32], sums: &mut [f32]) {
                let (lanes, _) = lanes.as_chunks::<LANES>();
                for (lanes, sums) in lanes.chunks(8).zip(sums.chunks_mut(8)) {
                    let mut totals = [0.; 8];
                    // SAFETY: there is a value of this type only where the processor has the instructions.
                    unsafe { $totals(lanes, &mut totals) };
                    sums.copy_from_slice(&totals[..sums.len()]);
                }
            }
        }
    };
}
tiles!(Avx512, 4 x 6, tile_avx512, totals_avx512, 1 2 3 4);
tiles!(Avx2, 2 x 3, tile_avx2, totals_avx2, 1 2);

/// The most rows of x for which prefetched rows of w are multiplied one after the other.
const ROWS_IN_ORDER: usize = 2;

/// [`Adds::add`] with `$vectors` vectors for the lanes of a sum.
macro_rules! tile {
    (
        $name:ident, $features:literal, $cols:literal, $vectors:literal;
        $zero:ident, $load:ident, $store:ident, $multiply_add:ident
    ) => {
        #[target_feature(enable = $features)]
        fn $name<W: Load, const R: usize>(
            (x, x_stride): (&[f32], usize),
            Weights {
                values: w,
                stride: w_stride,
                ahead,
            }: Weights<'_, W>,
            steps: usize,
            lanes: &mut [f32],
            add: bool,
        ) {
            const WIDTH: usize = LANES / $vectors;
            check_rows((x, x_stride), R, steps);
            check_rows((w, w_stride), $cols, steps);
            assert!(lanes.len() >= R * $cols * LANES);
            let (x, w, lanes) = (x.as_ptr(), w.as_ptr(), lanes.as_mut_ptr());
            let mut sums = [[[$zero(); $vectors]; $cols]; R];
            let at =
                |row: usize, col: usize, part: usize| (row * $cols + col) * LANES + part * WIDTH;
            // SAFETY: `lanes` holds all lanes of R rows by as many columns as there are; the rows of `x` and `w` hold `steps` times
            // LANES values, by the assertions above.
            unsafe {
                if add {
                    for (row, sums) in sums.iter_mut().enumerate() {
                        for (col, sums) in sums.iter_mut().enumerate() {
                            for (part, sum) in sums.iter_mut().enumerate() {
                                *sum = f32::$load(lanes.add(at(row, col, part)));
                            }
                        }
                    }
                }
                // Nothing is read by a prefetch, whatever the address.
                let prefetch = |place: usize| {
                    if ahead > 0 {
                        let address = w.wrapping_add(place + ahead);
                        _mm_prefetch::<_MM_HINT_T0>(address.cast());
                    }
                };
                if R <= ROWS_IN_ORDER && ahead > 0 {
                    // Row by row: one stream for the processor's own prefetch. It computes several rows at a time.
                    for col in 0..$cols {
                        for step in 0..steps {
                            for part in 0..$vectors {
                                let from = step * LANES + part * WIDTH;
                                prefetch(col * w_stride + from);
                                let w = W::$load(w.add(col * w_stride + from));
                                for (row, sums) in sums.iter_mut().enumerate() {
                                    let x = f32::$load(x.add(row * x_stride + from));
                                    sums[col][part] = $multiply_add(x, w, sums[col][part]);
                                }
                            }
                        }
                    }
                } else {
                    for step in 0..steps {
                        for part in 0..$vectors {
                            let from = step * LANES + part * WIDTH;
                            let mut values = [$zero(); R];
                            for (row, value) in values.iter_mut().enumerate() {
                                *value = f32::$load(x.add(row * x_stride + from));
                            }
                            for col in 0..$cols {
                                prefetch(col * w_stride + from);
                                let w = W::$load(w.add(col * w_stride + from));
                                for (row, sums) in sums.iter_mut().enumerate() {
                                    sums[col][part] =
                                        $multiply_add(values[row], w, sums[col][part]);
                                }
                            }
                        }
                    }
                }
                for (row, sums) in sums.iter().enumerate() {
                    for (col, sums) in sums.iter().enumerate() {
                        for (part, &sum) in sums.iter().enumerate() {
                            $store(lanes.add(at(row, col, part)), sum);
                        }
                    }
                }
            }
        }
    };
}
tile! {
    tile_avx512, "avx512f,avx512bw,avx512vl,avx512dq", 6, 1;
    _mm512_setzero_ps, avx512, _mm512_storeu_ps, _mm512_fmadd_ps
}
tile! {
    tile_avx2, "avx2,fma,f16c", 3, 2;
    _mm256_setzero_ps, avx2, _mm256_storeu_ps, _mm256_fmadd_ps
}

// In the functions below each pair of vectors becomes one, which holds the sums of both: of two additions, one has its operands
// exchanged, which changes no bit.

/// The totals of up to eight sums, as [`Tiles::total`] defines them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn totals_avx512(lanes: &[[f32; LANES]], totals: &mut [f32; 8]) {
    let mut all = [_mm512_setzero_ps(); 8];
    for (sum, lanes) in all.iter_mut().zip(lanes) {
        // SAFETY: sixteen numbers.
        *sum = unsafe { _mm512_loadu_ps(lanes.as_ptr()) };
    }
    // Lanes l and l + 8: halves.
    let mut halves = [_mm512_setzero_ps(); 4];
    for (i, sum) in halves.iter_mut().enumerate() {
        let (a, b) = (all[2 * i], all[2 * i + 1]);
        *sum = _mm512_add_ps(
            _mm512_mask_blend_ps(0xFF00, a, b),
            _mm512_shuffle_f32x4::<0b01_00_11_10>(a, b),
        );
    }
    // Lanes l and l + 4: quarters.
    let order = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    let mut quarters = [_mm512_setzero_ps(); 2];
    for (i, sum) in quarters.iter_mut().enumerate() {
        let (a, b) = (halves[2 * i], halves[2 * i + 1]);
        *sum = _mm512_add_ps(
            _mm512_mask_blend_ps(0xF0F0, a, b),
            _mm512_permutex2var_ps(a, order, b),
        );
    }
    // Lanes l and l + 2, then l and l + 1.
    let [a, b] = quarters;
    let pairs = _mm512_add_ps(
        _mm512_mask_blend_ps(0xCCCC, a, b),
        _mm512_shuffle_ps::<0b01_00_11_10>(a, b),
    );
    let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0b10_11_00_01>(pairs));
    let order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    let sums = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums));
    // SAFETY: eight numbers.
    unsafe { _mm256_storeu_ps(totals.as_mut_ptr(), sums) };
}

/// The totals of up to eight sums, as [`Tiles::total`] defines them.
#[target_feature(enable = "avx2,fma")]
fn totals_avx2(lanes: &[[f32; LANES]], totals: &mut [f32; 8]) {
    // Lanes l and l + 8.
    let mut all = [_mm256_setzero_ps(); 8];
    for (sum, lanes) in all.iter_mut().zip(lanes) {
        // SAFETY: sixteen numbers.
        *sum = unsafe {
            _mm256_add_ps(
                _mm256_loadu_ps(lanes.as_ptr()),
                _mm256_loadu_ps(lanes.as_ptr().add(8)),
            )
        };
    }
    // Lanes l and l + 4: halves.
    let mut halves = [_mm256_setzero_ps(); 4];
    for (i, sum) in halves.iter_mut().enumerate() {
        let (a, b) = (all[2 * i], all[2 * i + 1]);
        *sum = _mm256_add_ps(
            _mm256_blend_ps::<0xF0>(a, b),
            _mm256_permute2f128_ps::<0x21>(a, b),
        );
    }
    // Lanes l and l + 2.
    let mut pairs = [_mm256_setzero_ps(); 2];
    for (i, sum) in pairs.iter_mut().enumerate() {
        let (a, b) = (halves[2 * i], halves[2 * i + 1]);
        *sum = _mm256_add_ps(
            _mm256_blend_ps::<0xCC>(a, b),
            _mm256_shuffle_ps::<0b01_00_11_10>(a, b),
        );
    }
    // Lanes l and l + 1.
    let [a, b] = pairs;
    let sums = _mm256_add_ps(
        _mm256_blend_ps::<0xAA>(a, b),
        _mm256_permute_ps::<0b10_11_00_01>(_mm256_blend_ps::<0x55>(a, b)),
    );
    let order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
    // SAFETY: eight numbers.
    unsafe { _mm256_storeu_ps(totals.as_mut_ptr(), _mm256_permutevar8x32_ps(sums, order)) };
}
