//! bf16 and E4M3 under a power of two, which only moves exponents: in words and bytes, without a product in f32.

use std::arch::x86_64::*;

use super::{
    BLOCK, LANES, amax::largest_word, load_bytes, load_words, prefetch, store_bytes, store_words,
};
use crate::{HighPrecision, kernels::Isa};
use half::bf16;

/// The exponent of a power of two among normal numbers.
#[inline]
fn exponent(scale: f32) -> Option<i32> {
    let bits = scale.to_bits();
    let is_power = bits & 0x807F_FFFF == 0 && scale.is_normal();
    is_power.then(|| (bits >> 23) as i32 - 127)
}

/// What is subtracted from the bits of a magnitude without the lowest four, so that they become those of its code under this
/// quant_scale. None if that is no power of two, or one under which NaN and infinity would not be larger than all codes.
#[inline]
fn less(quant_scale: f32) -> Option<u16> {
    // The exponents 127 and 7 stand for 1.
    let shift = exponent(quant_scale).filter(|exponent| (-103..=120).contains(exponent))?;
    Some((120 - shift) as u16 * 8)
}

/// Whether [`encode`] is worth a try: one scale says enough.
pub(super) fn encodes(quant_scales: &[f32]) -> bool {
    quant_scales
        .first()
        .is_some_and(|scale| less(*scale).is_some())
}

/// Elements that are cast again if one of them needs it.
const PIECE: usize = 4 * BLOCK;

/// Nearest-even casts of bf16 to E4M3 that saturate, of segments of `len` elements. `general` casts those under another scale, and pieces
/// that end within a block or have NaN, infinity, or a magnitude that becomes subnormal.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn encode<T: HighPrecision>(
    src: &[T],
    len: usize,
    quant_scales: &[f32],
    dst: &mut [u8],
    general: impl Fn(&[T], f32, &mut [u8]),
) {
    for ((src, dst), &scale) in src.chunks(len).zip(dst.chunks_mut(len)).zip(quant_scales) {
        let Some(less) = less(scale) else {
            general(src, scale, dst);
            continue;
        };
        for (src, dst) in src.chunks(PIECE).zip(dst.chunks_mut(PIECE)) {
            if !encode_piece(src, less, dst) {
                general(src, scale, dst);
            }
        }
    }
}

/// Whether the codes are right. There are no calls between its blocks, before which vectors would have to be stored.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn encode_piece<T: HighPrecision>(src: &[T], less: u16, dst: &mut [u8]) -> bool {
    let (src_blocks, src_rest) = src.as_chunks::<BLOCK>();
    let (dst_blocks, _) = dst.as_chunks_mut::<BLOCK>();
    let (up, less) = (load_words(&UP), _mm512_set1_epi16(less as i16));
    let mut others = 0;
    for (src, dst) in src_blocks.iter().zip(dst_blocks) {
        prefetch(src);
        let words = words_of(src);
        let (codes, odd) = codes(words, less, up);
        store_bytes(dst, codes);
        if odd != 0 {
            others |= not_zero(words, odd);
        }
    }
    src_rest.is_empty() && others == 0
}

/// Casts of groups of `len` elements of bf16, and the dequant_scale of each, as `groups.rs` defines them. `alone` casts groups with parts
/// of a block, with infinity or NaN, with magnitudes that become subnormal, and those whose amax is very small or very large.
pub(in super::super) fn encode_groups<T: HighPrecision>(
    isa: Isa,
    src: &[T],
    len: usize,
    dst: &mut [u8],
    dequant_scales: &mut [f32],
    alone: impl Fn(&[T], &mut [u8]) -> f32,
) {
    assert!(super::is_in(isa), "{isa:?}");
    let groups = src.chunks(len).zip(dst.chunks_mut(len));
    for ((src, dst), dequant_scale) in groups.zip(dequant_scales) {
        // SAFETY: as asserted, the processor has these features.
        let found = unsafe { encode_group(src, dst) };
        *dequant_scale = found.unwrap_or_else(|| alone(src, dst));
    }
}

/// The codes of a group; returns the dequant_scale, if the codes are right.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn encode_group<T: HighPrecision>(src: &[T], dst: &mut [u8]) -> Option<f32> {
    // Groups of the usual size are read once.
    if let Ok(src) = <&[T; 2 * BLOCK]>::try_from(src)
        && let Ok(dst) = dst.try_into()
    {
        return encode_two(src, dst);
    }
    let (blocks, rest) = src.as_chunks::<BLOCK>();
    let mut max = _mm512_setzero_si512();
    for block in blocks {
        prefetch(block);
        max = _mm512_max_epu16(max, largest_of_two(words_of(block)));
    }
    let (less, dequant_scale) = scale_of(max)?;
    (rest.is_empty() && encode_piece(src, less, dst)).then_some(dequant_scale)
}

