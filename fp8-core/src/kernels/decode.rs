//! Codes to values.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::{Isa, LANES, dispatch};
use crate::{Format, HighPrecision};

/// The decoding of one format, as the constants of one branch-free body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoder {
    /// Mantissa bits that f32 has more.
    shift: u32,
    /// The difference of the exponent biases, at the place of f32's exponent.
    rebias: u32,
    /// The smallest normal code, and its value.
    min_normal_mag: u32,
    min_normal: f32,
    max_mag: u32,
    inf_mag: u32,
    /// The code of an only NaN, beyond all codes where there are more.
    only_nan: u32,
    /// The same for the code of AVX-512.
    #[cfg(target_arch = "x86_64")]
    wide: avx512::decode::Wide,
}

impl Decoder {
    pub(crate) const fn new(format: Format) -> Self {
        let spec = format.spec();
        Self {
            shift: 23 - spec.mantissa_bits,
            rebias: (127 - spec.bias) << 23,
            min_normal_mag: 1 << spec.mantissa_bits,
            min_normal: format.min_normal(),
            max_mag: spec.max_mag,
            inf_mag: if format.has_infinity() {
                spec.inf_mag
            } else {
                0x100
            },
            only_nan: if spec.has_negative_zero { 0x100 } else { 0x80 },
            #[cfg(target_arch = "x86_64")]
            wide: avx512::decode::Wide::new(format),
        }
    }

    #[inline(always)]
    fn value(self, code: u8) -> f32 {
        let code = u32::from(code);
        let mag = code & 0x7F;
        let normal = mag.wrapping_shl(self.shift).wrapping_add(self.rebias);
        // A subnormal read with a leading one at the exponent of the smallest normal, which is then taken off: f32
        // subnormals on the way would be slow.
        let subnormal = (f32::from_bits(normal.wrapping_add(1 << 23)) - self.min_normal).to_bits();
        let bits = if mag < self.min_normal_mag {
            subnormal
        } else {
            normal
        };
        let special = if mag == self.inf_mag {
            0x7F80_0000
        } else {
            0x7FC0_0000
        };
        let bits = if mag > self.max_mag { special } else { bits };
        let signed = bits | (code & 0x80) << 24;
        f32::from_bits(if code == self.only_nan {
            0x7FC0_0000
        } else {
            signed
        })
    }

    #[inline(always)]
    pub(super) fn scaled<T: HighPrecision>(self, code: u8, dequant_scale: f32) -> T {
        T::from_f32(self.value(code) * dequant_scale)
    }
}

/// Decodes segments of `len` codes, each with its scale.
pub(crate) fn segments<T: HighPrecision>(
    isa: Isa,
    decoder: Decoder,
    codes: &[u8],
    len: usize,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    segments_with(
        isa,
        isa.has_vbmi(),
        decoder,
        codes,
        len,
        dequant_scales,
        dst,
    );
}

/// [`segments`], with VBMI or without.
pub(super) fn segments_with<T: HighPrecision>(
    isa: Isa,
    vbmi: bool,
    decoder: Decoder,
    codes: &[u8],
    len: usize,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) {
        let wide = (decoder, &decoder.wide);
        if avx512::decode::segments(isa, vbmi, wide, codes, len, dequant_scales, dst) {
            return;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = vbmi;
    narrow_segments(isa, decoder, codes, len, dequant_scales, dst);
}

/// Decodes codes that have a scale each.
pub(crate) fn columns<T: HighPrecision>(
    isa: Isa,
    decoder: Decoder,
    codes: &[u8],
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) && decoder.wide.has_columns() {
        return avx512::decode::columns(isa, (decoder, &decoder.wide), codes, dequant_scales, dst);
    }
    narrow_columns(isa, decoder, codes, dequant_scales, dst);
}

dispatch! {
    fn narrow_segments [T: HighPrecision] [T] (
        decoder: Decoder, codes: &[u8], len: usize, dequant_scales: &[f32], dst: &mut [T],
    ) = segments_body
}

dispatch! {
    fn narrow_columns [T: HighPrecision] [T] (
        decoder: Decoder, codes: &[u8], dequant_scales: &[f32], dst: &mut [T],
    ) = columns_body
}

#[inline(always)]
fn segments_body<T: HighPrecision>(
    decoder: Decoder,
    codes: &[u8],
    len: usize,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    for ((codes, dst), &dequant_scale) in codes
        .chunks(len)
        .zip(dst.chunks_mut(len))
        .zip(dequant_scales)
    {
        let (code_chunks, code_rest) = codes.as_chunks::<LANES>();
        let (dst_chunks, dst_rest) = dst.as_chunks_mut::<LANES>();
        for (codes, dst) in code_chunks.iter().zip(dst_chunks) {
            for i in 0..LANES {
                dst[i] = decoder.scaled(codes[i], dequant_scale);
            }
        }
        if !code_rest.is_empty() {
            let (mut padded, mut values) = ([0; LANES], [T::default(); LANES]);
            padded[..code_rest.len()].copy_from_slice(code_rest);
            for i in 0..LANES {
                values[i] = decoder.scaled(padded[i], dequant_scale);
            }
            dst_rest.copy_from_slice(&values[..dst_rest.len()]);
        }
    }
}

#[inline(always)]
fn columns_body<T: HighPrecision>(
    decoder: Decoder,
    codes: &[u8],
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    for ((&code, dst), &dequant_scale) in codes.iter().zip(dst).zip(dequant_scales) {
        *dst = decoder.scaled(code, dequant_scale);
    }
}
