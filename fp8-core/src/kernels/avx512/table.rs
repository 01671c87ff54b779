//! From codes to 16-bit values under one scale, by looking up their two bytes (AVX-512 VBMI).

use std::arch::x86_64::*;

use super::{BLOCK, LANES, load_bytes, load_words, store_words};
use crate::{HighPrecision, kernels::widening::Widening};

/// The shortest segment that is worth a table.
pub(super) const MIN_LEN: usize = 1024;

/// The low and the high bytes of the values of the non-negative codes.
struct Table {
    low: [__m512i; 2],
    high: [__m512i; 2],
    /// The bytes of the value of 0x80, if that is not -0.
    nan: Option<[__m512i; 2]>,
}

impl Table {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn new<T: HighPrecision>(widening: Widening, has_negative_zero: bool, scale: f32) -> Self {
        let mut values = [T::default(); 2 * BLOCK];
        for (code, value) in values.iter_mut().enumerate() {
            *value = widening.scaled(code as u8, scale);
        }
        let words = [0, 1, 2, 3].map(|part| load_words(&values[part * 2 * LANES..]));
        let bytes = |words: [__m512i; 4]| {
            let [a, b, c, d] = words.map(|words| _mm512_cvtepi16_epi8(words));
            let join = |low, high| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            [join(a, b), join(c, d)]
        };
        let nan = (!has_negative_zero).then(|| {
            let value = load_words(&[widening.scaled::<T>(0x80, scale)]);
            [value, _mm512_srli_epi16::<8>(value)]
                .map(|byte| _mm512_broadcastb_epi8(_mm512_castsi512_si128(byte)))
        });
        Self {
            low: bytes(words),
            high: bytes(words.map(|words| _mm512_srli_epi16::<8>(words))),
            nan,
        }
    }

    /// Decodes up to a block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn decode<T: HighPrecision, const CALLER: u8>(&self, codes: &[u8], dst: &mut [T]) {
        // Bytes are interleaved within 128-bit lanes: this order makes the results come out in theirs.
        let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        let codes = _mm512_permutexvar_epi64(order, load_bytes(codes));
        let mut low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
        let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
        let sign = _mm512_set1_epi8(0x80u8 as i8);
        // high ^ (code & sign).
        let mut high = _mm512_ternarylogic_epi32::<0x78>(high, codes, sign);
        if let Some([nan_low, nan_high]) = self.nan {
            let nan = _mm512_cmpeq_epi8_mask(codes, sign);
            low = _mm512_mask_mov_epi8(low, nan, nan_low);
            high = _mm512_mask_mov_epi8(high, nan, nan_high);
        }
        store_words(dst, 0, _mm512_unpacklo_epi8(low, high));
        store_words(dst, 2 * LANES, _mm512_unpackhi_epi8(low, high));
    }
}

/// Decodes segments of `len` codes, each with its scale, which is finite and not 0. For 16-bit types.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn segments<T: HighPrecision>(
    widening: Widening,
    has_negative_zero: bool,
    codes: &[u8],
    len: usize,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    for ((codes, dst), &scale) in codes
        .chunks(len)
        .zip(dst.chunks_mut(len))
        .zip(dequant_scales)
    {
        let table = Table::new::<T>(widening, has_negative_zero, scale);
        let (code_blocks, code_rest) = codes.as_chunks::<BLOCK>();
        let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
        for (codes, dst) in code_blocks.iter().zip(dst_blocks) {
            table.decode::<T, 0>(codes, dst);
        }
        if !code_rest.is_empty() {
            table.decode::<T, 1>(code_rest, dst_rest);
        }
    }
}
