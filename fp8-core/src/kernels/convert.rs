//! bf16 and f16 to f32 and back without branches, so that loops around them vectorize.
//!
//! The `half` crate gives the same values, but chooses the instruction for each element at run time.

use half::{bf16, f16};

use super::narrowing::Narrowing;

#[inline(always)]
pub(crate) fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Nearest-even; a NaN keeps its sign and leading bits, and is quiet.
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x0040;
    let is_nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    bf16::from_bits(if is_nan { nan } else { rounded } as u16)
}

#[inline(always)]
pub(crate) fn f16_to_f32(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let magnitude = (bits & 0x7FFF) << 13;
    let normal = magnitude + ((127 - 15) << 23);
    // A subnormal is read with a leading one at the exponent of the smallest normal, which is then subtracted.
    let min_normal = f32::from_bits((127 - 14) << 23);
    let subnormal = (f32::from_bits(normal + (1 << 23)) - min_normal).to_bits();
    let special = magnitude | 0x7F80_0000;
    let finite = if magnitude < 1 << 23 {
        subnormal
    } else {
        normal
    };
    let magnitude = if magnitude >= 0x1F << 23 {
        special
    } else {
        finite
    };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

/// Nearest-even; values that are too large become infinity.
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> f16 {
    let bits = value.to_bits();
    f16::from_bits(Narrowing::F16.round(bits, bits >> 16 & 0x8000) as u16)
}
