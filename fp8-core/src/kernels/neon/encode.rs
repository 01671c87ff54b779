//! Nearest-even casts to 8 bits: [`Narrowing::round`] in vectors.

use std::arch::aarch64::*;

use super::{Block, INFINITY, Isa, LANES, VECTORS, greatest, is_in, load, padded, to_array};
use crate::{
    HighPrecision,
    cast::scaled_bits,
    kernels::{
        Layout,
        amax::{LaneMax, lane_max, max_bits},
        narrowing::Narrowing,
    },
};

/// Casts elements with their scales; max |x| as bits where `AMAX`.
pub(in super::super) fn run<T: HighPrecision, const AMAX: bool>(
    isa: Isa,
    narrowing: Narrowing,
    src: &[T],
    layout: Layout,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: an `Isa` of this level exists only where NEON was found.
    unsafe {
        match layout {
            Layout::Segments(len) => {
                segments::<T, AMAX>(&Rounding::new(narrowing), src, len, quant_scales, dst)
            }
            Layout::PerElement => {
                columns::<T, AMAX>(&Rounding::new(narrowing), src, quant_scales, dst)
            }
        }
    }
}

/// [`Narrowing`] as vectors.
struct Rounding {
    narrowing: Narrowing,
    /// To the right.
    shift: int32x4_t,
    /// In the place of an exponent.
    exponents: uint32x4_t,
    min_normal: uint32x4_t,
    cap: uint32x4_t,
    /// All bits where zero keeps its sign.
    signed_zero: uint8x16_t,
}

impl Rounding {
    #[inline]
    #[target_feature(enable = "neon")]
    fn new(narrowing: Narrowing) -> Self {
        Self {
            narrowing,
            shift: vdupq_n_s32(-(narrowing.shift as i32)),
            exponents: vdupq_n_u32(narrowing.shift << 23),
            min_normal: vdupq_n_u32(narrowing.min_normal),
            cap: vdupq_n_u32(narrowing.cap),
            signed_zero: vdupq_n_u8(narrowing.zero_sign as u8),
        }
    }

    /// The codes of the magnitudes with these bits, none of them NaN, as [`Narrowing::round`] gives them.
    #[inline]
    #[target_feature(enable = "neon")]
    fn codes(&self, magnitudes: uint32x4_t) -> uint32x4_t {
        let capped = vminq_u32(magnitudes, self.cap);
        let binade = vandq_u32(vmaxq_u32(capped, self.min_normal), vdupq_n_u32(0x7F80_0000));
        let magic = vaddq_u32(binade, self.exponents);
        let sum = vaddq_f32(vreinterpretq_f32_u32(capped), vreinterpretq_f32_u32(magic));
        let codes_below = vshlq_u32(vsubq_u32(binade, self.min_normal), self.shift);
        vaddq_u32(vsubq_u32(vreinterpretq_u32_f32(sum), magic), codes_below)
    }

    /// Casts a chunk.
    #[inline]
    #[target_feature(enable = "neon")]
    fn chunk<T: HighPrecision>(&self, src: &[T; LANES], scales: &Block, dst: &mut [u8; LANES]) {
        let mut products = load(src);
        for (product, &scale) in products.iter_mut().zip(scales) {
            *product = vmulq_f32(*product, scale);
        }
        if greatest(&products) > INFINITY {
            return one_by_one(self.narrowing, src, &to_array(scales), dst);
        }
        let (products, _) = products.as_chunks::<4>();
        let (dst, _) = dst.as_chunks_mut::<16>();
        for (products, dst) in products.iter().zip(dst) {
            let (mut bits, mut mags) = ([vdupq_n_u32(0); 4], [vdupq_n_u32(0); 4]);
            for i in 0..4 {
                bits[i] = vreinterpretq_u32_f32(products[i]);
                mags[i] = self.codes(vreinterpretq_u32_f32(vabsq_f32(products[i])));
            }
            let mag = low_bytes(mags);
            let sign = vandq_u8(high_bytes(bits), vdupq_n_u8(0x80));
            let keeps_sign = vorrq_u8(vtstq_u8(mag, mag), self.signed_zero);
            let codes = vorrq_u8(mag, vandq_u8(sign, keeps_sign));
            // SAFETY: sixteen bytes.
            unsafe { vst1q_u8(dst.as_mut_ptr(), codes) };
        }
    }
}

