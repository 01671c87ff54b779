//! From codes to values.
//!
//! f16 has the exponents of all formats but `E5M2Fnuz`: the bits of a code, moved to where f16 has them, are its value
//! times a power of two, subnormals included, and one instruction turns f16 into f32. This does not hold for NaN codes;
//! blocks that contain one are decoded element by element.
//!
//! A long segment has one scale, so there are only 256 results; see `table.rs` for 16-bit ones.

use std::arch::x86_64::*;

use super::{
    BLOCK, Block, VECTORS, exact, load_block, load_bytes, round::any_nan, scales::VectorScales,
    store_block, table, to_words,
};
use crate::{
    Format, HighPrecision,
    high_precision::sealed::{Kind, Sealed},
    kernels::{Isa, Layout, widening::Widening},
};

/// How the codes of a format become f16, and which ones do not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wide {
    /// The distance between the last bits of the two formats.
    shift: u16,
    /// The bits of the f16 that a code sets.
    keep: u16,
    /// The factor for the resulting f16.
    factor: f32,
    /// A code that does not become an f16: above `special_above` after `special_flip` and `special_keep`.
    special_flip: u8,
    special_keep: u8,
    special_above: u8,
    has_f16: bool,
    has_negative_zero: bool,
    is_e4m3: bool,
}

impl Wide {
    pub(crate) const fn new(format: Format) -> Self {
        let spec = format.spec();
        let ocp = spec.has_negative_zero;
        Self {
            shift: 10 - spec.mantissa_bits as u16,
            keep: 0x8000 | 0x7F << (10 - spec.mantissa_bits),
            // The difference of the biases.
            factor: f32::from_bits((127 + 15 - spec.bias) << 23),
            // NaN and the codes after it, or only 0x80, which becomes 0xFF.
            special_flip: if ocp { 0 } else { 0x7F },
            special_keep: if ocp { 0x7F } else { 0xFF },
            special_above: match format {
                Format::E4M3 => 0x7E,
                Format::E5M2 => 0x7C,
                Format::E4M3Fnuz | Format::E5M2Fnuz => 0xFE,
            },
            has_f16: !matches!(format, Format::E5M2Fnuz),
            has_negative_zero: ocp,
            is_e4m3: matches!(format, Format::E4M3),
        }
    }
}

/// Decodes codes with their scales, long segments with tables if `vbmi`. Returns `false` and does nothing if this module has no
/// code for the case.
pub(crate) fn run<T: HighPrecision>(
    isa: Isa,
    vbmi: bool,
    (widening, wide): (Widening, &Wide),
    codes: &[u8],
    layout: Layout,
    dequant_scales: &[f32],
    dst: &mut [T],
) -> bool {
    assert!(super::is_in(isa) && (!vbmi || isa.has_vbmi()));
    let words = matches!(<T as Sealed>::KIND, Kind::Bf16 | Kind::F16);
    // A scale of 0, infinity or NaN would give NaN a sign that no table has.
    let regular = |scale: &f32| *scale != 0.0 && scale.is_finite();
    if let Layout::Segments(len) = layout
        && vbmi
        && words
        && len >= table::MIN_LEN
        && dequant_scales.iter().all(regular)
    {
        let has_negative_zero = wide.has_negative_zero;
        // SAFETY: an `Isa` of this level with VBMI exists only where all these features were found.
        unsafe { table::segments(widening, has_negative_zero, codes, len, dequant_scales, dst) };
        return true;
    }
    if let Layout::Segments(len) = layout
        && vbmi
        && T::KIND == Kind::Bf16
        && wide.is_e4m3
        && len >= BLOCK
        && exact::decodes(dequant_scales)
    {
        // SAFETY: an `Isa` of this level with VBMI exists only where all these features were found.
        unsafe {
            exact::decode(codes, len, dequant_scales, dst, |codes, scale, dst| {
                segments_of(widening, wide, codes, codes.len(), &[scale], dst);
            });
        }
        return true;
    }
    if wide.has_f16 {
        // SAFETY: an `Isa` of this level exists only where these four features were found.
        unsafe {
            match layout {
                Layout::Segments(len) => {
                    segments_of(widening, wide, codes, len, dequant_scales, dst);
                }
                Layout::PerElement => columns_of(widening, wide, codes, dequant_scales, dst),
            }
        }
    }
    wide.has_f16
}

/// [`Wide`] as vectors.
struct Bits {
    shift: __m512i,
    keep: __m512i,
    special_flip: __m512i,
    special_keep: __m512i,
    special_above: __m512i,
}

impl Bits {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn new(wide: &Wide) -> Self {
        let splat = |byte: u8| _mm512_set1_epi8(byte as i8);
        Self {
            shift: _mm512_set1_epi16(wide.shift as i16),
            keep: _mm512_set1_epi16(wide.keep as i16),
            special_flip: splat(wide.special_flip),
            special_keep: splat(wide.special_keep),
            special_above: splat(wide.special_above),
        }
    }

