//! Nearest-even casts: the hot path.

#[cfg(target_arch = "x86_64")]
use super::avx512::{self, round::Wide};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{
    Isa, LANES, Layout,
    amax::{LaneMax, lane_max, max_bits},
    dispatch,
    narrowing::Narrowing,
};
#[cfg(target_arch = "x86_64")]
use crate::high_precision::sealed::Kind;
use crate::{
    cast::{Cast, scaled_bits},
    high_precision::HighPrecision,
};

/// A nearest-even cast of slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nearest {
    narrowing: Narrowing,
    /// The same for the AVX-512 code, if it has this cast.
    #[cfg(target_arch = "x86_64")]
    wide: Option<Wide>,
}

impl Nearest {
    /// `cast`, if it is such a cast.
    pub(crate) fn new(cast: &Cast) -> Option<Self> {
        Some(Self {
            narrowing: Narrowing::new(cast)?,
            #[cfg(target_arch = "x86_64")]
            wide: Wide::new(cast),
        })
    }
}

/// The code of one product. Without `SIGNED`, the scale has no sign bit, and each value keeps its sign, NaN included.
#[inline(always)]
fn code<T: HighPrecision, const SIGNED: bool>(narrowing: Narrowing, x: T, quant_scale: f32) -> u8 {
    let x = x.to_f32();
    let (bits, sign) = if SIGNED {
        let bits = scaled_bits(x, quant_scale);
        (bits, bits)
    } else {
        ((x * quant_scale).to_bits(), x.to_bits())
    };
    narrowing.round(bits, sign >> 24 & 0x80) as u8
}

/// Casts elements with their scales; max |x| as bits where `AMAX`.
pub(crate) fn encode<T: HighPrecision, const AMAX: bool>(
    isa: Isa,
    nearest: Nearest,
    src: &[T],
    layout: Layout,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let (true, Some(wide)) = (avx512::is_in(isa), nearest.wide) {
        let random = None;
        return avx512::encode::run::<T, AMAX>(isa, &wide, random, src, layout, quant_scales, dst);
    }
    #[cfg(target_arch = "x86_64")]
    if super::avx2::is_in(isa) && T::KIND != Kind::F64 {
        // SAFETY: an `Isa` of this level exists only where avx2, fma and f16c were found.
        return unsafe { avx2::<T, AMAX>(nearest.narrowing, src, layout, quant_scales, dst) };
    }
    #[cfg(target_arch = "aarch64")]
    if neon::is_in(isa) {
        let narrowing = nearest.narrowing;
        return neon::encode::run::<T, AMAX>(isa, narrowing, src, layout, quant_scales, dst);
    }
    narrow::<T, AMAX>(isa, nearest.narrowing, src, layout, quant_scales, dst)
}

/// [`narrow`] in blocks of vectors, where they do not hold NaN and their scales have no sign.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<T: HighPrecision, const AMAX: bool>(
    narrowing: Narrowing,
    src: &[T],
    layout: Layout,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    let mut encoder = super::avx2::encode::Encoder::new(narrowing);
    let mut rest = LaneMax::<T>::default();
    match layout {
        Layout::Segments(len) => {
            for ((src, dst), &quant_scale) in
                src.chunks(len).zip(dst.chunks_mut(len)).zip(quant_scales)
            {
                if quant_scale.is_sign_negative() {
                    segment::<T, AMAX, true>(narrowing, src, quant_scale, dst, &mut rest);
                    continue;
                }
                let (src_blocks, src_rest) = src.as_chunks::<LANES>();
                let (dst_blocks, dst_rest) = dst.as_chunks_mut::<LANES>();
                let scales = super::avx2::encode::splat(quant_scale);
                for (src, dst) in src_blocks.iter().zip(dst_blocks) {
                    if !encoder.encode::<T, AMAX>(src, scales, dst) {
                        segment::<T, AMAX, false>(narrowing, src, quant_scale, dst, &mut rest);
                    }
                }
                segment::<T, AMAX, false>(narrowing, src_rest, quant_scale, dst_rest, &mut rest);
            }
            max_bits::<T>(rest).max(encoder.max_bits())
        }
        Layout::PerElement => {
            let (src_blocks, src_rest) = src.as_chunks::<LANES>();
            let (dst_blocks, dst_rest) = dst.as_chunks_mut::<LANES>();
            let (scale_blocks, scale_rest) = quant_scales.as_chunks::<LANES>();
            let mut max = 0;
            for ((src, dst), quant_scales) in src_blocks.iter().zip(dst_blocks).zip(scale_blocks) {
                let done = super::avx2::encode::unsigned(quant_scales)
                    .is_some_and(|scales| encoder.encode::<T, AMAX>(src, scales, dst));
                if !done {
                    max = max.max(columns::<T, AMAX>(narrowing, src, quant_scales, dst));
                }
            }
            let last = columns::<T, AMAX>(narrowing, src_rest, scale_rest, dst_rest);
            max.max(last).max(encoder.max_bits())
        }
    }
}