/// The lowest byte of each lane.
#[inline]
#[target_feature(enable = "neon")]
fn low_bytes(lanes: [uint32x4_t; 4]) -> uint8x16_t {
    let [a, b, c, d] = lanes.map(|lanes| vreinterpretq_u16_u32(lanes));
    let (low, high) = (vuzp1q_u16(a, b), vuzp1q_u16(c, d));
    vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high))
}

/// The highest byte of each lane.
#[inline]
#[target_feature(enable = "neon")]
fn high_bytes(lanes: [uint32x4_t; 4]) -> uint8x16_t {
    let [a, b, c, d] = lanes.map(|lanes| vreinterpretq_u16_u32(lanes));
    let (low, high) = (vuzp2q_u16(a, b), vuzp2q_u16(c, d));
    vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high))
}

/// The scalar definition, in a loop, for chunks in which a product is NaN.
#[cold]
#[inline(never)]
fn one_by_one<T: HighPrecision>(
    narrowing: Narrowing,
    src: &[T; LANES],
    scales: &[f32; LANES],
    dst: &mut [u8; LANES],
) {
    for i in 0..LANES {
        let bits = scaled_bits(src[i].to_f32(), scales[i]);
        dst[i] = narrowing.round(bits, bits >> 24 & 0x80) as u8;
    }
}

#[target_feature(enable = "neon")]
fn segments<T: HighPrecision, const AMAX: bool>(
    rounding: &Rounding,
    src: &[T],
    len: usize,
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    let mut max = LaneMax::<T>::default();
    for ((src, dst), &quant_scale) in src.chunks(len).zip(dst.chunks_mut(len)).zip(quant_scales) {
        let scales = [vdupq_n_f32(quant_scale); VECTORS];
        let (chunks, rest) = src.as_chunks::<LANES>();
        let (dst_chunks, dst_rest) = dst.as_chunks_mut::<LANES>();
        for (src, dst) in chunks.iter().zip(dst_chunks) {
            rounding.chunk(src, &scales, dst);
            if AMAX {
                lane_max(src, &mut max);
            }
        }
        if !rest.is_empty() {
            let (src, mut codes) = (padded(rest), [0; LANES]);
            rounding.chunk(&src, &scales, &mut codes);
            if AMAX {
                lane_max(&src, &mut max);
            }
            dst_rest.copy_from_slice(&codes[..dst_rest.len()]);
        }
    }
    max_bits::<T>(max)
}

#[target_feature(enable = "neon")]
fn columns<T: HighPrecision, const AMAX: bool>(
    rounding: &Rounding,
    src: &[T],
    quant_scales: &[f32],
    dst: &mut [u8],
) -> u32 {
    let mut max = LaneMax::<T>::default();
    let (chunks, rest) = src.as_chunks::<LANES>();
    let (dst_chunks, dst_rest) = dst.as_chunks_mut::<LANES>();
    let (scale_chunks, scale_rest) = quant_scales.as_chunks::<LANES>();
    for ((src, dst), scales) in chunks.iter().zip(dst_chunks).zip(scale_chunks) {
        rounding.chunk(src, &load(scales), dst);
        if AMAX {
            lane_max(src, &mut max);
        }
    }
    if !rest.is_empty() {
        let (src, mut codes) = (padded(rest), [0; LANES]);
        rounding.chunk(&src, &load(&padded(scale_rest)), &mut codes);
        if AMAX {
            lane_max(&src, &mut max);
        }
        dst_rest.copy_from_slice(&codes[..dst_rest.len()]);
    }
    max_bits::<T>(max)
}
