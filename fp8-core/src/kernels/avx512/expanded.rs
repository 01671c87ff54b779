//! Blocks with dynamic range expansion: eight vectors of f32, which stay in registers.

use std::arch::x86_64::*;

use super::{
    BLOCK as HALF, Block, LANES, VECTORS, is_in, load_block, load_bytes,
    round::{Rounder, Wide, any_nan, pack},
    store, store_bytes, words,
};
use crate::{
    Cast, Format,
    expansion::{
        BELOW, Curve, EXPANDED_BLOCK, Expansion, FIXED, LARGEST, NORMAL, Outs, RandomWords,
        amax_and_curve, factors,
    },
    kernels::Isa,
};

/// The casts to nearest and by random words have the same constants.
const CAST: Wide = Wide::new(&Cast::new(Format::E4M3)).expect("a cast of this module");

pub(in super::super) fn encode(
    isa: Isa,
    values: &[f32],
    expansion: Expansion,
    words: Option<RandomWords<'_>>,
    outs: Outs<'_>,
) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: as asserted, the processor has these features.
    unsafe {
        match words {
            Some(random) => encode_blocks::<true>(values, expansion, random, outs),
            None => {
                let none = RandomWords {
                    words: &[],
                    rotated: 0,
                };
                encode_blocks::<false>(values, expansion, none, outs);
            }
        }
    }
}

pub(in super::super) fn decode(
    isa: Isa,
    codes: &[u8],
    amaxes: &[f32],
    curves: &[u8],
    values: &mut [f32],
) {
    assert!(isa.has_vbmi(), "{isa:?}");
    // SAFETY: as asserted, the processor has these features.
    unsafe { decode_blocks(codes, amaxes, curves, values) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn encode_blocks<const STOCHASTIC: bool>(
    values: &[f32],
    expansion: Expansion,
    random: RandomWords<'_>,
    (codes, amaxes, curves): Outs<'_>,
) {
    let rounder = Rounder::new(&CAST);
    let rotated = _mm512_set1_epi32(random.rotated as i32);
    let blocks = values
        .chunks(EXPANDED_BLOCK)
        .zip(codes.chunks_mut(EXPANDED_BLOCK));
    let marks = amaxes.iter_mut().zip(curves);
    for (block, ((values, codes), (amax, curve))) in blocks.zip(marks).enumerate() {
        let (low, high) = values.split_at(values.len().min(HALF));
        let halves = [load_block(low), load_block(high)];
        let (largest, sum) = measure(halves);
        let on;
        (*amax, on) = amax_and_curve(largest, sum, values.len(), expansion.expands);
        *curve = on as u8;
        let factors = factors(*amax).map(|x| _mm512_set1_ps(x));
        // One function for each curve, which is a constant in it.
        let raised = match on {
            Curve::Linear => raise::<{ Curve::Linear as u8 }>(halves, factors),
            Curve::Square => raise::<{ Curve::Square as u8 }>(halves, factors),
            Curve::Fourth => raise::<{ Curve::Fourth as u8 }>(halves, factors),
            Curve::Root => raise::<{ Curve::Root as u8 }>(halves, factors),
        };
        for (half, codes) in codes.chunks_mut(HALF).enumerate() {
            let mut found = if STOCHASTIC {
                let first = block * EXPANDED_BLOCK + half * HALF;
                let drawn = load_words(&random.words[first..][..codes.len()]);
                at_random(halves[half], raised[half], drawn, rotated)
            } else {
                let products = with_signs(halves[half], raised[half]);
                rounder.codes::<false>(products, [_mm512_setzero_si512(); VECTORS])
            };
            if any_nan(raised[half]) {
                let signed = with_signs(halves[half], raised[half]);
                found = rounder.with_nan(found, signed, signs(signed));
            }
            if expansion.non_negative {
                let zero = _mm512_setzero_ps();
                let mut above = [0; VECTORS];
                for (above, x) in above.iter_mut().zip(halves[half]) {
                    *above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, zero);
                }
                found = _mm512_mask_max_epu8(found, lanes(above), found, _mm512_set1_epi8(1));
            }
            store_bytes(codes, found);
        }
    }
}

/// The words of up to 64 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load_words(random: &[u32]) -> [__m512i; VECTORS] {
    let (whole, rest) = random.as_chunks::<LANES>();
    if let [a, b, c, d] = whole {
        return [words(a), words(b), words(c), words(d)];
    }
    let mut padded = [[0u32; LANES]; VECTORS];
    padded[..whole.len()].copy_from_slice(whole);
    if let Some(last) = padded.get_mut(whole.len()) {
        last[..rest.len()].copy_from_slice(rest);
    }
    let [a, b, c, d] = &padded;
    [words(a), words(b), words(c), words(d)]
}