dispatch! {
    fn narrow [T: HighPrecision, const AMAX: bool] [T, AMAX] (
        narrowing: Narrowing, src: &[T], layout: Layout, quant_scales: &[f32], dst: &mut [u8],
    ) -> u32 {
        match layout {
            Layout::Segments(len) => segments::<T, AMAX>(narrowing, src, len, quant_scales, dst),
            Layout::PerElement => columns::<T, AMAX>(narrowing, src, quant_scales, dst),
        }
    }
}

#[inline(always)]
fn segments<T: HighPrecision, const AMAX: bool>(
    narrowing: Narrowing,
    src: &[T],
    len: usize,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    let mut max = LaneMax::<T>::default();
    for ((src, dst), &quant_scale) in src.chunks(len).zip(dst.chunks_mut(len)).zip(quant_scales) {
        if quant_scale.is_sign_positive() {
            segment::<T, AMAX, false>(narrowing, src, quant_scale, dst, &mut max);
        } else {
            segment::<T, AMAX, true>(narrowing, src, quant_scale, dst, &mut max);
        }
    }
    max_bits::<T>(max)
}

#[inline(always)]
fn segment<T: HighPrecision, const AMAX: bool, const SIGNED: bool>(
    narrowing: Narrowing,
    src: &[T],
    quant_scale: f32,
    dst: &mut [u8],
    max: &mut LaneMax<T>,
) {
    let (src_chunks, src_rest) = src.as_chunks::<LANES>();
    let (dst_chunks, dst_rest) = dst.as_chunks_mut::<LANES>();
    for (src, dst) in src_chunks.iter().zip(dst_chunks) {
        for i in 0..LANES {
            dst[i] = code::<T, SIGNED>(narrowing, src[i], quant_scale);
        }
        if AMAX {
            lane_max(src, max);
        }
    }
    if !src_rest.is_empty() {
        let (mut padded, mut codes) = ([T::default(); LANES], [0; LANES]);
        padded[..src_rest.len()].copy_from_slice(src_rest);
        for i in 0..LANES {
            codes[i] = code::<T, SIGNED>(narrowing, padded[i], quant_scale);
        }
        if AMAX {
            lane_max(&padded, max);
        }
        dst_rest.copy_from_slice(&codes[..dst_rest.len()]);
    }
}

#[inline(always)]
fn columns<T: HighPrecision, const AMAX: bool>(
    narrowing: Narrowing,
    src: &[T],
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    let mut max = LaneMax::<T>::default();
    let (src_chunks, src_rest) = src.as_chunks::<LANES>();
    let (dst_chunks, dst_rest) = dst.as_chunks_mut::<LANES>();
    let (scale_chunks, scale_rest) = quant_scales.as_chunks::<LANES>();
    for ((src, dst), quant_scales) in src_chunks.iter().zip(dst_chunks).zip(scale_chunks) {
        for i in 0..LANES {
            dst[i] = code::<T, true>(narrowing, src[i], quant_scales[i]);
        }
        if AMAX {
            lane_max(src, &mut max);
        }
    }
    for ((&x, dst), &quant_scale) in src_rest.iter().zip(dst_rest).zip(scale_rest) {
        *dst = code::<T, true>(narrowing, x, quant_scale);
        if AMAX {
            max[0] = x.magnitude().max(max[0]);
        }
    }
    max_bits::<T>(max)
}
