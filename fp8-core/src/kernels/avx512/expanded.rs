//! Blocks with dynamic range expansion: eight vectors of f32, which stay in registers.

use std::arch::x86_64::*;

use super::{
    BLOCK as HALF, Block, LANES, VECTORS, block_of_words, is_in, load_block, load_bytes,
    round::{Rounder, Wide, pack},
    store, store_bytes,
};
use crate::{
    Cast, Format,
    expansion::{
        BELOW, Curve, EXPANDED_BLOCK, EXPANDED_WORDS, Expansion, HALF_ROTATED, LARGEST, NORMAL,
        Outs, RANDOM_BITS, RandomWords, amax_and_curve, factors,
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
    let none = RandomWords {
        words: &[],
        rotated: 0,
    };
    let random = words.unwrap_or(none);
    // SAFETY: as asserted, the processor has these features.
    unsafe {
        match (words.is_some(), expansion.non_negative) {
            (true, true) => encode_blocks::<true, true>(values, expansion, random, outs),
            (true, false) => encode_blocks::<true, false>(values, expansion, random, outs),
            (false, true) => encode_blocks::<false, true>(values, expansion, random, outs),
            (false, false) => encode_blocks::<false, false>(values, expansion, random, outs),
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
fn encode_blocks<const STOCHASTIC: bool, const NON_NEGATIVE: bool>(
    values: &[f32],
    expansion: Expansion,
    random: RandomWords<'_>,
    (codes, amaxes, curves): Outs<'_>,
) {
    let (whole, rest) = values.as_chunks();
    let (codes, last) = codes.as_chunks_mut();
    let (words, rotated) = (random.words.as_chunks().0, random.rotated);
    let none = [0; EXPANDED_WORDS];
    for (block, (values, codes)) in whole.iter().zip(codes).enumerate() {
        let random = (words.get(block).unwrap_or(&none), rotated);
        let len = EXPANDED_BLOCK;
        (amaxes[block], curves[block]) =
            encode_block::<STOCHASTIC, NON_NEGATIVE>(values, len, expansion, random, codes);
    }
    if !rest.is_empty() {
        let block = whole.len();
        let random = (words.get(block).unwrap_or(&none), rotated);
        (amaxes[block], curves[block]) =
            encode_rest::<STOCHASTIC, NON_NEGATIVE>(rest, expansion, random, last);
    }
}

/// [`encode_block`] for one with fewer elements, outside the loop over the others.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn encode_rest<const STOCHASTIC: bool, const NON_NEGATIVE: bool>(
    values: &[f32],
    expansion: Expansion,
    random: (&[u32; EXPANDED_WORDS], u32),
    codes: &mut [u8],
) -> (f32, u8) {
    let (mut padded, mut all) = ([0.; EXPANDED_BLOCK], [0; EXPANDED_BLOCK]);
    padded[..values.len()].copy_from_slice(values);
    let len = values.len();
    let found = encode_block::<STOCHASTIC, NON_NEGATIVE>(&padded, len, expansion, random, &mut all);
    codes.copy_from_slice(&all[..len]);
    found
}

/// The amax and the curve of a block of `len` values and zeros after them. Lengths are constants, so that no load is masked.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn encode_block<const STOCHASTIC: bool, const NON_NEGATIVE: bool>(
    values: &[f32; EXPANDED_BLOCK],
    len: usize,
    expansion: Expansion,
    (drawn, rotated): (&[u32; EXPANDED_WORDS], u32),
    codes: &mut [u8; EXPANDED_BLOCK],
) -> (f32, u8) {
    let halves = [load_block(&values[..HALF]), load_block(&values[HALF..])];
    let (mut largest, sum) = measure(halves);
    // A sum is NaN if one of its terms is.
    if sum.is_nan() {
        largest = largest_number(halves);
    }
    let (amax, curve) = amax_and_curve(largest, sum, len, expansion.expands);
    let factors = factors(amax);
    // One function for each curve, which is a constant in it.
    let raised = match curve {
        Curve::Linear => raise::<{ Curve::Linear as u8 }>(halves, factors),
        Curve::Square => raise::<{ Curve::Square as u8 }>(halves, factors),
        Curve::Fourth => raise::<{ Curve::Fourth as u8 }>(halves, factors),
        Curve::Root => raise::<{ Curve::Root as u8 }>(halves, factors),
    };
    for half in 0..2 {
        let (values, magnitudes) = (halves[half], raised[half]);
        let mut found = if STOCHASTIC {
            let signs = (!NON_NEGATIVE).then_some(values);
            // To the left, until the bits that count are the lowest ones.
            let rotated = rotated + HALF_ROTATED * half as u32 + RANDOM_BITS;
            at_random(magnitudes, signs, block_of_words(drawn), rotated)
        } else {
            let products = match NON_NEGATIVE {
                true => magnitudes,
                false => with_signs(values, magnitudes),
            };
            let rounder = Rounder::new(&CAST);
            rounder.codes::<false>(products, [_mm512_setzero_si512(); VECTORS])
        };
        if sum.is_nan() {
            found = with_nan(found, values, NON_NEGATIVE);
        }
        if NON_NEGATIVE {
            found = at_least_one(found, values);
        }
        store_bytes(&mut codes[half * HALF..][..HALF], found);
    }
    (amax, curve as u8)
}

/// Codes of values that are not negative, where those of values above 0 become at least 1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn at_least_one(codes: __m512i, values: Block) -> __m512i {
    let zeros = _mm512_testn_epi8_mask(codes, codes);
    if zeros == 0 {
        return codes;
    }
    let zero = _mm512_setzero_ps();
    let mut above = [0; VECTORS];
    for (above, x) in above.iter_mut().zip(values) {
        *above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, zero);
    }
    _mm512_mask_set1_epi8(codes, zeros & lanes(above), 1)
}

