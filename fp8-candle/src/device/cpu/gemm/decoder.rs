//! 64 codes at a time into bf16 values, with AVX-512 VBMI. Every FP8 value is exact in bf16.

use super::layout::PANEL;
use fp8_core::Format;
use std::arch::x86_64::*;

/// How to turn 64 codes into bf16 values at once.
///
/// For normal OCP values, both bytes are affine functions of the bits of the code, carries included: adding the difference
/// of the biases to an exponent flips some bits together with its highest one. If one of the 64 codes is zero, subnormal,
/// infinite or NaN, and for the fnuz formats, the bytes are looked up.
#[derive(Clone, Copy)]
pub(super) struct Decoder {
    /// Bit matrices, and the bits to flip in the high byte.
    affine: [i64; 2],
    flip: i8,
    /// Normal magnitudes: the first, and their number.
    normals: [i8; 2],
    low: [__m512i; 2],
    high: [__m512i; 2],
    /// Whether code 0x80 is NaN instead of -0.
    fnuz: bool,
}

/// Low and high bytes of the bf16 values of the positive codes of each format.
static BYTES: [[[u8; 128]; 2]; Format::ALL.len()] = {
    let mut bytes = [[[0; 128]; 2]; Format::ALL.len()];
    let mut index = 0;
    while index < Format::ALL.len() {
        let format = Format::ALL[index];
        let mut code = 0;
        while code < 128 {
            let [_, _, low, high] = format.decode(code as u8).to_le_bytes();
            bytes[format as usize][0][code] = low;
            bytes[format as usize][1][code] = high;
            code += 1;
        }
        index += 1;
    }
    bytes
};

impl Decoder {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    pub(super) fn new(format: Format) -> Self {
        let [low, high] = &BYTES[format as usize];
        let halves = |table: &'static [u8; 128]| [load(&table[..64]), load(&table[64..])];
        // The bits of the code that make up each bit of the result, from the highest.
        let (affine, flip, normals) = match format {
            Format::E4M3 => (
                [
                    [0x08, 0x04, 0x02, 0x01, 0, 0, 0, 0],
                    [0x80, 0x40, 0x40, 0x40, 0x40, 0x40, 0x20, 0x10],
                ],
                0x3C,
                [0x08, 0x77],
            ),
            Format::E5M2 => (
                [
                    [0x04, 0x02, 0x01, 0, 0, 0, 0, 0],
                    [0x80, 0x40, 0x40, 0x40, 0x40, 0x20, 0x10, 0x08],
                ],
                0x38,
                [0x04, 0x78],
            ),
            Format::E4M3Fnuz | Format::E5M2Fnuz => ([[0; 8]; 2], 0, [0, 0]),
        };
        Self {
            affine: affine.map(i64::from_le_bytes),
            flip,
            normals,
            low: halves(low),
            high: halves(high),
            fnuz: format.decode(0x80).is_nan(),
        }
    }

    /// The values of 64 codes: of the low halves of the four lanes, and of the high halves.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    pub(super) fn decode(&self, codes: __m512i) -> (__m512i, __m512i) {
        let ([low, high], _) = self.decode_checked(codes);
        (low, high)
    }

    /// [`Decoder::decode`] with `added` to the bits of the values; zero, infinity and NaN stay as they are.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    pub(super) fn decode_scaled(&self, codes: __m512i, added: [__m512i; 2]) -> (__m512i, __m512i) {
        let (values, normal) = self.decode_checked(codes);
        let [low, high] = if normal {
            [0, 1].map(|half| _mm512_add_epi16(values[half], added[half]))
        } else {
            let (one, infinity) = (_mm512_set1_epi16(1), _mm512_set1_epi16(0x7F80 - 1));
            [0, 1].map(|half| {
                let magnitude = _mm512_and_si512(values[half], _mm512_set1_epi16(0x7FFF));
                let below = _mm512_sub_epi16(magnitude, one);
                let finite = _mm512_cmplt_epu16_mask(below, infinity);
                _mm512_mask_add_epi16(values[half], finite, values[half], added[half])
            })
        };
        (low, high)
    }

    /// The values of 64 codes, and whether all are normal numbers; false says nothing for fnuz formats.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    fn decode_checked(&self, codes: __m512i) -> ([__m512i; 2], bool) {
        let magnitudes = _mm512_and_si512(codes, _mm512_set1_epi8(0x7F));
        let [first, count] = self.normals.map(|bound| _mm512_set1_epi8(bound));
        let special = _mm512_cmpge_epu8_mask(_mm512_sub_epi8(magnitudes, first), count);
        let (low, high) = if special == 0 {
            let [low, high] = self
                .affine
                .map(|matrix| _mm512_gf2p8affine_epi64_epi8::<0>(codes, _mm512_set1_epi64(matrix)));
            (low, _mm512_xor_si512(high, _mm512_set1_epi8(self.flip)))
        } else {
            self.look_up(codes)
        };
        (
            [
                _mm512_unpacklo_epi8(low, high),
                _mm512_unpackhi_epi8(low, high),
            ],
            special == 0,
        )
    }

    /// Low and high bytes of the values of arbitrary codes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
    fn look_up(&self, codes: __m512i) -> (__m512i, __m512i) {
        let sign = _mm512_set1_epi8(i8::MIN);
        let mut low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
        let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
        let mut high = _mm512_ternarylogic_epi32::<0xF8>(high, codes, sign);
        if self.fnuz {
            let nan = _mm512_cmpeq_epi8_mask(codes, sign);
            high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(0x7F));
            low = _mm512_mask_mov_epi8(low, nan, _mm512_set1_epi8(0xC0u8 as i8));
        }
        (low, high)
    }
}

/// What [`Decoder::decode_scaled`] adds to pairs of values, from what is added to the values of each column.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn added_to_pairs(columns: &[u16; PANEL]) -> [__m512i; 2] {
    [0, 16].map(|first| {
        // SAFETY: 16 of the 32 columns.
        let columns = unsafe { _mm256_loadu_si256(columns.as_ptr().add(first).cast()) };
        let wide = _mm512_cvtepu16_epi32(columns);
        _mm512_or_si512(wide, _mm512_slli_epi32::<16>(wide))
    })
}

/// Prefetches `ahead` bytes after `start`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn prefetch(start: *const u8, ahead: usize) {
    // A prefetch reads nothing and cannot fail, whatever the address.
    _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(ahead).cast());
}

/// Up to 64 bytes, zeros after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn load(bytes: &[u8]) -> __m512i {
    let mask = match bytes.len() {
        0 => 0,
        len => u64::MAX >> (64 - len.min(64)),
    };
    // SAFETY: only the bytes of the mask are read, which lie in the slice.
    unsafe { _mm512_maskz_loadu_epi8(mask, bytes.as_ptr().cast()) }
}