/// One bit for each element.
fn lanes(masks: [u16; VECTORS]) -> u64 {
    let joined = |all, mask| all << 16 | u64::from(mask);
    masks.into_iter().rev().fold(0, joined)
}

#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn signs(values: Block) -> u64 {
    lanes(values.map(|x| _mm512_movepi32_mask(_mm512_castps_si512(x))))
}

/// The largest magnitude, but for NaN, and the sum of magnitudes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn measure(halves: [Block; 2]) -> (f32, f32) {
    let mut largest = _mm512_setzero_ps();
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; 2];
    for (sums, half) in sums.iter_mut().zip(halves) {
        for (sum, x) in sums.iter_mut().zip(half) {
            *sum = _mm512_abs_ps(x);
            // Of NaN and a number, the second operand.
            largest = _mm512_max_ps(*sum, largest);
        }
    }
    let [[a, b, c, d], [e, f, g, h]] = sums;
    let low = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
    let high = _mm512_add_ps(_mm512_add_ps(e, f), _mm512_add_ps(g, h));
    let sum = _mm512_add_ps(low, high);
    let upper = _mm512_extractf32x8_ps::<1>(largest);
    let largest = _mm256_max_ps(_mm512_castps512_ps256(largest), upper);
    let upper = _mm512_extractf32x8_ps::<1>(sum);
    let sum = _mm256_add_ps(_mm512_castps512_ps256(sum), upper);
    // Four, two and one lanes away.
    let largest = _mm256_max_ps(largest, _mm256_permute2f128_ps::<1>(largest, largest));
    let sum = _mm256_add_ps(sum, _mm256_permute2f128_ps::<1>(sum, sum));
    let largest = _mm256_max_ps(largest, _mm256_permute_ps::<0b01_00_11_10>(largest));
    let sum = _mm256_add_ps(sum, _mm256_permute_ps::<0b01_00_11_10>(sum));
    let largest = _mm256_max_ps(largest, _mm256_permute_ps::<0b10_11_00_01>(largest));
    let sum = _mm256_add_ps(sum, _mm256_permute_ps::<0b10_11_00_01>(sum));
    (_mm256_cvtss_f32(largest), _mm256_cvtss_f32(sum))
}

/// The magnitudes of a block on its curve.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn raise<const CURVE: u8>(halves: [Block; 2], [exact, reciprocal]: [__m512; 2]) -> [Block; 2] {
    let (one, largest) = (_mm512_set1_ps(1.), _mm512_set1_ps(LARGEST));
    let mut raised = halves;
    for half in &mut raised {
        for x in half {
            let t = _mm512_mul_ps(_mm512_mul_ps(_mm512_abs_ps(*x), exact), reciprocal);
            // Of NaN and a number, the second operand: NaN stays NaN.
            let t = _mm512_min_ps(one, t);
            let square = _mm512_mul_ps(t, t);
            let power = match Curve::of(CURVE) {
                Curve::Linear => t,
                Curve::Square => square,
                Curve::Fourth => _mm512_mul_ps(square, square),
                Curve::Root => _mm512_sqrt_ps(t),
            };
            *x = _mm512_mul_ps(largest, power);
        }
    }
    raised
}

