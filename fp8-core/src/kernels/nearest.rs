//! Nearest-even casts: the hot path.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::{
    Isa, LANES,
    amax::{LaneMax, lane_max, max_bits},
    dispatch,
};
use crate::{
    HighPrecision,
    cast::{Cast, Overflow, Rounding, scaled_bits},
};

/// A nearest-even cast from f32 to a narrower format, as the constants of one branch-free body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nearest {
    /// Mantissa bits that f32 has more.
    shift: u32,
    /// Bits of the smallest normal value of the target.
    min_normal: u32,
    /// Bits of the magnitude at which values are cut: what is larger has the same code.
    cap: u32,
    nan_mag: u32,
    /// The sign bits that a zero keeps.
    zero_sign: u32,
    /// The same for the code of AVX-512, where that has it.
    #[cfg(target_arch = "x86_64")]
    wide: Option<avx512::Wide>,
}

impl Nearest {
    /// f32 to f16, with the sign at bit 15.
    pub(crate) const F16: Self = Self::with_layout(10, 15, 0x7C00, 0x7E00, u32::MAX);

    const fn with_layout(
        mantissa_bits: u32,
        bias: u32,
        overflow_mag: u32,
        nan_mag: u32,
        zero_sign: u32,
    ) -> Self {
        let shift = 23 - mantissa_bits;
        Self {
            shift,
            min_normal: (127 + 1 - bias) << 23,
            // The code of overflow is the largest finite one, or that which follows it and so has the next value.
            cap: (overflow_mag << shift) + ((127 - bias) << 23),
            nan_mag,
            zero_sign,
            #[cfg(target_arch = "x86_64")]
            wide: None,
        }
    }

    /// The constants of `cast`, where it is of the kind.
    pub(crate) fn new(cast: &Cast) -> Option<Self> {
        if cast.rounding != Rounding::NearestEven || cast.via_f16 {
            return None;
        }
        let spec = cast.format.spec();
        let overflow_mag = match cast.overflow {
            Overflow::Saturate => spec.max_mag,
            Overflow::NonFinite => spec.inf_mag,
        };
        let zero_sign = if spec.has_negative_zero { u32::MAX } else { 0 };
        let nearest = Self::with_layout(
            spec.mantissa_bits,
            spec.bias,
            overflow_mag,
            spec.nan_mag,
            zero_sign,
        );
        Some(Self {
            #[cfg(target_arch = "x86_64")]
            wide: avx512::Wide::new(cast),
            ..nearest
        })
    }

    /// The code of the f32 with these `bits`; `sign` is its sign at the place the target has it.
    #[inline(always)]
    pub(crate) fn round(self, bits: u32, sign: u32) -> u32 {
        let magnitude = bits & 0x7FFF_FFFF;
        let capped = magnitude.min(self.cap);
        let binade = capped.max(self.min_normal) & 0x7F80_0000;
        // A power of two whose last place is that of the target in this binade: adding it rounds there, and leaves the
        // number of places in its low bits.
        let magic = binade.wrapping_add(self.shift << 23);
        let sum = (f32::from_bits(capped) + f32::from_bits(magic)).to_bits();
        let codes_below = (binade - self.min_normal).wrapping_shr(self.shift);
        let mag = sum.wrapping_sub(magic).wrapping_add(codes_below);
        let mag = if magnitude > 0x7F80_0000 {
            self.nan_mag
        } else {
            mag
        };
        let sign = if mag == 0 {
            sign & self.zero_sign
        } else {
            sign
        };
        mag | sign
    }

    #[inline(always)]
    fn code<T: HighPrecision>(self, x: T, quant_scale: f32) -> u8 {
        let bits = scaled_bits(x.to_f32(), quant_scale);
        self.round(bits, bits >> 24 & 0x80) as u8
    }
}

/// Casts segments of `len` elements, each with its scale; max |x| as bits where `AMAX`.
pub(crate) fn segments<T: HighPrecision, const AMAX: bool>(
    isa: Isa,
    nearest: Nearest,
    src: &[T],
    len: usize,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let (true, Some(wide)) = (avx512::is_in(isa), nearest.wide) {
        return avx512::encode::segments::<T, AMAX>(isa, &wide, None, src, len, quant_scales, dst);
    }
    narrow_segments::<T, AMAX>(isa, nearest, src, len, quant_scales, dst)
}

/// Casts elements that have a scale each; max |x| as bits where `AMAX`.
pub(crate) fn columns<T: HighPrecision, const AMAX: bool>(
    isa: Isa,
    nearest: Nearest,
    src: &[T],
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let (true, Some(wide)) = (avx512::is_in(isa), nearest.wide) {
        return avx512::encode::columns::<T, AMAX>(isa, &wide, None, src, quant_scales, dst);
    }
    narrow_columns::<T, AMAX>(isa, nearest, src, quant_scales, dst)
}

dispatch! {
    fn narrow_segments [T: HighPrecision, const AMAX: bool] [T, AMAX] (
        nearest: Nearest, src: &[T], len: usize, quant_scales: &[f32], dst: &mut [u8],
    ) -> u32 = segments_body
}

dispatch! {
    fn narrow_columns [T: HighPrecision, const AMAX: bool] [T, AMAX] (
        nearest: Nearest, src: &[T], quant_scales: &[f32], dst: &mut [u8],
    ) -> u32 = columns_body
}

#[inline(always)]
fn segments_body<T: HighPrecision, const AMAX: bool>(
    nearest: Nearest,
    src: &[T],
    len: usize,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    let mut max = LaneMax::<T>::default();
    for ((src, dst), &quant_scale) in src.chunks(len).zip(dst.chunks_mut(len)).zip(quant_scales) {
        let (src_chunks, src_rest) = src.as_chunks::<LANES>();
        let (dst_chunks, dst_rest) = dst.as_chunks_mut::<LANES>();
        for (src, dst) in src_chunks.iter().zip(dst_chunks) {
            for i in 0..LANES {
                dst[i] = nearest.code(src[i], quant_scale);
            }
            if AMAX {
                lane_max(src, &mut max);
            }
        }
        if !src_rest.is_empty() {
            let (mut padded, mut codes) = ([T::default(); LANES], [0; LANES]);
            padded[..src_rest.len()].copy_from_slice(src_rest);
            for i in 0..LANES {
                codes[i] = nearest.code(padded[i], quant_scale);
            }
            if AMAX {
                lane_max(&padded, &mut max);
            }
            dst_rest.copy_from_slice(&codes[..dst_rest.len()]);
        }
    }
    max_bits::<T>(max)
}

#[inline(always)]
fn columns_body<T: HighPrecision, const AMAX: bool>(
    nearest: Nearest,
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
            dst[i] = nearest.code(src[i], quant_scales[i]);
        }
        if AMAX {
            lane_max(src, &mut max);
        }
    }
    for ((&x, dst), &quant_scale) in src_rest.iter().zip(dst_rest).zip(scale_rest) {
        *dst = nearest.code(x, quant_scale);
        if AMAX {
            max[0] = x.magnitude().max(max[0]);
        }
    }
    max_bits::<T>(max)
}
