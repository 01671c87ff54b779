//! [`Epilogue::finish_row`](super::epilogue::Epilogue::finish_row) for the rows of a block, with AVX-512, if results are in f32 or bf16.

use super::epilogue::{ColScales, RowEnd, is_extreme};
use super::layout::PANEL;
use super::results::rounded;
use super::stage::Finished;
use fp8_core::HighPrecision;
use half::bf16;
use std::any::TypeId;
use std::arch::x86_64::*;

/// Finishes a block; false, and nothing is written, if its results have another dtype.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) fn finish<T: HighPrecision>(block: &mut Finished<'_, T>) -> bool {
    match TypeId::of::<T>() {
        dtype if dtype == TypeId::of::<f32>() => finish_as::<T, f32>(block),
        dtype if dtype == TypeId::of::<bf16>() => finish_as::<T, bf16>(block),
        _ => return false,
    }
    true
}

/// [`finish`] for the dtype `D`, which `T` is.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn finish_as<T: HighPrecision, D: Lanes>(block: &mut Finished<'_, T>) {
    let epilogue = block.epilogue;
    block.with(|row, first, sums, out| {
        let end = epilogue.row_end(row, first..first + out.len());
        if is_extreme(end.row_scale) {
            return epilogue.finish_row(row, first, sums, out);
        }
        assert!(sums.len() == out.len());
        let out = out.as_mut_ptr().cast::<D>();
        let (whole, rest) = (sums.len() / PANEL * PANEL, sums.len() % PANEL);
        // SAFETY: the masks have only elements of the row, from the first index on; this function has the instructions.
        unsafe {
            for at in (0..whole).step_by(PANEL) {
                D::write(
                    out.wrapping_add(at),
                    u32::MAX,
                    of_panel(&end, sums, at, u32::MAX),
                );
            }
            if rest > 0 {
                let mask = u32::MAX >> (PANEL - rest);
                D::write(
                    out.wrapping_add(whole),
                    mask,
                    of_panel(&end, sums, whole, mask),
                );
            }
        }
    });
}

/// Scaled sums of 32 columns, the lower and the upper 16, and their bias.
#[derive(Clone, Copy)]
struct Values {
    low: __m512,
    high: __m512,
    bias: Option<(__m512, __m512)>,
}

/// The columns of `mask` from index `at` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn of_panel(end: &RowEnd<'_>, sums: &[f32], at: usize, mask: u32) -> Values {
    let row_scale = _mm512_set1_ps(end.row_scale);
    let (low_scale, high_scale) = match end.col_scales {
        ColScales::One(scale) => (_mm512_set1_ps(scale), _mm512_set1_ps(scale)),
        ColScales::Each(scales) => load(scales, at, mask),
    };
    let (low, high) = load(sums, at, mask);
    Values {
        low: _mm512_mul_ps(_mm512_mul_ps(low, row_scale), low_scale),
        high: _mm512_mul_ps(_mm512_mul_ps(high, row_scale), high_scale),
        bias: end.bias.map(|bias| load(bias, at, mask)),
    }
}

/// The lanes of `mask` of 32 values from index `at` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn load(values: &[f32], at: usize, mask: u32) -> (__m512, __m512) {
    assert!(at + (u32::BITS - mask.leading_zeros()) as usize <= values.len());
    let from = values.as_ptr().wrapping_add(at);
    // SAFETY: by the assertion, the mask has only elements of `values`.
    unsafe {
        (
            _mm512_maskz_loadu_ps(mask as u16, from),
            _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16)),
        )
    }
}

/// A dtype of results.
trait Lanes {
    /// Writes the lanes of `mask`, rounded to this dtype, with the bias added in it.
    ///
    /// # Safety
    /// `out` points to elements for these lanes. The processor has the instructions of this file.
    unsafe fn write(out: *mut Self, mask: u32, values: Values);
}

impl Lanes for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn write(out: *mut f32, mask: u32, values: Values) {
        let Values { low, high, bias } = values;
        let (low, high) = match bias {
            Some(bias) => (_mm512_add_ps(low, bias.0), _mm512_add_ps(high, bias.1)),
            None => (low, high),
        };
        // SAFETY: guaranteed by the caller.
        unsafe {
            _mm512_mask_storeu_ps(out, mask as u16, low);
            _mm512_mask_storeu_ps(out.wrapping_add(16), (mask >> 16) as u16, high);
        }
    }
}

impl Lanes for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn write(out: *mut bf16, mask: u32, values: Values) {
        let mut bits = rounded_pair(values.low, values.high);
        if let Some(bias) = values.bias {
            let low = widened(_mm512_castsi512_si256(bits));
            let high = widened(_mm512_extracti64x4_epi64::<1>(bits));
            bits = rounded_pair(_mm512_add_ps(low, bias.0), _mm512_add_ps(high, bias.1));
        }
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_mask_storeu_epi16(out.cast(), mask, bits) };
    }
}

/// The values of 16 bf16.
#[inline]
#[target_feature(enable = "avx512f")]
fn widened(bits: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

/// The bits of the nearest bf16 of 32 values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn rounded_pair(low: __m512, high: __m512) -> __m512i {
    // The instruction would flush these to zero.
    const SUBNORMAL: i32 = 0x20;
    let flushed =
        _mm512_fpclass_ps_mask::<SUBNORMAL>(low) | _mm512_fpclass_ps_mask::<SUBNORMAL>(high);
    if flushed != 0 {
        return rounded_subnormals(low, high);
    }
    let pair = _mm512_cvtne2ps_pbh(high, low);
    // SAFETY: any bits are a valid value of both.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(pair) }
}

/// [`rounded_pair`] of any values.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn rounded_subnormals(low: __m512, high: __m512) -> __m512i {
    let low = _mm512_cvtepi32_epi16(rounded(low));
    let high = _mm512_cvtepi32_epi16(rounded(high));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}