/// Magnitudes with the signs of values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_signs(values: Block, magnitudes: Block) -> Block {
    let sign = _mm512_set1_epi32(i32::MIN);
    let mut signed = magnitudes;
    for (y, x) in signed.iter_mut().zip(values) {
        let (x, magnitude) = (_mm512_castps_si512(x), _mm512_castps_si512(*y));
        // The bits of `sign` from x, all others from the magnitude.
        *y = _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xCA>(sign, x, magnitude));
    }
    signed
}

/// The codes of magnitudes by random words, with the signs of values. The code of NaN is arbitrary.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn at_random(
    values: Block,
    magnitudes: Block,
    random: [__m512i; VECTORS],
    rotated: __m512i,
) -> __m512i {
    let below = _mm512_set1_epi32(BELOW as i32);
    let (normal, fixed) = (_mm512_set1_ps(NORMAL), _mm512_set1_ps(FIXED));
    let mut signed = random;
    for v in 0..VECTORS {
        let y = magnitudes[v];
        let small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(y, normal);
        let units = _mm512_sub_epi32(_mm512_castps_si512(y), below);
        let units = _mm512_mask_cvttps_epi32(units, small, _mm512_mul_ps(y, fixed));
        let random = _mm512_srli_epi32::<12>(_mm512_rolv_epi32(signed[v], rotated));
        let code = _mm512_srli_epi32::<20>(_mm512_add_epi32(units, random));
        let signs = _mm512_srli_epi32::<24>(_mm512_castps_si512(values[v]));
        // Seven bits from the magnitude, the others from the sign, which has only the one bit.
        signed[v] = _mm512_ternarylogic_epi32::<0xE4>(code, signs, _mm512_set1_epi32(0x7F));
    }
    pack(signed)
}

/// 64 codes at a time: four lookups give the bytes of their shares.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn decode_blocks(codes: &[u8], amaxes: &[f32], curves: &[u8], values: &mut [f32]) {
    // Bytes are interleaved within lanes of 128 bits: in this order the results come out in theirs.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let sign = _mm512_set1_epi8(i8::MIN);
    let blocks = values
        .chunks_mut(EXPANDED_BLOCK)
        .zip(codes.chunks(EXPANDED_BLOCK));
    for ((values, codes), (amax, curve)) in blocks.zip(amaxes.iter().zip(curves)) {
        let tables = &Curve::of(*curve).shares().bytes;
        let amax = _mm512_set1_ps(*amax);
        for (codes, values) in codes.chunks(HALF).zip(values.chunks_mut(HALF)) {
            let codes = _mm512_permutexvar_epi32(order, load_bytes(codes));
            let mut bytes = [_mm512_setzero_si512(); 4];
            for (bytes, table) in bytes.iter_mut().zip(tables) {
                let (low, high) = (load_bytes(&table[..HALF]), load_bytes(&table[HALF..]));
                *bytes = _mm512_permutex2var_epi8(low, codes, high);
            }
            // The highest byte ^ (code & sign).
            bytes[3] = _mm512_ternarylogic_epi32::<0x78>(bytes[3], codes, sign);
            let low = [
                _mm512_unpacklo_epi8(bytes[0], bytes[1]),
                _mm512_unpackhi_epi8(bytes[0], bytes[1]),
            ];
            let high = [
                _mm512_unpacklo_epi8(bytes[2], bytes[3]),
                _mm512_unpackhi_epi8(bytes[2], bytes[3]),
            ];
            let shares = [
                _mm512_unpacklo_epi16(low[0], high[0]),
                _mm512_unpackhi_epi16(low[0], high[0]),
                _mm512_unpacklo_epi16(low[1], high[1]),
                _mm512_unpackhi_epi16(low[1], high[1]),
            ];
            for (v, shares) in shares.into_iter().enumerate() {
                let shares = _mm512_castsi512_ps(shares);
                store(values, v * LANES, _mm512_mul_ps(amax, shares));
            }
        }
    }
}
