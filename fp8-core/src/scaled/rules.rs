//! The scale of a result from the scales of its operands, and the factor on its data.

use super::{Pow2Round, Scale, ScaledError};
use crate::floor_to_power_of_two;

/// A rule that takes a factor out of the result: `data = data_factor * (operation on the data of the operands)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factored {
    /// Scale of the result.
    pub scale: Scale,
    /// A power of two, unless scales are not. It also takes up what a product of scales has beyond 2^-126..2^127.
    pub data_factor: f32,
}

/// A rule that brings operands to one scale first: `data = operation(factors[0] * data_a, factors[1] * data_b)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Aligned {
    /// Scale of the result.
    pub scale: Scale,
    /// What each operand's data are multiplied by; 0 for a tensor of zero scale.
    pub data_factors: [f32; 2],
}

/// Splits `scale * data_factor` into a scale in range and the rest. The product of a few f32 is exact in f64, or rounded far
/// below what a scale shows.
fn split(scale: f64, data_factor: f64) -> Factored {
    let (min, max) = (f64::from(f32::MIN_POSITIVE), f64::from(Scale::MAX.to_f32()));
    if scale == 0.0 {
        return Factored {
            scale: Scale::ZERO,
            data_factor: data_factor as f32,
        };
    }
    let held = scale.clamp(min, f64::from(f32::MAX));
    // Beyond the range the scale is the nearest power of two within it.
    let held = if held == scale { held } else { held.min(max) };
    Factored {
        scale: Scale::lenient(held as f32).unwrap_or(Scale::MAX),
        data_factor: (data_factor * (scale / held)) as f32,
    }
}

fn value(scale: Scale) -> f64 {
    f64::from(scale.to_f32())
}

/// The factor that takes data from the scale `from` to the scale `to`; 0 if either is 0.
///
/// ```
/// use fp8_core::scaled::{Scale, rescale_factor};
/// assert_eq!(rescale_factor(Scale::new(8.0)?, Scale::new(2.0)?), 4.0);
/// # Ok::<(), fp8_core::scaled::ScaledError>(())
/// ```
pub fn rescale_factor(from: Scale, to: Scale) -> f32 {
    if from.is_zero() || to.is_zero() {
        return 0.0;
    }
    (value(from) / value(to)) as f32
}

fn aligned(scale: Scale, a: Scale, b: Scale) -> Aligned {
    Aligned {
        scale,
        data_factors: [rescale_factor(a, scale), rescale_factor(b, scale)],
    }
}

/// Addition and subtraction: `r(sqrt(a^2 + b^2))`, the size of a sum of independent values. Rounded down, that is the larger
/// of two powers of two. A zero scale takes the other one.
///
/// ```
/// use fp8_core::scaled::{Pow2Rounding, Scale, add_rule};
/// let (a, b) = (Scale::new(2.0)?, Scale::new(8.0)?);
/// let rule = add_rule(a, b, Pow2Rounding::Down.of_word(0));
/// assert_eq!((rule.scale.to_f32(), rule.data_factors), (8.0, [0.25, 1.0]));
/// assert_eq!(add_rule(a, b, Pow2Rounding::Up.of_word(0)).scale.to_f32(), 16.0);
/// # Ok::<(), fp8_core::scaled::ScaledError>(())
/// ```
pub fn add_rule(a: Scale, b: Scale, round: Pow2Round) -> Aligned {
    let (large, small) = if a < b { (b, a) } else { (a, b) };
    if small.is_zero() {
        return aligned(large, a, b);
    }
    let ratio = value(small) / value(large);
    // A ratio, so that the size does not depend on where in the range the scales lie.
    let growth = round_relative(large, (1.0 + ratio * ratio).sqrt(), round);
    let scale = split(value(large) * growth, 1.0).scale;
    aligned(scale, a, b)
}

/// The factor by which the rounded size of `scale * growth` is above `scale`.
fn round_relative(scale: Scale, growth: f64, round: Pow2Round) -> f64 {
    if scale.is_power_of_two() {
        f64::from(round.round(growth as f32))
    } else {
        let size = (value(scale) * growth) as f32;
        f64::from(round.round(size)) / value(scale)
    }
}

/// Maximum, minimum, selection and concatenation: the larger scale.
pub fn extreme_rule(a: Scale, b: Scale) -> Aligned {
    aligned(if a < b { b } else { a }, a, b)
}

/// Multiplication: `a * b`.
///
/// ```
/// # use fp8_core::scaled::*;
/// let (a, b) = (Scale::new(8.0)?, Scale::new(2.0)?);
/// assert_eq!(mul_rule(a, b).scale.to_f32(), 16.0);
/// // Beyond the range of scales the rest goes into the data.
/// assert_eq!(mul_rule(Scale::MAX, b).data_factor, 2.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn mul_rule(a: Scale, b: Scale) -> Factored {
    split(value(a) * value(b), 1.0)
}

/// Division: `a / b`.
///
/// # Errors
/// If `b` is 0.
///
/// ```
/// # use fp8_core::scaled::*;
/// let (a, b) = (Scale::new(8.0)?, Scale::new(2.0)?);
/// assert_eq!(div_rule(a, b)?.scale.to_f32(), 4.0);
/// assert!(div_rule(a, Scale::ZERO).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn div_rule(a: Scale, b: Scale) -> Result<Factored, ScaledError> {
    if b.is_zero() {
        return Err(ScaledError::Zero { op: "div" });
    }
    Ok(split(value(a) / value(b), 1.0))
}

