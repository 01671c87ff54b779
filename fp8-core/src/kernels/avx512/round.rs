//! From f32 products to the codes of a block: nearest-even and stochastic rounding.

use std::arch::x86_64::*;

use super::{Block, VECTORS, words};
use crate::{
    Format,
    cast::{Cast, Overflow, Rounding},
};

/// What the rounding of a cast needs, the same for nearest-even and stochastic.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wide {
    format: Format,
    /// The magnitude at which products are clamped: anything larger has the same code.
    cap: f32,
}

impl Wide {
    /// The constants of `cast`, if this module can do it.
    pub(crate) const fn new(cast: &Cast) -> Option<Self> {
        if cast.via_f16
            || !matches!(
                cast.rounding,
                Rounding::NearestEven | Rounding::Stochastic(_)
            )
        {
            return None;
        }
        let spec = cast.format.spec();
        let overflow_mag = match cast.overflow {
            Overflow::Saturate => spec.max_mag,
            // There NaN has the sign bit set, which this module keeps separate.
            Overflow::NonFinite if !spec.has_negative_zero => return None,
            Overflow::NonFinite => spec.inf_mag,
        };
        // Overflow gives the code of the largest finite value, or the one after it, which stands for the next value.
        let cap = (overflow_mag << (23 - spec.mantissa_bits)) + ((127 - spec.bias) << 23);
        let cap = f32::from_bits(cap);
        Some(Self {
            format: cast.format,
            cap,
        })
    }

    /// Whether products become E4M3, and at most its largest number.
    pub(super) fn saturates_to_e4m3(&self) -> bool {
        self.format == Format::E4M3 && self.cap == 448.
    }
}

/// Values to add to a magnitude, indexed by the low five bits of its biased exponent (at least that of the smallest
/// normal).
///
/// The last place of such a value is that of the code, so the sum is rounded there, and its low bits are the code: the low
/// bits of the value itself count the codes below the binade.
type Magic = [u32; 32];

const fn magic(format: Format) -> Magic {
    let spec = format.spec();
    let min_exponent = 128 - spec.bias;
    let mut magic = [0; 32];
    let mut binade = 0;
    while binade < 32 {
        let exponent = min_exponent + binade;
        let codes_below = binade << spec.mantissa_bits;
        magic[(exponent % 32) as usize] = (exponent + 23 - spec.mantissa_bits) << 23 | codes_below;
        binade += 1;
    }
    magic
}

const fn magic_of(format: Format) -> &'static Magic {
    const E4M3: Magic = magic(Format::E4M3);
    const E5M2: Magic = magic(Format::E5M2);
    const E4M3_FNUZ: Magic = magic(Format::E4M3Fnuz);
    const E5M2_FNUZ: Magic = magic(Format::E5M2Fnuz);
    match format {
        Format::E4M3 => &E4M3,
        Format::E5M2 => &E5M2,
        Format::E4M3Fnuz => &E4M3_FNUZ,
        Format::E5M2Fnuz => &E5M2_FNUZ,
    }
}

/// [`Wide`] as vectors.
#[derive(Clone, Copy)]
pub(super) struct Rounder {
    cap: __m512,
    min_normal: __m512,
    magic: [__m512; 2],
    /// For stochastic rounding: mantissa bits, and how many more f32 has.
    mantissa_bits: __m512i,
    shift: __m512i,
    min_exponent: __m512i,
    nan: __m512i,
    has_negative_zero: bool,
}

impl Rounder {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn new(wide: &Wide) -> Self {
        let spec = wide.format.spec();
        let (halves, _) = magic_of(wide.format).as_chunks();
        let splat = |word: u32| _mm512_set1_epi32(word as i32);
        Self {
            cap: _mm512_set1_ps(wide.cap),
            min_normal: _mm512_set1_ps(wide.format.min_normal()),
            magic: [
                _mm512_castsi512_ps(words(&halves[0])),
                _mm512_castsi512_ps(words(&halves[1])),
            ],
            mantissa_bits: splat(spec.mantissa_bits),
            shift: splat(23 - spec.mantissa_bits),
            min_exponent: splat(128 - spec.bias),
            nan: _mm512_set1_epi8(spec.nan_mag as i8),
            has_negative_zero: spec.has_negative_zero,
        }
    }

