//! What panels of bf16 are packed from: codes, or values in bf16.

use super::decoder::{Decoder, load, prefetch};
use super::kernel::Matrix;
use super::layout::{Order, PANEL, ROWS, SLICE};
use super::pack_bf16::{Source, store, transpose_16};
use std::arch::x86_64::*;
use std::ops::Range;

impl Source for &Decoder {
    type Element = u8;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    unsafe fn run(self, codes: &[u8]) -> [__m512i; 2] {
        let in_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        self.decode(_mm512_permutexvar_epi64(in_order, load(codes)))
            .into()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    unsafe fn pairs(self, matrix: Matrix<'_>, k: usize, col: usize, left: usize) -> [__m512i; 2] {
        self.decode(pair_of_rows(matrix, k, col, left)).into()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    unsafe fn whole_pair(self, [row, next]: [&[u8; PANEL]; 2]) -> [__m512i; 2] {
        // SAFETY: arrays of 32 bytes.
        let halves = unsafe {
            [
                _mm256_loadu_si256(row.as_ptr().cast()),
                _mm256_loadu_si256(next.as_ptr().cast()),
            ]
        };
        let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(halves[0]), halves[1]);
        let codes = _mm512_permutexvar_epi8(load(&ORDERS[ROWS]), both);
        self.decode(codes).into()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    unsafe fn panel_of_cols(
        self,
        matrix: Matrix<'_>,
        first: usize,
        range: Range<usize>,
        dst: &mut [u16],
    ) {
        let k = matrix.contracted;
        // Within each lane: the first two codes of its four columns, then the other two.
        let order = _mm512_broadcast_i32x4(_mm_setr_epi8(
            0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
        ));
        for half in 0..2 {
            let first = first + half * 16;
            let cols = matrix.kept.saturating_sub(first).min(16);
            for start in range.clone().step_by(64) {
                let mut rows = [_mm512_setzero_si512(); 16];
                for (col, row) in rows[..cols].iter_mut().enumerate() {
                    let codes = &matrix.elements[(first + col) * k..(first + col + 1) * k];
                    // Further codes of the same columns or, at their end, the columns of the next panel.
                    let next = if start + SLICE < k {
                        0
                    } else {
                        (PANEL - 1) * k
                    };
                    prefetch(codes.as_ptr().wrapping_add(start), SLICE + next);
                    *row = load(&codes[start.min(k)..]);
                }
                let fours = (range.end - start).min(64) / 4;
                for (four, codes) in transpose_16(rows).iter().take(fours).enumerate() {
                    let (low, high) = self.decode(_mm512_shuffle_epi8(*codes, order));
                    let at = start - range.start + four * 4;
                    let dst = &mut dst[at * PANEL + half * 32..];
                    store(low, dst);
                    store(high, &mut dst[2 * PANEL..]);
                }
            }
        }
    }
}

/// For `_mm512_permutex2var_epi16` of two rows of 32 columns: their values in turn, of the lower and of the upper 16 columns.
const IN_TURN: [[u16; 32]; 2] = {
    let mut from = [[0; 32]; 2];
    let mut col = 0;
    while col < 32 {
        let half = &mut from[col / 16];
        let at = 2 * (col % 16);
        (half[at], half[at + 1]) = (col as u16, 32 + col as u16);
        col += 1;
    }
    from
};

/// Values in bf16, as bits.
#[derive(Clone, Copy)]
pub(super) struct Bits;

/// Up to 32 values, zeros after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn load_32(values: &[u16]) -> __m512i {
    let mask = match values.len() {
        0 => 0,
        len => u32::MAX >> (32 - len.min(32)),
    };
    // SAFETY: only the values of the mask are read, which lie in the slice.
    unsafe { _mm512_maskz_loadu_epi16(mask, values.as_ptr().cast()) }
}

impl Source for Bits {
    type Element = u16;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    unsafe fn run(self, values: &[u16]) -> [__m512i; 2] {
        [
            load_32(values),
            load_32(values.get(32..).unwrap_or_default()),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    unsafe fn pairs(
        self,
        matrix: Matrix<'_, u16>,
        k: usize,
        col: usize,
        left: usize,
    ) -> [__m512i; 2] {
        // SAFETY: an array of 64 bytes.
        let in_turn = unsafe { _mm512_loadu_si512(IN_TURN[0].as_ptr().cast()) };
        let columns = |from: usize| {
            let row = |k: usize| {
                if k >= matrix.contracted {
                    return _mm512_setzero_si512();
                }
                let end = (k + 1) * matrix.kept;
                load_32(&matrix.elements[(k * matrix.kept + from).min(end)..end])
            };
            _mm512_permutex2var_epi16(row(k), in_turn, row(k + 1))
        };
        [columns(col), columns(col + left)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    unsafe fn whole_pair(self, [row, next]: [&[u16; PANEL]; 2]) -> [__m512i; 2] {
        // SAFETY: arrays of 64 bytes.
        let [row, next, low, high] = unsafe {
            [
                _mm512_loadu_si512(row.as_ptr().cast()),
                _mm512_loadu_si512(next.as_ptr().cast()),
                _mm512_loadu_si512(IN_TURN[0].as_ptr().cast()),
                _mm512_loadu_si512(IN_TURN[1].as_ptr().cast()),
            ]
        };
        [
            _mm512_permutex2var_epi16(row, low, next),
            _mm512_permutex2var_epi16(row, high, next),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    unsafe fn panel_of_cols(
        self,
        matrix: Matrix<'_, u16>,
        first: usize,
        range: Range<usize>,
        dst: &mut [u16],
    ) {
        let k = matrix.contracted;
        for half in 0..2 {
            let first = first + half * 16;
            let cols = matrix.kept.saturating_sub(first).min(16);
            for start in range.clone().step_by(32) {
                let mut rows = [_mm512_setzero_si512(); 16];
                for (col, row) in rows[..cols].iter_mut().enumerate() {
                    let values = &matrix.elements[(first + col) * k..(first + col + 1) * k];
                    // Further values of the same columns or, at their end, the columns of the next panel.
                    let next = if start + SLICE < k {
                        0
                    } else {
                        (PANEL - 1) * k
                    };
                    prefetch(values.as_ptr().wrapping_add(start + next).cast(), 2 * SLICE);
                    *row = load_32(&values[start.min(k)..]);
                }
                let pairs = (range.end - start).min(32) / 2;
                for (pair, values) in transpose_16(rows).iter().take(pairs).enumerate() {
                    let at = start - range.start + pair * 2;
                    store(*values, &mut dst[at * PANEL + half * 32..]);
                }
            }
        }
    }
}

/// Up to 32 bytes, zeros after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn load_half(bytes: &[u8]) -> __m256i {
    let mask = match bytes.len() {
        0 => 0,
        len => u32::MAX >> (32 - len.min(32)),
    };
    // SAFETY: only the bytes of the mask are read, which lie in the slice.
    unsafe { _mm256_maskz_loadu_epi8(mask, bytes.as_ptr().cast()) }
}

/// Where the codes of two rows come from in the order of packed codes, for each number of columns in the low halves.
static ORDERS: [[u8; 64]; ROWS + 1] = {
    let mut orders = [[0; 64]; ROWS + 1];
    let mut left = 0;
    while left <= ROWS {
        let mut col = 0;
        while col < PANEL {
            // Unused lanes repeat the first ones: other codes might need the slow lookup.
            let from = if col < 16 {
                if col < left { col } else { 0 }
            } else if col - 16 < left {
                left + col - 16
            } else {
                0
            };
            orders[left][Order::Pairs.place(col, 0)] = from as u8;
            orders[left][Order::Pairs.place(col, 1)] = (PANEL + from) as u8;
            col += 1;
        }
        left += 1;
    }
    orders
};

/// Rows `k` and `k + 1` of the columns from `col` on of a matrix that sums over rows, in the order of packed codes: `left`
/// columns for the low halves and as many as there are after them, up to 16, for the high halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn pair_of_rows(matrix: Matrix<'_>, k: usize, col: usize, left: usize) -> __m512i {
    let row = |k: usize| {
        if k >= matrix.contracted {
            return _mm256_setzero_si256();
        }
        let start = k * matrix.kept;
        load_half(&matrix.elements[start + col..start + matrix.kept])
    };
    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(row(k)), row(k + 1));
    _mm512_permutexvar_epi8(load(&ORDERS[left]), both)
}