    /// The f16 of codes, as f32, and whether some differ from the values of their codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn values(&self, codes: __m512i) -> (Block, bool) {
        // (code ^ flip) & keep.
        let key = _mm512_ternarylogic_epi32::<0x28>(codes, self.special_flip, self.special_keep);
        let special = _mm512_cmpgt_epu8_mask(key, self.special_above);
        let halves = [
            _mm512_castsi512_si256(codes),
            _mm512_extracti64x4_epi64::<1>(codes),
        ];
        let [[a, b], [c, d]] = halves.map(|codes| {
            // Every bit above the code holds the sign, so the sign bit of f16 does too.
            let bits = _mm512_sllv_epi16(_mm512_cvtepi8_epi16(codes), self.shift);
            let bits = _mm512_and_si512(bits, self.keep);
            [
                _mm512_cvtph_ps(_mm512_castsi512_si256(bits)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(bits)),
            ]
        });
        ([a, b, c, d], special != 0)
    }
}

/// Decodes up to a block under one scale; `scaled` is that scale times the factor of the format.
///
/// Each caller passes another `CALLER`: a function of this length is only sure to be inlined if it has one caller.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode<T: HighPrecision, const CALLER: u8>(
    (widening, bits): (Widening, &Bits),
    codes: &[u8],
    dequant_scale: f32,
    scaled: __m512,
    dst: &mut [T],
) {
    let (values, special) = bits.values(load_bytes(codes));
    if special {
        one_by_one(widening, codes, dequant_scale, dst);
    } else {
        store_block(dst, values.map(|value| _mm512_mul_ps(value, scaled)));
    }
}

/// Decodes up to a block of elements, each with its own scale.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_each<T: HighPrecision, const CALLER: u8>(
    (widening, bits): (Widening, &Bits),
    codes: &[u8],
    scales: &Block,
    factor: __m512,
    dst: &mut [T],
) {
    let (mut values, special) = bits.values(load_bytes(codes));
    for v in 0..VECTORS {
        values[v] = _mm512_mul_ps(_mm512_mul_ps(values[v], factor), scales[v]);
    }
    // Each type has its own bits for NaN.
    if special || any_nan(values) {
        let scales = scales.map(|scales| to_words(_mm512_castps_si512(scales)));
        for ((&code, dst), &scale) in codes.iter().zip(dst).zip(scales.as_flattened()) {
            *dst = widening.scaled(code, f32::from_bits(scale));
        }
    } else {
        store_block(dst, values);
    }
}

/// The scalar definition, in a loop.
#[cold]
#[inline(never)]
fn one_by_one<T: HighPrecision>(widening: Widening, codes: &[u8], scale: f32, dst: &mut [T]) {
    for (&code, dst) in codes.iter().zip(dst) {
        *dst = widening.scaled(code, scale);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn segments_of<T: HighPrecision>(
    widening: Widening,
    wide: &Wide,
    codes: &[u8],
    len: usize,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    let bits = Bits::new(wide);
    if VectorScales::are_for(len) {
        let factor = _mm512_set1_ps(wide.factor);
        let mut scales = VectorScales::new(dequant_scales, len);
        let (code_blocks, code_rest) = codes.as_chunks::<BLOCK>();
        let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
        for (codes, dst) in code_blocks.iter().zip(dst_blocks) {
            decode_each::<T, 2>((widening, &bits), codes, &scales.next(), factor, dst);
        }
        if !code_rest.is_empty() {
            decode_each::<T, 1>(
                (widening, &bits),
                code_rest,
                &scales.next(),
                factor,
                dst_rest,
            );
        }
        return;
    }
    for ((codes, dst), &dequant_scale) in codes
        .chunks(len)
        .zip(dst.chunks_mut(len))
        .zip(dequant_scales)
    {
        // A power of two: exact unless it overflows. 0 times infinity would give NaN.
        let scaled = dequant_scale * wide.factor;
        if !scaled.is_finite() || dequant_scale == 0.0 {
            one_by_one(widening, codes, dequant_scale, dst);
            continue;
        }
        let scales = _mm512_set1_ps(scaled);
        let (code_blocks, code_rest) = codes.as_chunks::<BLOCK>();
        let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
        for (codes, dst) in code_blocks.iter().zip(dst_blocks) {
            decode::<T, 0>((widening, &bits), codes, dequant_scale, scales, dst);
        }
        if !code_rest.is_empty() {
            decode::<T, 1>(
                (widening, &bits),
                code_rest,
                dequant_scale,
                scales,
                dst_rest,
            );
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn columns_of<T: HighPrecision>(
    widening: Widening,
    wide: &Wide,
    codes: &[u8],
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    let (bits, factor) = (Bits::new(wide), _mm512_set1_ps(wide.factor));
    let (code_blocks, code_rest) = codes.as_chunks::<BLOCK>();
    let (scale_blocks, scale_rest) = dequant_scales.as_chunks::<BLOCK>();
    let (dst_blocks, dst_rest) = dst.as_chunks_mut::<BLOCK>();
    for ((codes, scales), dst) in code_blocks.iter().zip(scale_blocks).zip(dst_blocks) {
        decode_each::<T, 0>((widening, &bits), codes, &load_block(scales), factor, dst);
    }
    if !code_rest.is_empty() {
        decode_each::<T, 1>(
            (widening, &bits),
            code_rest,
            &load_block(scale_rest),
            factor,
            dst_rest,
        );
    }
}