/// A product of matrices with `contracted` terms in each sum, or a convolution with that many inputs to each value:
/// `a * b * r(sqrt(contracted))`.
///
/// ```
/// # use fp8_core::scaled::*;
/// let (a, b) = (Scale::new(8.0)?, Scale::new(2.0)?);
/// let rule = matmul_rule(a, b, 1000, Pow2Round::default());
/// assert_eq!((rule.scale.to_f32(), rule.data_factor), (16.0 * 16.0, 1.0 / 16.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn matmul_rule(a: Scale, b: Scale, contracted: usize, round: Pow2Round) -> Factored {
    let root = root(contracted, round);
    split(value(a) * value(b) * root, 1.0 / root)
}

/// The rounded square root of a length; 1 for a length of 0.
fn root(length: usize, round: Pow2Round) -> f64 {
    f64::from(round.round((length.max(1) as f64).sqrt() as f32))
}

/// A sum of `length` values: `s * r(sqrt(length))`.
pub fn sum_rule(s: Scale, length: usize, round: Pow2Round) -> Factored {
    let root = root(length, round);
    split(value(s) * root, 1.0 / root)
}

/// A mean of `length` values: that of their sum, divided by the constant `length`. The factor is for the sum of the data.
pub fn mean_rule(s: Scale, length: usize, round: Pow2Round) -> Factored {
    let root = root(length, round);
    let (power, mantissa) = constant_rule(length.max(1) as f64);
    split(
        value(s) * root / value(power),
        1.0 / root / f64::from(mantissa),
    )
}

/// A power with a whole exponent: `s^exponent`.
///
/// # Errors
/// If the exponent is negative and `s` is 0.
pub fn powi_rule(s: Scale, exponent: i32) -> Result<Factored, ScaledError> {
    if s.is_zero() && exponent < 0 {
        return Err(ScaledError::Zero { op: "powi" });
    }
    Ok(match s.exponent() {
        // In whole numbers: the power may be far beyond f64.
        Some(own) => {
            let whole = i64::from(own) * i64::from(exponent);
            let held = whole.clamp(-126, 127);
            let rest = (whole - held).clamp(-1100, 1100) as i32;
            Factored {
                scale: Scale::power_of_two(held as i32),
                data_factor: 2f64.powi(rest) as f32,
            }
        }
        None if s.is_zero() && exponent == 0 => Factored {
            scale: Scale::ONE,
            data_factor: 1.0,
        },
        None => split(value(s).powi(exponent), 1.0),
    })
}

/// A square root: `r(sqrt(s))`, where the data of the operand are multiplied by the factor (1 or 2) under the root.
///
/// ```
/// use fp8_core::scaled::{Scale, sqrt_rule};
/// let rule = sqrt_rule(Scale::new(8.0)?);
/// assert_eq!((rule.scale.to_f32(), rule.data_factor), (2.0, 2.0));
/// # Ok::<(), fp8_core::scaled::ScaledError>(())
/// ```
pub fn sqrt_rule(s: Scale) -> Factored {
    let scale = floor_to_power_of_two((value(s).sqrt()) as f32);
    let rest = match scale {
        0.0 => 0.0,
        root => value(s) / f64::from(root) / f64::from(root),
    };
    split(f64::from(scale), rest)
}

/// A reciprocal square root: `r(1 / sqrt(s))`, where the data of the operand are multiplied by the factor (1 or 1/2) under the
/// root.
///
/// # Errors
/// If `s` is 0.
pub fn rsqrt_rule(s: Scale) -> Result<Factored, ScaledError> {
    if s.is_zero() {
        return Err(ScaledError::Zero { op: "rsqrt" });
    }
    let scale = f64::from(floor_to_power_of_two((1.0 / value(s).sqrt()) as f32));
    Ok(split(scale, value(s) * scale * scale))
}

/// A constant: the power of two not above its magnitude, and the rest, from 1 up to 2. Zero has the zero scale.
pub fn constant_rule(constant: f64) -> (Scale, f32) {
    if constant == 0.0 || !constant.is_finite() {
        let scale = if constant == 0.0 {
            Scale::ZERO
        } else {
            Scale::ONE
        };
        return (scale, constant as f32);
    }
    let bits = constant.abs().to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let scale = Scale::power_of_two(exponent);
    let mantissa = (constant / value(scale)) as f32;
    if mantissa.abs() == 2.0 && exponent < 127 {
        // Rounded up to the next power of two.
        return (Scale::power_of_two(exponent + 1), mantissa / 2.0);
    }
    (scale, mantissa)
}

/// The factor of dynamic rescaling from a norm of the data: `max(r(norm), 2^-14)`, by which the data are divided and the scale
/// multiplied. 1 for a norm that is not finite, which leaves the tensor as it is.
pub fn rescale_norm(norm: f32) -> f32 {
    if !norm.is_finite() {
        return 1.0;
    }
    floor_to_power_of_two(norm.abs()).max(2f32.powi(-14))
}