/// [`encode_group`] of two blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn encode_two<T: HighPrecision>(src: &[T; 2 * BLOCK], dst: &mut [u8; 2 * BLOCK]) -> Option<f32> {
    let (blocks, _) = src.as_chunks::<BLOCK>();
    prefetch(&blocks[0]);
    prefetch(&blocks[1]);
    let (first, second) = (words_of(&blocks[0]), words_of(&blocks[1]));
    let max = _mm512_max_epu16(largest_of_two(first), largest_of_two(second));
    let (less, dequant_scale) = scale_of(max)?;
    let (up, less) = (load_words(&UP), _mm512_set1_epi16(less as i16));
    let (low, odd) = codes(first, less, up);
    let (high, odd_too) = codes(second, less, up);
    store_bytes(&mut dst[..BLOCK], low);
    store_bytes(&mut dst[BLOCK..], high);
    let is_right = odd | odd_too == 0 || not_zero(first, odd) | not_zero(second, odd_too) == 0;
    is_right.then_some(dequant_scale)
}

/// The words of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn words_of<T: HighPrecision>(block: &[T; BLOCK]) -> [__m512i; 2] {
    [
        load_words(&block[..2 * LANES]),
        load_words(&block[2 * LANES..]),
    ]
}

/// For each lane, the larger magnitude of two vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn largest_of_two([low, high]: [__m512i; 2]) -> __m512i {
    let magnitude = _mm512_set1_epi16(i16::MAX);
    let low = _mm512_and_si512(low, magnitude);
    _mm512_max_epu16(low, _mm512_and_si512(high, magnitude))
}

/// What [`less`] says of the scale for these magnitudes, and the dequant_scale. None if the amax is very small or very large.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scale_of(magnitudes: __m512i) -> Option<(u16, f32)> {
    // Under 2^(8 - exponent) the amax is at most 448 if its mantissa is at most 1.75.
    let amax = largest_word(magnitudes);
    let exponent = i32::from(amax >> 7) - 127;
    let shift = 8 - exponent - i32::from(amax & 0x7F > 0x60);
    let power = |exponent: i32| f32::from_bits(((127 + exponent) as u32) << 23);
    match (-39..=110).contains(&exponent) {
        true => Some((less(power(shift))?, power(-shift))),
        false => None,
    }
}

/// Whether a magnitude is rounded up by its lowest four bits, and on a tie by the one above them: 1 if it is, for each value of its
/// lowest five bits.
const UP: [bf16; 2 * LANES] = {
    let mut up = [bf16::ZERO; 2 * LANES];
    let mut low = 0;
    while low < up.len() {
        up[low] = bf16::from_bits((low % 16 > 8 || low == 16 + 8) as u16);
        low += 1;
    }
    up
};

/// The codes of 64 elements, and which of them, in the order of packing, may have other ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn codes(words: [__m512i; 2], less: __m512i, up: __m512i) -> (__m512i, u64) {
    let mut magnitudes = words;
    for magnitude in &mut magnitudes {
        // A lookup sees the lowest five bits only.
        let up = _mm512_permutexvar_epi16(*magnitude, up);
        let high = _mm512_srli_epi16::<5>(_mm512_slli_epi16::<1>(*magnitude));
        *magnitude = _mm512_add_epi16(_mm512_subs_epu16(high, less), up);
    }
    // What is larger than a byte becomes 255. Packing works within lanes of 128 bits.
    let magnitudes = _mm512_packus_epi16(magnitudes[0], magnitudes[1]);
    let signs = _mm512_packs_epi16(words[0], words[1]);
    // Right are those from the smallest normal one, 8, to 254.
    let from_normal = _mm512_sub_epi8(magnitudes, _mm512_set1_epi8(8));
    let odd = _mm512_cmpge_epu8_mask(from_normal, _mm512_set1_epi8(247u8 as i8));
    let largest = _mm512_set1_epi8(0x7E);
    let sign = _mm512_set1_epi8(i8::MIN);
    // code | (sign & 0x80).
    let codes =
        _mm512_ternarylogic_epi32::<0xF8>(_mm512_min_epu8(magnitudes, largest), signs, sign);
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    (_mm512_permutexvar_epi64(order, codes), odd)
}

/// Those of the elements of `odd`, in the order of packing, that are not zero: of zeros, [`codes`] has the code.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn not_zero([low, high]: [__m512i; 2], odd: u64) -> u64 {
    let one = _mm512_set1_epi16(1);
    let low = _mm512_min_epu16(_mm512_slli_epi16::<1>(low), one);
    let high = _mm512_min_epu16(_mm512_slli_epi16::<1>(high), one);
    let others = _mm512_packus_epi16(low, high);
    _mm512_mask_test_epi8_mask(odd, others, others)
}