    /// The codes of products, rounded by `random` if it is given. The code of NaN is arbitrary.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn codes<const STOCHASTIC: bool>(
        &self,
        products: Block,
        random: [__m512i; VECTORS],
    ) -> __m512i {
        let mut signed = [_mm512_setzero_si512(); VECTORS];
        for v in 0..VECTORS {
            let magnitudes = if STOCHASTIC {
                self.stochastic(products[v], random[v])
            } else {
                self.nearest(products[v])
            };
            let signs = _mm512_srli_epi32::<24>(_mm512_castps_si512(products[v]));
            // Seven bits from the magnitude, the others from the sign, which has only the one bit.
            signed[v] =
                _mm512_ternarylogic_epi32::<0xE4>(magnitudes, signs, _mm512_set1_epi32(0x7F));
        }
        let codes = pack(signed);
        if self.has_negative_zero {
            return codes;
        }
        let negative_zero = _mm512_set1_epi8(0x80u8 as i8);
        _mm512_maskz_mov_epi8(_mm512_cmpneq_epi8_mask(codes, negative_zero), codes)
    }

    /// The magnitudes nearest to those of the products, in the low seven bits.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn nearest(&self, product: __m512) -> __m512i {
        let magnitude = _mm512_range_ps::<MIN_MAGNITUDE>(product, self.cap);
        let exponent_at_least = _mm512_max_ps(magnitude, self.min_normal);
        let exponent = _mm512_srli_epi32::<23>(_mm512_castps_si512(exponent_at_least));
        let magic = _mm512_permutex2var_ps(self.magic[0], exponent, self.magic[1]);
        _mm512_castps_si512(_mm512_add_ps(magnitude, magic))
    }

    /// The magnitudes just below those of the products, or one more, in the low seven bits.
    ///
    /// As `Rounder::code` of `cast.rs`, except that a subnormal f32 has a leading one here: it is far too small to be
    /// rounded up.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn stochastic(&self, product: __m512, random: __m512i) -> __m512i {
        let magnitude = _mm512_castps_si512(_mm512_range_ps::<MIN_MAGNITUDE>(product, self.cap));
        let exponent = _mm512_srli_epi32::<23>(magnitude);
        let binade = _mm512_max_epu32(exponent, self.min_exponent);
        let shift = _mm512_add_epi32(_mm512_sub_epi32(binade, exponent), self.shift);
        let significand = _mm512_ternarylogic_epi32::<0xEA>(
            magnitude,
            _mm512_set1_epi32(0x007F_FFFF),
            _mm512_set1_epi32(0x0080_0000),
        );
        // Either one of the two shift counts is out of range and gives 0, or both are 0 and give the same.
        let word = _mm512_set1_epi32(32);
        let threshold = _mm512_or_si512(
            _mm512_sllv_epi32(significand, _mm512_sub_epi32(word, shift)),
            _mm512_srlv_epi32(significand, _mm512_sub_epi32(shift, word)),
        );
        let floor = _mm512_srlv_epi32(significand, shift);
        let codes_below = _mm512_sllv_epi32(
            _mm512_sub_epi32(binade, self.min_exponent),
            self.mantissa_bits,
        );
        let code = _mm512_add_epi32(codes_below, floor);
        let away = _mm512_cmplt_epu32_mask(random, threshold);
        _mm512_mask_add_epi32(code, away, code, _mm512_set1_epi32(1))
    }

    /// `codes` with those of NaN products corrected; `signs` has their signs.
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn with_nan(&self, codes: __m512i, products: Block, signs: u64) -> __m512i {
        let nan = lane_mask(products.map(|product| _mm512_cmpunord_ps_mask(product, product)));
        let codes = _mm512_mask_mov_epi8(codes, nan, self.nan);
        let sign = _mm512_set1_epi8(0x80u8 as i8);
        _mm512_mask_blend_epi8(nan & signs, codes, _mm512_or_si512(codes, sign))
    }
}

/// For `_mm512_range_ps`: the smaller magnitude, without its sign. NaN loses to the other operand.
const MIN_MAGNITUDE: i32 = 0b1010;

/// Whether a product is NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn any_nan([a, b, c, d]: Block) -> bool {
    _mm512_cmpunord_ps_mask(a, b) | _mm512_cmpunord_ps_mask(c, d) != 0
}

/// The masks of four vectors as one for the block.
fn lane_mask(masks: [u16; VECTORS]) -> u64 {
    masks
        .into_iter()
        .rev()
        .fold(0, |all, mask| all << 16 | u64::from(mask))
}

/// The low bytes of words whose other bytes are 0, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn pack([a, b, c, d]: [__m512i; VECTORS]) -> __m512i {
    // Packing works within lanes of 128 bits: each gets four bytes of every vector.
    let lanes = _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, lanes)
}
