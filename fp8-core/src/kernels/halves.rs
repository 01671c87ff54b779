//! Slices of 16-bit floats to f32 and back, rounded to nearest even.

use half::f16;
#[cfg(target_arch = "x86_64")]
use half::slice::HalfFloatSliceExt;

#[cfg(target_arch = "x86_64")]
use super::avx512;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{Isa, IsaLevel, dispatch};
use crate::HighPrecision;

/// The values of `src`, as many as both slices have.
pub(crate) fn widen<T: HighPrecision>(isa: Isa, src: &[T], dst: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_in(isa) {
        avx512::halves::widen(isa, src, dst);
        return;
    }
    #[cfg(target_arch = "aarch64")]
    if neon::is_in(isa) {
        neon::halves::widen(isa, src, dst);
        return;
    }
    widen_each(isa, src, dst);
}

/// The f16 nearest to each value, as many as both slices have; a NaN may have any payload.
pub(crate) fn narrow_f16(isa: Isa, src: &[f32], dst: &mut [f16]) {
    match isa.level() {
        // Without `half`, which would pick an instruction of the processor.
        IsaLevel::Portable => narrow_each(isa, src, dst),
        #[cfg(target_arch = "aarch64")]
        IsaLevel::Neon => neon::halves::narrow_f16(isa, src, dst),
        #[cfg(target_arch = "x86_64")]
        _ if avx512::is_in(isa) => avx512::halves::narrow_f16(isa, src, dst),
        #[cfg(target_arch = "x86_64")]
        _ => {
            let len = src.len().min(dst.len());
            dst[..len].convert_from_f32_slice(&src[..len]);
        }
    }
}

dispatch! {
    fn widen_each [T: HighPrecision] [T] (src: &[T], dst: &mut [f32]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = src.to_f32();
        }
    }
}

dispatch! {
    /// [`HighPrecision::from_f32`] of each value, as many as both slices have.
    pub(crate) fn narrow_each [T: HighPrecision] [T] (src: &[f32], dst: &mut [T]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = T::from_f32(*src);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    #[test]
    fn every_instruction_set_widens_as_each_value() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let brains: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        for isa in Isa::available() {
            for len in [0, 1, 15, 16, 17, 63, 1 << 16] {
                let mut wide = vec![0.0; len];
                widen(isa, &halves, &mut wide);
                let expected = halves.iter().map(|x| HighPrecision::to_f32(*x));
                assert!(wide.iter().zip(expected).all(|(a, b)| same(*a, b)));
                widen(isa, &brains, &mut wide);
                let expected = brains.iter().map(|x| HighPrecision::to_f32(*x));
                assert!(wide.iter().zip(expected).all(|(a, b)| same(*a, b)));
            }
        }
    }

    #[test]
    fn every_instruction_set_narrows_as_each_value() {
        // Around every f16, and every exponent of f32.
        let halves = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32().to_bits());
        let near = halves.flat_map(|bits| [-1i32, 0, 1].map(|d| bits.wrapping_add_signed(d)));
        let ties = (0..=u16::MAX).map(|high| u32::from(high) << 16 | 0x1000);
        let values: Vec<f32> = near.chain(ties).map(f32::from_bits).collect();
        for isa in Isa::available() {
            for len in [0, 1, 15, 16, 17, 63, values.len()] {
                let mut narrow = vec![f16::ONE; len];
                narrow_f16(isa, &values, &mut narrow);
                for (value, got) in values.iter().zip(&narrow) {
                    let expected: f16 = HighPrecision::from_f32(*value);
                    let ok = same(got.to_f32(), expected.to_f32());
                    assert!(ok, "{isa:?} {value:e}: {got:e}, expected {expected:e}");
                }
            }
        }
    }
}
