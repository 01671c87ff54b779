//! From codes to values.

#[cfg(target_arch = "x86_64")]
use super::avx512::{self, decode::Wide};
use super::{Isa, LANES, dispatch, widening::Widening};
use crate::{Format, high_precision::HighPrecision};

/// The decoding of one format over slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoder {
    widening: Widening,
    /// The same for the AVX-512 code.
    #[cfg(target_arch = "x86_64")]
    wide: Wide,
}

impl Decoder {
    pub(crate) const fn new(format: Format) -> Self {
        Self {
            widening: Widening::new(format),
            #[cfg(target_arch = "x86_64")]
            wide: Wide::new(format),
        }
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

/// [`segments`], with or without VBMI.
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
        let wide = (decoder.widening, &decoder.wide);
        if avx512::decode::segments(isa, vbmi, wide, codes, len, dequant_scales, dst) {
            return;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = vbmi;
    narrow_segments(isa, decoder.widening, codes, len, dequant_scales, dst);
}

/// Decodes codes with a scale of their own each.
pub(crate) fn columns<T: HighPrecision>(
    isa: Isa,
    decoder: Decoder,
    codes: &[u8],
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) && decoder.wide.has_columns() {
        return avx512::decode::columns(
            isa,
            (decoder.widening, &decoder.wide),
            codes,
            dequant_scales,
            dst,
        );
    }
    narrow_columns(isa, decoder.widening, codes, dequant_scales, dst);
}

dispatch! {
    fn narrow_segments [T: HighPrecision] [T] (
        widening: Widening, codes: &[u8], len: usize, dequant_scales: &[f32], dst: &mut [T],
    ) = segments_body
}

dispatch! {
    fn narrow_columns [T: HighPrecision] [T] (
        widening: Widening, codes: &[u8], dequant_scales: &[f32], dst: &mut [T],
    ) = columns_body
}

#[inline(always)]
fn segments_body<T: HighPrecision>(
    widening: Widening,
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
                dst[i] = widening.scaled(codes[i], dequant_scale);
            }
        }
        if !code_rest.is_empty() {
            let (mut padded, mut values) = ([0; LANES], [T::default(); LANES]);
            padded[..code_rest.len()].copy_from_slice(code_rest);
            for i in 0..LANES {
                values[i] = widening.scaled(padded[i], dequant_scale);
            }
            dst_rest.copy_from_slice(&values[..dst_rest.len()]);
        }
    }
}

#[inline(always)]
fn columns_body<T: HighPrecision>(
    widening: Widening,
    codes: &[u8],
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    for ((&code, dst), &dequant_scale) in codes.iter().zip(dst).zip(dequant_scales) {
        *dst = widening.scaled(code, dequant_scale);
    }
}
