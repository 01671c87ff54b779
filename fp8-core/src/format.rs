//! The four 8-bit element formats: their constants and what each code means.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::error::{ParseFormatError, named};

/// An 8-bit floating point format for tensor elements.
///
/// `E4M3` and `E5M2` are those of the OCP 8-bit floating point specification and of
/// [arXiv:2209.05433](https://arxiv.org/abs/2209.05433); the `Fnuz` pair (finite, no negative zero) is that of AMD
/// MI300 ([arXiv:2206.02915](https://arxiv.org/abs/2206.02915)).
///
/// | format | max | min normal | min subnormal | bias | Inf | NaN codes |
/// |---|---|---|---|---|---|---|
/// | `E4M3` | 448 | 2^-6 | 2^-9 | 7 | none | 0x7F, 0xFF |
/// | `E5M2` | 57344 | 2^-14 | 2^-16 | 15 | 0x7C, 0xFC | 0x7D-0x7F, 0xFD-0xFF |
/// | `E4M3Fnuz` | 240 | 2^-7 | 2^-10 | 8 | none | 0x80 |
/// | `E5M2Fnuz` | 57344 | 2^-15 | 2^-17 | 16 | none | 0x80 |
///
/// Every finite value of every format is exact in bf16 and in f16.
///
/// ```
/// use fp8_core::Format;
///
/// assert_eq!(Format::E4M3.max(), 448.0);
/// assert_eq!(Format::E4M3.decode(0x38), 1.0);
/// assert_eq!("float8_e5m2".parse(), Ok(Format::E5M2)); // PyTorch's name
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Format {
    /// OCP E4M3 ("fn"): no infinity, one NaN per sign.
    #[serde(rename = "e4m3", alias = "e4m3fn", alias = "float8_e4m3fn")]
    E4M3,
    /// OCP E5M2: an IEEE-like format with infinities.
    #[serde(rename = "e5m2", alias = "float8_e5m2")]
    E5M2,
    /// AMD's E4M3 with bias 8, a single NaN and no negative zero.
    #[serde(rename = "e4m3fnuz", alias = "float8_e4m3fnuz")]
    E4M3Fnuz,
    /// AMD's E5M2 with bias 16, a single NaN and no negative zero.
    #[serde(rename = "e5m2fnuz", alias = "float8_e5m2fnuz")]
    E5M2Fnuz,
}

/// Which pair of formats a device computes with, as torchao's type config chooses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FormatPair {
    /// [`Format::E4M3`] and [`Format::E5M2`]: NVIDIA, Intel and others.
    #[default]
    Ocp,
    /// [`Format::E4M3Fnuz`] and [`Format::E5M2Fnuz`]: AMD MI300.
    Fnuz,
}

/// A format as numbers, for code that treats all formats alike. A magnitude is a code without its sign bit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodeSpec {
    pub(crate) mantissa_bits: u32,
    pub(crate) bias: u32,
    pub(crate) max_mag: u32,
    /// The magnitude of values that are too large, if overflow does not saturate.
    pub(crate) inf_mag: u32,
    /// 0x80 in the fnuz formats, where adding the sign bit changes nothing.
    pub(crate) nan_mag: u32,
    pub(crate) has_negative_zero: bool,
}

impl Format {
    /// The four formats.
    pub const ALL: [Self; 4] = [Self::E4M3, Self::E5M2, Self::E4M3Fnuz, Self::E5M2Fnuz];

    pub(crate) const fn spec(self) -> CodeSpec {
        let (mantissa_bits, bias, max_mag, inf_mag) = match self {
            Self::E4M3 => (3, 7, 0x7E, 0x7F),
            Self::E5M2 => (2, 15, 0x7B, 0x7C),
            Self::E4M3Fnuz => (3, 8, 0x7F, 0x80),
            Self::E5M2Fnuz => (2, 16, 0x7F, 0x80),
        };
        let ocp = matches!(self, Self::E4M3 | Self::E5M2);
        CodeSpec {
            mantissa_bits,
            bias,
            max_mag,
            inf_mag,
            nan_mag: if ocp { 0x7F } else { 0x80 },
            has_negative_zero: ocp,
        }
    }

    /// The largest finite value.
    #[inline]
    pub const fn max(self) -> f32 {
        const OF_EACH: [f32; Format::ALL.len()] = {
            let mut max = [0.; Format::ALL.len()];
            let mut index = 0;
            while index < Format::ALL.len() {
                let format = Format::ALL[index];
                max[format as usize] = format.decode(format.max_code());
                index += 1;
            }
            max
        };
        OF_EACH[self as usize]
    }

    /// The smallest positive normal value.
    pub const fn min_normal(self) -> f32 {
        self.decode(1 << self.mantissa_bits())
    }

    /// The smallest positive value.
    pub const fn min_subnormal(self) -> f32 {
        self.decode(1)
    }

    /// The distance from 1 to the next larger value.
    pub const fn epsilon(self) -> f32 {
        1.0 / (1 << self.mantissa_bits()) as f32
    }

    /// The exponent bias.
    pub const fn bias(self) -> u32 {
        self.spec().bias
    }

