//! Nearest-even casts, as four vectors of f32. Blocks with NaN are left to the
//! portable code.

use std::arch::x86_64::*;

use crate::{
    HighPrecision,
    high_precision::sealed::{Kind, Sealed},
    kernels::{LANES, narrowing::Narrowing},
};

const VECTORS: usize = LANES / 8;

/// A block in f32, or its bits.
type Block<V> = [V; VECTORS];

/// A nearest-even cast as vectors.
#[derive(Clone, Copy)]
pub(in super::super) struct Encoder {
    shift: __m128i,
    /// `shift` as a difference of exponents.
    exponents: __m256i,
    min_normal: __m256i,
    cap: __m256i,
    /// All ones if zero has no sign.
    unsigned_zero: __m256i,
    /// The largest magnitude so far, as bits.
    max: __m256i,
}

impl Encoder {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in super::super) fn new(narrowing: Narrowing) -> Self {
        let Narrowing {
            shift,
            min_normal,
            cap,
            zero_sign,
            ..
        } = narrowing;
        let set = |word: u32| _mm256_set1_epi32(word as i32);
        Self {
            shift: _mm_cvtsi32_si128(shift as i32),
            exponents: set(shift << 23),
            min_normal: set(min_normal),
            cap: set(cap),
            unsigned_zero: set(!zero_sign),
            max: _mm256_setzero_si256(),
        }
    }

    /// Casts a block with scales that have no sign bit; its magnitudes are merged into the maximum where `AMAX`. Returns
    /// false, with nothing done, if a product is NaN.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in super::super) fn encode<T: HighPrecision, const AMAX: bool>(
        &mut self,
        src: &[T; LANES],
        quant_scales: Block<__m256>,
        dst: &mut [u8; LANES],
    ) -> bool {
        prefetch(src);
        let values = load(src);
        let (mut magnitudes, mut codes) = (values, values);
        let mut greatest = _mm256_setzero_si256();
        for v in 0..VECTORS {
            magnitudes[v] = _mm256_and_si256(values[v], _mm256_set1_epi32(0x7FFF_FFFF));
            let product = _mm256_mul_ps(_mm256_castsi256_ps(magnitudes[v]), quant_scales[v]);
            let product = _mm256_castps_si256(product);
            greatest = _mm256_max_epu32(greatest, product);
            codes[v] = self.round(product);
        }
        let nan = _mm256_cmpgt_epi32(greatest, _mm256_set1_epi32(0x7F80_0000));
        // A NaN of the processor's own has a sign.
        if _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(nan, greatest))) != 0 {
            return false;
        }
        if AMAX {
            for magnitudes in magnitudes {
                self.max = _mm256_max_epu32(self.max, magnitudes);
            }
        }
        let codes = _mm256_packus_epi16(
            _mm256_packus_epi32(codes[0], codes[1]),
            _mm256_packus_epi32(codes[2], codes[3]),
        );
        // Saturation keeps signs.
        let signs = _mm256_packs_epi16(
            _mm256_packs_epi32(values[0], values[1]),
            _mm256_packs_epi32(values[2], values[3]),
        );
        let zero = _mm256_cmpeq_epi8(codes, _mm256_setzero_si256());
        let unsigned = _mm256_and_si256(zero, self.unsigned_zero);
        let signs = _mm256_andnot_si256(unsigned, signs);
        let signs = _mm256_and_si256(signs, _mm256_set1_epi8(0x80u8 as i8));
        // Packing works within lanes of 128 bits.
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let codes = _mm256_permutevar8x32_epi32(_mm256_or_si256(codes, signs), order);
        // SAFETY: 32 bytes.
        unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), codes) };
        true
    }

    /// [`Narrowing::round`] of magnitudes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn round(&self, magnitudes: __m256i) -> __m256i {
        let capped = _mm256_min_epu32(magnitudes, self.cap);
        let exponent = _mm256_set1_epi32(0x7F80_0000);
        let binade = _mm256_and_si256(_mm256_max_epu32(capped, self.min_normal), exponent);
        let magic = _mm256_add_epi32(binade, self.exponents);
        let sum = _mm256_add_ps(_mm256_castsi256_ps(capped), _mm256_castsi256_ps(magic));
        let below = _mm256_srl_epi32(_mm256_sub_epi32(binade, self.min_normal), self.shift);
        let within = _mm256_sub_epi32(_mm256_castps_si256(sum), magic);
        _mm256_add_epi32(within, below)
    }

    /// The bits of the largest magnitude.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in super::super) fn max_bits(&self) -> u32 {
        let mut words = [0u32; 8];
        // SAFETY: eight words.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), self.max) };
        words.into_iter().max().unwrap_or_default()
    }
}

/// One scale for a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) fn splat(quant_scale: f32) -> Block<__m256> {
    [_mm256_set1_ps(quant_scale); VECTORS]
}

/// A scale for each element; None if one has a sign bit.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) fn unsigned(quant_scales: &[f32; LANES]) -> Option<Block<__m256>> {
    let bits = load(quant_scales);
    let signs = _mm256_or_si256(
        _mm256_or_si256(bits[0], bits[1]),
        _mm256_or_si256(bits[2], bits[3]),
    );
    if _mm256_movemask_ps(_mm256_castsi256_ps(signs)) != 0 {
        return None;
    }
    let [a, b, c, d] = bits;
    Some([
        _mm256_castsi256_ps(a),
        _mm256_castsi256_ps(b),
        _mm256_castsi256_ps(c),
        _mm256_castsi256_ps(d),
    ])
}

/// Prefetches what lies 2 KiB after a block, which need not be memory: the processor's own prefetch stops at each page.
#[inline(always)]
fn prefetch<T>(src: &[T; LANES]) {
    const AHEAD: usize = 2048;
    for line in (0..size_of_val(src)).step_by(64) {
        let at = src.as_ptr().cast::<i8>().wrapping_add(AHEAD + line);
        // SAFETY: every x86-64 processor has the instruction, which reads nothing and cannot fail.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at) };
    }
}

/// The bits of 32 elements in f32; the type is not f64.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load<T: HighPrecision>(src: &[T; LANES]) -> Block<__m256i> {
    let mut block = [_mm256_setzero_si256(); VECTORS];
    for (v, bits) in block.iter_mut().enumerate() {
        let from = src[v * 8..].as_ptr();
        // SAFETY: `KIND` names the type itself; from here on there are eight elements or more.
        *bits = unsafe {
            match <T as Sealed>::KIND {
                Kind::F32 => _mm256_loadu_si256(from.cast()),
                Kind::Bf16 => {
                    let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_slli_epi32::<16>(words)
                }
                Kind::F16 => _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))),
                Kind::F64 => unreachable!("an f64 is cast by the portable code"),
            }
        };
    }
    block
}
