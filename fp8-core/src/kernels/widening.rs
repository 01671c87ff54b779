//! Scalar decoding: the value of a code.

use crate::{Format, high_precision::HighPrecision};

/// The decoding of one format, as the constants of one branch-free body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Widening {
    /// How many more mantissa bits f32 has.
    shift: u32,
    /// The difference of the exponent biases, shifted to f32's exponent field.
    rebias: u32,
    /// The smallest normal code, and its value.
    min_normal_mag: u32,
    min_normal: f32,
    max_mag: u32,
    inf_mag: u32,
    /// The code of NaN if the format has just one; otherwise beyond all codes.
    only_nan: u32,
}

impl Widening {
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
        }
    }

    #[inline(always)]
    fn value(self, code: u8) -> f32 {
        let code = u32::from(code);
        let mag = code & 0x7F;
        let normal = mag.wrapping_shl(self.shift).wrapping_add(self.rebias);
        // A subnormal is read with a leading one at the exponent of the smallest normal, which is then subtracted:
        // going through f32 subnormals would be slow.
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