/// How often values are halved by this dequant_scale. None if it is no power of two, or one under which numbers are not normal or need
/// larger exponents.
#[inline]
fn halvings(dequant_scale: f32) -> Option<usize> {
    let shift = exponent(dequant_scale).filter(|exponent| (-110..=0).contains(exponent))?;
    Some(shift.unsigned_abs() as usize)
}

/// Whether [`decode`] is worth a try: one scale says enough.
pub(super) fn decodes(dequant_scales: &[f32]) -> bool {
    dequant_scales
        .first()
        .is_some_and(|scale| halvings(*scale).is_some())
}

/// For each code without a sign, the bytes of the bf16 that it stands for, and of its half.
struct Values {
    low: [[u8; 2 * BLOCK]; 2],
    high: [[u8; 2 * BLOCK]; 2],
}

static VALUES: Values = {
    let mut values = Values {
        low: [[0; 2 * BLOCK]; 2],
        high: [[0; 2 * BLOCK]; 2],
    };
    let mut code = 1;
    while code < 2 * BLOCK as u16 {
        let bits = match code {
            // Multiples of 2^-9 below 2^-6: the highest bit is the exponent.
            1..8 => {
                let place = 15 - code.leading_zeros() as u16;
                let mantissa = (code << (7 - place)) & 0x7F;
                (127 - 9 + place) << 7 | mantissa
            }
            _ => (code << 4) + (120 << 7),
        };
        let mut halvings = 0;
        while halvings < 2 {
            let [low, high] = (bits - ((halvings as u16) << 7)).to_le_bytes();
            values.low[halvings][code as usize] = low;
            values.high[halvings][code as usize] = high;
            halvings += 1;
        }
        code += 1;
    }
    values
};

/// E4M3 codes as bf16, segments of `len` codes. `general` decodes those under another scale, and pieces that end within a block or have
/// NaN.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn decode<T: HighPrecision>(
    codes: &[u8],
    len: usize,
    dequant_scales: &[f32],
    dst: &mut [T],
    general: impl Fn(&[u8], f32, &mut [T]),
) {
    for ((codes, dst), &scale) in codes
        .chunks(len)
        .zip(dst.chunks_mut(len))
        .zip(dequant_scales)
    {
        let Some(halvings) = halvings(scale) else {
            general(codes, scale, dst);
            continue;
        };
        for (codes, dst) in codes.chunks(PIECE).zip(dst.chunks_mut(PIECE)) {
            if !decode_piece(codes, halvings, dst) {
                general(codes, scale, dst);
            }
        }
    }
}

/// Whether the values are right.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn decode_piece<T: HighPrecision>(codes: &[u8], halvings: usize, dst: &mut [T]) -> bool {
    let halved = Halved::new(halvings);
    let (code_blocks, code_rest) = codes.as_chunks::<BLOCK>();
    let (dst_blocks, _) = dst.as_chunks_mut::<BLOCK>();
    let mut nan = 0;
    for (codes, dst) in code_blocks.iter().zip(dst_blocks) {
        nan |= halved.decode(codes, dst);
    }
    code_rest.is_empty() && nan == 0
}

/// [`Values`] as vectors, and what is subtracted from their high bytes, which have all bits of exponents but the last.
#[derive(Clone, Copy)]
struct Halved {
    low: [__m512i; 2],
    high: [__m512i; 2],
    less: __m512i,
}

impl Halved {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn new(halvings: usize) -> Self {
        let (low, high) = (&VALUES.low[halvings % 2], &VALUES.high[halvings % 2]);
        Self {
            low: [load_bytes(&low[..BLOCK]), load_bytes(&low[BLOCK..])],
            high: [load_bytes(&high[..BLOCK]), load_bytes(&high[BLOCK..])],
            less: _mm512_set1_epi8((halvings / 2) as i8),
        }
    }

    /// Writes the values of a block; returns which of its codes, in any order, are NaN, whose values are wrong.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    fn decode<T: HighPrecision>(&self, codes: &[u8], dst: &mut [T]) -> u64 {
        // Bytes are interleaved within 128-bit lanes: this order makes the results come out in theirs.
        let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        let sign = _mm512_set1_epi8(i8::MIN);
        let codes = _mm512_permutexvar_epi64(order, load_bytes(codes));
        let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
        let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
        // Zero stays zero.
        let high = _mm512_subs_epu8(high, self.less);
        // high | (code & sign).
        let high = _mm512_ternarylogic_epi32::<0xF8>(high, codes, sign);
        store_words(dst, 0, _mm512_unpacklo_epi8(low, high));
        store_words(dst, 2 * LANES, _mm512_unpackhi_epi8(low, high));
        // code | sign is 0xFF for NaN only.
        _mm512_cmpeq_epi8_mask(_mm512_or_si512(codes, sign), _mm512_set1_epi8(-1))
    }
}