/// One bit for each element.
fn lanes(masks: [u16; VECTORS]) -> u64 {
    let joined = |all, mask| all << 16 | u64::from(mask);
    masks.into_iter().rev().fold(0, joined)
}

/// Codes with those of NaN where values are NaN.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_nan(codes: __m512i, values: Block, non_negative: bool) -> __m512i {
    let signs = match non_negative {
        true => 0,
        false => lanes(values.map(|x| _mm512_movepi32_mask(_mm512_castps_si512(x)))),
    };
    Rounder::new(&CAST).with_nan(codes, values, signs)
}

/// The largest magnitude of those that are numbers.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn largest_number(halves: [Block; 2]) -> f32 {
    let mut largest = _mm512_setzero_ps();
    for x in halves.as_flattened() {
        // Of NaN and a number, the second operand.
        largest = _mm512_max_ps(_mm512_abs_ps(*x), largest);
    }
    _mm512_reduce_max_ps(largest)
}

/// The largest magnitude and the sum of magnitudes; NaN is larger than all numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn measure(halves: [Block; 2]) -> (f32, f32) {
    let magnitude = _mm512_set1_epi32(i32::MAX);
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; 2];
    // Compared as integers, which takes a cycle instead of four.
    let mut pairs = [_mm512_setzero_si512(); VECTORS];
    for (sums, half) in sums.iter_mut().zip(halves) {
        for ((sum, pair), x) in sums.iter_mut().zip(&mut pairs).zip(half) {
            let bits = _mm512_and_si512(_mm512_castps_si512(x), magnitude);
            *sum = _mm512_castsi512_ps(bits);
            *pair = _mm512_max_epu32(*pair, bits);
        }
    }
    let [[a, b, c, d], [e, f, g, h]] = sums;
    let low = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
    let high = _mm512_add_ps(_mm512_add_ps(e, f), _mm512_add_ps(g, h));
    let sum = _mm512_add_ps(low, high);
    let [a, b, c, d] = pairs;
    let largest = _mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d));
    let upper = _mm512_extracti64x4_epi64::<1>(largest);
    let largest = _mm256_max_epu32(_mm512_castsi512_si256(largest), upper);
    let upper = _mm512_extractf32x8_ps::<1>(sum);
    let sum = _mm256_add_ps(_mm512_castps512_ps256(sum), upper);
    // Four, two and one lanes away.
    let upper = _mm256_extracti128_si256::<1>(largest);
    let largest = _mm_max_epu32(_mm256_castsi256_si128(largest), upper);
    let sum = _mm256_add_ps(sum, _mm256_permute2f128_ps::<1>(sum, sum));
    let largest = _mm_max_epu32(largest, _mm_shuffle_epi32::<0b01_00_11_10>(largest));
    let sum = _mm256_add_ps(sum, _mm256_permute_ps::<0b01_00_11_10>(sum));
    let largest = _mm_max_epu32(largest, _mm_shuffle_epi32::<0b10_11_00_01>(largest));
    let sum = _mm256_add_ps(sum, _mm256_permute_ps::<0b10_11_00_01>(sum));
    let largest = _mm_cvtss_f32(_mm_castsi128_ps(largest));
    (largest, _mm256_cvtss_f32(sum))
}