    /// Explicit bits of the significand: 3 or 2.
    pub const fn mantissa_bits(self) -> u32 {
        self.spec().mantissa_bits
    }

    /// The exponent of the largest finite value: 8 for `E4M3`, 15 for `E5M2`. The MX scale rule calls it `emax`.
    pub const fn max_exponent(self) -> i32 {
        let spec = self.spec();
        (spec.max_mag >> spec.mantissa_bits) as i32 - spec.bias as i32
    }

    /// The code of the largest finite value.
    pub const fn max_code(self) -> u8 {
        self.spec().max_mag as u8
    }

    /// The NaN code that a cast of a positive NaN gives.
    pub const fn nan_code(self) -> u8 {
        self.spec().nan_mag as u8
    }

    /// Whether the format has infinities: `E5M2` alone.
    pub(crate) const fn has_infinity(self) -> bool {
        matches!(self, Self::E5M2)
    }

    /// Whether -0 has a code: the OCP pair.
    pub const fn has_negative_zero(self) -> bool {
        self.spec().has_negative_zero
    }

    /// Whether `code` is a NaN.
    pub const fn is_nan(self, code: u8) -> bool {
        match self {
            Self::E4M3 => code & 0x7F == 0x7F,
            Self::E5M2 => code & 0x7F > 0x7C,
            Self::E4M3Fnuz | Self::E5M2Fnuz => code == 0x80,
        }
    }

    /// Whether `code` is an infinity.
    pub const fn is_infinite(self, code: u8) -> bool {
        self.has_infinity() && code & 0x7F == 0x7C
    }

    /// Whether `code` is neither an infinity nor a NaN.
    pub const fn is_finite(self, code: u8) -> bool {
        !self.is_nan(code) && !self.is_infinite(code)
    }

    /// The value of `code`, exact in f32. A NaN code gives an f32 NaN.
    pub const fn decode(self, code: u8) -> f32 {
        let spec = self.spec();
        let sign = (code as u32 & 0x80) << 24;
        if self.is_nan(code) {
            // Only an OCP NaN has a sign; 0x80 is the one NaN of a fnuz format.
            return f32::from_bits(0x7FC0_0000 | if spec.has_negative_zero { sign } else { 0 });
        }
        if self.is_infinite(code) {
            return f32::from_bits(0x7F80_0000 | sign);
        }
        let mag = code as u32 & 0x7F;
        let significand = mag & ((1 << spec.mantissa_bits) - 1);
        let exponent = mag >> spec.mantissa_bits;
        let magnitude = if exponent == 0 {
            let quantum = f32::from_bits((127 + 1 - spec.bias - spec.mantissa_bits) << 23);
            significand as f32 * quantum
        } else {
            f32::from_bits(
                (exponent + 127 - spec.bias) << 23 | significand << (23 - spec.mantissa_bits),
            )
        };
        f32::from_bits(magnitude.to_bits() | sign)
    }

    /// The pair that the format belongs to.
    pub const fn pair(self) -> FormatPair {
        match self {
            Self::E4M3 | Self::E5M2 => FormatPair::Ocp,
            Self::E4M3Fnuz | Self::E5M2Fnuz => FormatPair::Fnuz,
        }
    }

    /// The format of `pair` that has the same split of bits.
    pub const fn in_pair(self, pair: FormatPair) -> Self {
        match self {
            Self::E4M3 | Self::E4M3Fnuz => pair.e4m3(),
            Self::E5M2 | Self::E5M2Fnuz => pair.e5m2(),
        }
    }

    /// The short name: `e4m3`, `e5m2`, `e4m3fnuz`, `e5m2fnuz`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4M3 => "e4m3",
            Self::E5M2 => "e5m2",
            Self::E4M3Fnuz => "e4m3fnuz",
            Self::E5M2Fnuz => "e5m2fnuz",
        }
    }
}

impl FormatPair {
    /// The format with the finer values: inputs and weights.
    pub const fn e4m3(self) -> Format {
        match self {
            Self::Ocp => Format::E4M3,
            Self::Fnuz => Format::E4M3Fnuz,
        }
    }

    /// The format with the wider range: gradients.
    pub const fn e5m2(self) -> Format {
        match self {
            Self::Ocp => Format::E5M2,
            Self::Fnuz => Format::E5M2Fnuz,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = ParseFormatError;

    /// Accepts [`Format::name`], `e4m3fn`, and PyTorch's names (`float8_e4m3fn`), in any case.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let lower = name.to_ascii_lowercase();
        match lower.strip_prefix("float8_").unwrap_or(&lower) {
            "e4m3" | "e4m3fn" => Ok(Self::E4M3),
            "e5m2" => Ok(Self::E5M2),
            "e4m3fnuz" => Ok(Self::E4M3Fnuz),
            "e5m2fnuz" => Ok(Self::E5M2Fnuz),
            _ => Err(ParseFormatError {
                name: name.to_owned(),
            }),
        }
    }
}

named!(FormatPair, "format pair", "ocp or fnuz": Ocp "ocp", Fnuz "fnuz");
