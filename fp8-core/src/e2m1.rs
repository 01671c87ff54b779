//! E2M1, the 4-bit element format of MXFP4 and NVFP4 files. Nothing is computed in it here: files that hold it are read as
//! E4M3, which has all of its values.

use std::fmt;

use crate::{format::Format, types::by_value};

/// A value of OCP E2M1: a sign, two bits of exponent with bias 1, one bit of significand. Its magnitudes are 0, 0.5, 1, 1.5, 2, 3,
/// 4 and 6; it has -0, but neither infinity nor NaN.
///
/// ```
/// use fp8_core::{E2M1, Format};
///
/// let value = E2M1::from_bits(0b1101);
/// assert_eq!(value.to_f32(), -3.0);
/// assert_eq!(Format::E4M3.decode(value.to_e4m3()), -3.0); // the same value, exactly
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct E2M1(u8);

impl E2M1 {
    /// The largest value, 6.
    pub const MAX: Self = Self(0b0111);

    /// The value of the code in the low four bits; the others count for nothing.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 0xF)
    }

    /// The code, 0 to 15.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// The value, exactly.
    pub const fn to_f32(self) -> f32 {
        let significand = (self.0 & 1) as f32;
        let magnitude = match self.0 >> 1 & 0b11 {
            0 => significand / 2.0,
            exponent => (1.0 + significand / 2.0) * (1 << (exponent - 1)) as f32,
        };
        if self.0 & 0b1000 == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    /// The code of the same value in [`Format::E4M3`].
    pub const fn to_e4m3(self) -> u8 {
        const REBIAS: u8 = Format::E4M3.bias() as u8 - 1;
        let magnitude = self.0 & 0b111;
        let code = match magnitude {
            0 => 0,
            // E2M1's only subnormal, 0.5, is a normal number in E4M3.
            1 => REBIAS << 3,
            _ => (magnitude << 2) + (REBIAS << 3),
        };
        code | (self.0 & 0b1000) << 4
    }
}

impl fmt::Debug for E2M1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "E2M1({:?})", self.to_f32())
    }
}

by_value!(E2M1);

/// The E4M3 codes of pairs of E2M1 codes: of each byte first the low four bits, then the high ones, as MXFP4 and NVFP4 files hold
/// the elements of a row.
///
/// ```
/// use fp8_core::{Format, unpack_e2m1};
///
/// let codes = unpack_e2m1(&[0xD2]);
/// let values: Vec<f32> = codes.iter().map(|code| Format::E4M3.decode(*code)).collect();
/// assert_eq!(values, [1.0, -3.0]);
/// ```
pub fn unpack_e2m1(packed: &[u8]) -> Vec<u8> {
    const PAIRS: [[u8; 2]; 256] = {
        let mut pairs = [[0; 2]; 256];
        let mut byte = 0;
        while byte < 256 {
            let bits = byte as u8;
            pairs[byte] = [
                E2M1::from_bits(bits).to_e4m3(),
                E2M1::from_bits(bits >> 4).to_e4m3(),
            ];
            byte += 1;
        }
        pairs
    };
    let pairs = packed.iter().map(|byte| PAIRS[usize::from(*byte)]);
    pairs.collect::<Vec<_>>().into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values that the OCP specification of microscaling lists.
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    fn value(code: u8) -> f32 {
        let magnitude = MAGNITUDES[usize::from(code & 7)];
        if code < 8 { magnitude } else { -magnitude }
    }

    #[test]
    fn all_codes_have_the_values_of_the_specification() {
        for code in 0..16 {
            let expected = value(code).to_bits();
            assert_eq!(E2M1::from_bits(code).to_f32().to_bits(), expected, "{code}");
            let e4m3 = E2M1::from_bits(code).to_e4m3();
            assert_eq!(Format::E4M3.decode(e4m3).to_bits(), expected, "{code}");
            assert_eq!(E2M1::from_bits(code | 0xA0).to_bits(), code);
        }
    }

    #[test]
    fn the_low_half_of_a_byte_comes_first() {
        let bytes: Vec<u8> = (0..=255).collect();
        let codes = unpack_e2m1(&bytes);
        assert_eq!(codes.len(), 512);
        for (byte, pair) in bytes.iter().zip(codes.chunks(2)) {
            let values = pair.iter().map(|code| Format::E4M3.decode(*code).to_bits());
            let expected = [byte & 0xF, byte >> 4].map(|code| value(code).to_bits());
            assert_eq!(values.collect::<Vec<_>>(), expected, "{byte:#04x}");
        }
    }
}
