//! From codes to values.
//!
//! f32 has the exponents of all formats: the bits of a code, moved to where f32 has them, are its value times a power of two,
//! subnormals included. This does not hold for the codes of NaN and infinity; chunks that contain one are decoded element by
//! element.

use std::arch::aarch64::*;

use super::{
    Block, INFINITY, Isa, LANES, VECTORS, greatest, is_in, load, padded, store, upper_halves,
};
use crate::{
    Format, HighPrecision,
    kernels::{Layout, widening::Widening},
};

/// How the codes of a format become f32, and which ones do not.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Shift {
    /// The distance between the last bits of the format and of the upper half of an f32.
    distance: i16,
    /// The bits of that half that a code sets.
    keep: u16,
    /// The factor for the resulting f32.
    factor: f32,
    /// A code that does not become an f32: above `special_above` after `special_flip` and `special_keep`.
    special_flip: u8,
    special_keep: u8,
    special_above: u8,
}

impl Shift {
    pub(in super::super) const fn new(format: Format) -> Self {
        let spec = format.spec();
        let ocp = spec.has_negative_zero;
        let distance = 7 - spec.mantissa_bits;
        Self {
            distance: distance as i16,
            keep: 0x8000 | 0x7F << distance,
            // The difference of the biases.
            factor: f32::from_bits((127 + 127 - spec.bias) << 23),
            // NaN and infinity, or only 0x80, which becomes 0xFF.
            special_flip: if ocp { 0 } else { 0x7F },
            special_keep: if ocp { 0x7F } else { 0xFF },
            special_above: if ocp { spec.max_mag as u8 } else { 0xFE },
        }
    }

    /// The shifted codes, and whether some of them are special.
    #[inline]
    #[target_feature(enable = "neon")]
    fn values(self, codes: &[u8; LANES]) -> (Block, bool) {
        let mut values = [vdupq_n_f32(0.0); VECTORS];
        let mut greatest = vdupq_n_u8(0);
        let (codes, _) = codes.as_chunks::<16>();
        let (quads, _) = values.as_chunks_mut::<4>();
        for (codes, values) in codes.iter().zip(quads) {
            // SAFETY: sixteen bytes.
            let codes = unsafe { vld1q_u8(codes.as_ptr()) };
            let key = vandq_u8(
                veorq_u8(codes, vdupq_n_u8(self.special_flip)),
                vdupq_n_u8(self.special_keep),
            );
            greatest = vmaxq_u8(greatest, key);
            let codes = vreinterpretq_s8_u8(codes);
            // Every bit above the code holds the sign, so the sign bit of f32 does too.
            let words = [vmovl_s8(vget_low_s8(codes)), vmovl_high_s8(codes)];
            let [[a, b], [c, d]] = words.map(|words| {
                let bits = vshlq_s16(words, vdupq_n_s16(self.distance));
                let bits = vandq_u16(vreinterpretq_u16_s16(bits), vdupq_n_u16(self.keep));
                upper_halves(bits)
            });
            *values = [a, b, c, d];
        }
        (values, vmaxvq_u8(greatest) > self.special_above)
    }
}

/// Decodes codes with their scales.
pub(in super::super) fn run<T: HighPrecision>(
    isa: Isa,
    (widening, shift): (Widening, Shift),
    codes: &[u8],
    layout: Layout,
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    assert!(is_in(isa), "{isa:?}");
    // SAFETY: an `Isa` of this level exists only where NEON was found.
    unsafe {
        match layout {
            Layout::Segments(len) => segments(widening, shift, codes, len, dequant_scales, dst),
            Layout::PerElement => columns(widening, shift, codes, dequant_scales, dst),
        }
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

/// Decodes a chunk under one scale; `scaled` is that scale times the factor of the format.
#[inline]
#[target_feature(enable = "neon")]
fn chunk<T: HighPrecision>(
    (widening, shift): (Widening, Shift),
    codes: &[u8; LANES],
    (dequant_scale, scaled): (f32, f32),
    dst: &mut [T; LANES],
) {
    let (mut values, special) = shift.values(codes);
    if special {
        return one_by_one(widening, codes, dequant_scale, dst);
    }
    for value in &mut values {
        *value = vmulq_n_f32(*value, scaled);
    }
    store(&values, dst);
}

#[target_feature(enable = "neon")]
fn segments<T: HighPrecision>(
    widening: Widening,
    shift: Shift,
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
        // A power of two: exact unless it overflows.
        let scaled = dequant_scale * shift.factor;
        if !scaled.is_finite() {
            one_by_one(widening, codes, dequant_scale, dst);
            continue;
        }
        let (how, scales) = ((widening, shift), (dequant_scale, scaled));
        let (code_chunks, code_rest) = codes.as_chunks::<LANES>();
        let (dst_chunks, dst_rest) = dst.as_chunks_mut::<LANES>();
        for (codes, dst) in code_chunks.iter().zip(dst_chunks) {
            chunk(how, codes, scales, dst);
        }
        if !code_rest.is_empty() {
            let mut values = [T::default(); LANES];
            chunk(how, &padded(code_rest), scales, &mut values);
            dst_rest.copy_from_slice(&values[..dst_rest.len()]);
        }
    }
}

/// Decodes a chunk of elements, each with its own scale.
#[inline]
#[target_feature(enable = "neon")]
fn chunk_of_each<T: HighPrecision>(
    (widening, shift): (Widening, Shift),
    codes: &[u8; LANES],
    scales: &[f32; LANES],
    dst: &mut [T; LANES],
) {
    let (mut values, special) = shift.values(codes);
    for (value, scale) in values.iter_mut().zip(load(scales)) {
        *value = vmulq_f32(vmulq_n_f32(*value, shift.factor), scale);
    }
    // Each type has its own bits for NaN.
    if special || greatest(&values) > INFINITY {
        for ((&code, &scale), dst) in codes.iter().zip(scales).zip(dst) {
            *dst = widening.scaled(code, scale);
        }
    } else {
        store(&values, dst);
    }
}

#[target_feature(enable = "neon")]
fn columns<T: HighPrecision>(
    widening: Widening,
    shift: Shift,
    codes: &[u8],
    dequant_scales: &[f32],
    dst: &mut [T],
) {
    let how = (widening, shift);
    let (code_chunks, code_rest) = codes.as_chunks::<LANES>();
    let (scale_chunks, scale_rest) = dequant_scales.as_chunks::<LANES>();
    let (dst_chunks, dst_rest) = dst.as_chunks_mut::<LANES>();
    for ((codes, scales), dst) in code_chunks.iter().zip(scale_chunks).zip(dst_chunks) {
        chunk_of_each(how, codes, scales, dst);
    }
    if !code_rest.is_empty() {
        let mut values = [T::default(); LANES];
        chunk_of_each(how, &padded(code_rest), &padded(scale_rest), &mut values);
        dst_rest.copy_from_slice(&values[..dst_rest.len()]);
    }
}
