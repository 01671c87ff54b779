//! From codes to values.

#[cfg(target_arch = "aarch64")]
use super::neon::{self, decode::Shift};
use super::{Isa, LANES, Layout, dispatch, widening::Widening};
#[cfg(target_arch = "x86_64")]
use super::{
    avx2,
    avx512::{self, decode::Wide},
};
#[cfg(target_arch = "x86_64")]
use crate::high_precision::sealed::Kind;
use crate::{Format, high_precision::HighPrecision};

/// The decoding of one format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoder {
    widening: Widening,
    #[cfg(target_arch = "x86_64")]
    format: Format,
    /// The same for the AVX-512 code.
    #[cfg(target_arch = "x86_64")]
    wide: Wide,
    /// The same for the NEON code.
    #[cfg(target_arch = "aarch64")]
    shift: Shift,
}

impl Decoder {
    pub(crate) const fn new(format: Format) -> Self {
        Self {
            widening: Widening::new(format),
            #[cfg(target_arch = "x86_64")]
            format,
            #[cfg(target_arch = "x86_64")]
            wide: Wide::new(format),
            #[cfg(target_arch = "aarch64")]
            shift: Shift::new(format),
        }
    }
}

/// Decodes codes with their scales.
pub(crate) fn decode<T: HighPrecision>(
    isa: Isa,
    decoder: Decoder,
    codes: &[u8],
    layout: Layout,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    let vbmi = isa.has_vbmi();
    decode_with(isa, vbmi, decoder, codes, layout, dequant_scales, dst);
}

/// [`decode`], with or without VBMI.
pub(super) fn decode_with<T: HighPrecision>(
    isa: Isa,
    vbmi: bool,
    decoder: Decoder,
    codes: &[u8],
    layout: Layout,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) {
        let wide = (decoder.widening, &decoder.wide);
        if avx512::decode::run(isa, vbmi, wide, codes, layout, dequant_scales, dst) {
            return;
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let (true, Layout::Segments(len), Some(e5m2)) = (
        avx2::is_in(isa),
        layout,
        avx2::decode::handles(decoder.format),
    ) {
        let narrow = match e5m2 {
            true => narrow_avx2::<T, true>,
            false => narrow_avx2::<T, false>,
        };
        // SAFETY: an `Isa` of this level exists only where avx2, fma and f16c were found.
        unsafe { narrow(decoder.widening, codes, len, dequant_scales, dst) };
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = vbmi;
    #[cfg(target_arch = "aarch64")]
    if neon::is_in(isa) {
        let decoding = (decoder.widening, decoder.shift);
        return neon::decode::run(isa, decoding, codes, layout, dequant_scales, dst);
    }
    narrow(isa, decoder.widening, codes, layout, dequant_scales, dst);
}

/// [`narrow`] of segments in blocks of vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn narrow_avx2<T: HighPrecision, const E5M2: bool>(
    widening: Widening,
    codes: &[u8],
    len: usize,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    let segments = codes.chunks(len).zip(dst.chunks_mut(len));
    for ((codes, dst), &dequant_scale) in segments.zip(dequant_scales) {
        let (code_blocks, code_rest) = codes.as_chunks::<LANES>();
        let (dst_blocks, dst_rest) = dst.as_chunks_mut::<LANES>();
        for (codes, dst) in code_blocks.iter().zip(dst_blocks) {
            if T::KIND == Kind::F32 {
                // SAFETY: the kind says that T is f32.
                let dst = unsafe { &mut *std::ptr::from_mut(dst).cast::<[f32; LANES]>() };
                avx2::decode::block::<E5M2>(codes, dequant_scale, dst);
                continue;
            }
            let mut values = [0.; LANES];
            avx2::decode::block::<E5M2>(codes, dequant_scale, &mut values);
            for (dst, value) in dst.iter_mut().zip(values) {
                *dst = T::from_f32(value);
            }
        }
        for (dst, &code) in dst_rest.iter_mut().zip(code_rest) {
            *dst = widening.scaled(code, dequant_scale);
        }
    }
}

dispatch! {
    fn narrow [T: HighPrecision] [T] (
        widening: Widening, codes: &[u8], layout: Layout, dequant_scales: &[f32], dst: &mut [T],
    ) {
        match layout {
            Layout::Segments(len) => segments(widening, codes, len, dequant_scales, dst),
            Layout::PerElement => {
                for ((&code, dst), &dequant_scale) in codes.iter().zip(dst).zip(dequant_scales) {
                    *dst = widening.scaled(code, dequant_scale);
                }
            }
        }
    }
}

#[inline(always)]
fn segments<T: HighPrecision>(
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