/// The magnitudes of a block on its curve.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn raise<const CURVE: u8>(halves: [Block; 2], [exact, reciprocal]: [f32; 2]) -> [Block; 2] {
    let (one, largest) = (_mm512_set1_ps(1.), _mm512_set1_ps(LARGEST));
    let mut raised = halves;
    for half in &mut raised {
        for x in half {
            *x = _mm512_abs_ps(*x);
        }
    }
    if exact != 1. {
        let exact = _mm512_set1_ps(exact);
        for half in &mut raised {
            for x in half {
                *x = _mm512_mul_ps(*x, exact);
            }
        }
    }
    let reciprocal = _mm512_set1_ps(reciprocal);
    for half in &mut raised {
        for x in half {
            // Of NaN and a number, the second operand: NaN stays NaN.
            let t = _mm512_min_ps(one, _mm512_mul_ps(*x, reciprocal));
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

/// The codes of magnitudes by random words, which are rotated until the bits that count are the lowest ones; with the signs of values, if
/// there are any. The code of NaN is arbitrary.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn at_random(
    magnitudes: Block,
    signs: Option<Block>,
    random: [__m512i; VECTORS],
    rotated: u32,
) -> __m512i {
    let rotated = _mm512_set1_epi32(rotated as i32);
    let normal = _mm512_set1_ps(NORMAL);
    let less = _mm512_set1_epi32(BELOW.wrapping_sub(NORMAL.to_bits()) as i32);
    // Above the bits that count, what makes fixed-point numbers of the bits of floats.
    const { assert!(BELOW.is_multiple_of(1 << RANDOM_BITS)) }
    let above = _mm512_set1_epi32(BELOW.wrapping_neg() as i32);
    let counted = _mm512_set1_epi32((1 << RANDOM_BITS) - 1);
    let mut found = random;
    for v in 0..VECTORS {
        let y = magnitudes[v];
        // The fixed-point number is the larger one of both: from NORMAL on, the sum's bits grow more slowly than those of y.
        let small = _mm512_add_epi32(_mm512_castps_si512(_mm512_add_ps(y, normal)), less);
        let units = _mm512_max_epi32(_mm512_castps_si512(y), small);
        let random = _mm512_rolv_epi32(found[v], rotated);
        let random = _mm512_ternarylogic_epi32::<0xE4>(random, above, counted);
        let code = _mm512_srli_epi32::<RANDOM_BITS>(_mm512_add_epi32(units, random));
        found[v] = match signs {
            None => code,
            Some(values) => {
                let signs = _mm512_srli_epi32::<24>(_mm512_castps_si512(values[v]));
                // Seven bits from the magnitude, the others from the sign, which has only the one bit.
                _mm512_ternarylogic_epi32::<0xE4>(code, signs, _mm512_set1_epi32(0x7F))
            }
        };
    }
    pack(found)
}

/// The values of blocks, and of a last one with fewer elements.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn decode_blocks(codes: &[u8], amaxes: &[f32], curves: &[u8], values: &mut [f32]) {
    let (whole, rest) = codes.as_chunks();
    let (values, last) = values.as_chunks_mut();
    for (block, (codes, values)) in whole.iter().zip(values).enumerate() {
        decode_block(codes, amaxes[block], curves[block], values);
    }
    if !rest.is_empty() {
        let block = whole.len();
        let (mut padded, mut all) = ([0; EXPANDED_BLOCK], [0.; EXPANDED_BLOCK]);
        padded[..rest.len()].copy_from_slice(rest);
        decode_block(&padded, amaxes[block], curves[block], &mut all);
        last.copy_from_slice(&all[..rest.len()]);
    }
}

/// 64 codes at a time: four lookups give the bytes of their shares.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn decode_block(
    codes: &[u8; EXPANDED_BLOCK],
    amax: f32,
    curve: u8,
    values: &mut [f32; EXPANDED_BLOCK],
) {
    // Bytes are interleaved within lanes of 128 bits: in this order the results come out in theirs.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let sign = _mm512_set1_epi8(i8::MIN);
    let tables = &Curve::of(curve).shares().bytes;
    let amax = _mm512_set1_ps(amax);
    for half in 0..2 {
        let codes = load_bytes(&codes[half * HALF..][..HALF]);
        let codes = _mm512_permutexvar_epi32(order, codes);
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
            let values = &mut values[half * HALF + v * LANES..][..LANES];
            store(values, 0, _mm512_mul_ps(amax, shares));
        }
    }
}
