//! From the amax (max |x|) of a tensor to its scale.
//!
//! A `quant_scale` multiplies a value before the cast, a `dequant_scale` after it; one is the [`reciprocal`] of the
//! other. Every formula is plain f32 arithmetic, rounded to nearest: `MAX / amax` in f32 equals torchao's detour
//! through f64 bit for bit, whereas a multiplication by a reciprocal is one ulp off in a quarter of all values.

use crate::{E8M0, Format, error::ScaleError};

/// The smallest amax that [`dynamic_quant_scale`] and [`static_dequant_scale`] divide by, torchao's epsilon.
pub const AMAX_EPSILON: f32 = 1e-12;

/// The quant_scale of dynamic scaling, torchao's `amax_to_scale`: `MAX / max(amax, 1e-12)`.
///
/// An amax of 0 gives a large finite scale; an infinite one gives 0, under which every value dequantizes to NaN, so that
/// the failure shows; NaN gives NaN.
///
/// ```
/// use fp8_core::{Format, dynamic_quant_scale};
/// assert_eq!(dynamic_quant_scale(2.0, Format::E4M3), 224.0);
/// assert!(dynamic_quant_scale(0.0, Format::E4M3).is_finite());
/// ```
pub fn dynamic_quant_scale(amax: f32, format: Format) -> f32 {
    format.max() / at_least(amax, AMAX_EPSILON)
}

/// `amax`, but no less than `least`. Unlike `f32::max` it keeps NaN.
fn at_least(amax: f32, least: f32) -> f32 {
    if amax < least { least } else { amax }
}

/// The dequant_scale of inputs in inference, as serving engines compute it: `max(amax, 1e-12) / MAX`.
///
/// compressed-tensors and vLLM's scales per token make it first and divide values by it, as a cast that
/// [divides](crate::Cast::divides) does. An infinite amax gives infinity, NaN gives NaN; [`static_dequant_scale`] refuses both.
///
/// ```
/// use fp8_core::{Format, inference_dequant_scale};
/// assert_eq!(inference_dequant_scale(896.0, Format::E4M3), 2.0);
/// assert_eq!(inference_dequant_scale(0.0, Format::E4M3), 1e-12 / 448.0);
/// ```
pub fn inference_dequant_scale(amax: f32, format: Format) -> f32 {
    at_least(amax, AMAX_EPSILON) / format.max()
}

/// The reciprocal of [`inference_dequant_scale`]. Casts multiply by it only after it is rounded down to a power of two; others divide by
/// the dequant_scale. A product with this reciprocal is an ulp from that quotient in many cases, which moves some values between two
/// codes to the other one.
///
/// Both roundings together may also leave it an ulp from [`dynamic_quant_scale`], which trains.
///
/// ```
/// use fp8_core::{Format, dynamic_quant_scale, inference_quant_scale};
/// assert_eq!(inference_quant_scale(896.0, Format::E4M3), 0.5);
/// assert_eq!(inference_quant_scale(2.0, Format::E4M3), 223.99998);
/// assert_eq!(dynamic_quant_scale(2.0, Format::E4M3), 224.0);
/// ```
pub fn inference_quant_scale(amax: f32, format: Format) -> f32 {
    reciprocal(inference_dequant_scale(amax, format))
}

/// The quant_scale of Transformer Engine's current scaling: `MAX / amax`, where an amax below `eps` counts as `eps`.
///
/// Where that is undefined (amax zero with `eps` 0, infinite or NaN) the scale is 1. A quotient beyond f32 gives
/// `f32::MAX`.
///
/// ```
/// use fp8_core::{Format, current_quant_scale};
/// assert_eq!(current_quant_scale(2.0, Format::E4M3, 0.0), 224.0);
/// assert_eq!(current_quant_scale(2.0, Format::E4M3, 4.0), 112.0); // eps counts
/// assert_eq!(current_quant_scale(0.0, Format::E4M3, 0.0), 1.0);
/// ```
pub fn current_quant_scale(amax: f32, format: Format, eps: f32) -> f32 {
    finite_quotient(format.max(), at_least(amax, eps)).unwrap_or(1.0)
}

/// The quant_scale of delayed scaling, Transformer Engine's: `MAX * 2^-margin / amax`.
///
/// Where that is undefined (amax zero, infinite or NaN) the `previous` quant_scale stays.
///
/// The scale outlives the step that made it, so for every amax and margin it and its [`reciprocal`] are finite and not 0: a
/// quotient beyond f32 gives `f32::MAX`, as in Transformer Engine, and one below the normal numbers, whose reciprocal would
/// be infinite, gives `f32::MIN_POSITIVE`. The latter takes an amax near 1e38 and a margin.
///
/// ```
/// use fp8_core::{Format, delayed_quant_scale};
/// assert_eq!(delayed_quant_scale(2.0, Format::E4M3, 1, 1.0), 112.0); // one bit of margin
/// assert_eq!(delayed_quant_scale(f32::NAN, Format::E4M3, 0, 7.0), 7.0);
/// ```
pub fn delayed_quant_scale(amax: f32, format: Format, margin: i32, previous: f32) -> f32 {
    let max = (f64::from(format.max()) / 2f64.powi(margin)) as f32;
    finite_quotient(max, amax).map_or(previous, |scale| scale.max(f32::MIN_POSITIVE))
}

/// The dequant_scale of a calibrated tensor: `max(amax, 1e-12) / MAX`, never 0.
///
/// ```
/// use fp8_core::{Format, static_dequant_scale};
/// assert_eq!(static_dequant_scale(896.0, Format::E4M3), Ok(2.0));
/// assert!(static_dequant_scale(f32::NAN, Format::E4M3).is_err());
/// ```
///
/// # Errors
/// If the amax is infinite, NaN or negative: the calibration went wrong.
pub fn static_dequant_scale(amax: f32, format: Format) -> Result<f32, ScaleError> {
    if !amax.is_finite() {
        return Err(ScaleError::NonFinite { amax });
    }
    if amax < 0.0 {
        return Err(ScaleError::Negative { amax });
    }
    Ok(amax.max(AMAX_EPSILON) / format.max())
}

fn finite_quotient(max: f32, amax: f32) -> Option<f32> {
    // No amax is negative; a stray sign must not turn the scale negative.
    let defined = amax > 0.0 && amax.is_finite();
    defined.then(|| (max / amax).min(f32::MAX))
}

/// `quant_scale` with its mantissa cleared: the largest power of two not above it, as torchao's `_round_scale_down_to_power_of_2`.
///
/// NaN and infinities stay as they are; zero and f32 subnormals give zero.
pub fn floor_to_power_of_two(quant_scale: f32) -> f32 {
    if quant_scale.is_nan() {
        quant_scale
    } else {
        f32::from_bits(quant_scale.to_bits() & 0xFF80_0000)
    }
}

/// `1 / scale` in f32: from a quant_scale to its dequant_scale and back.
#[inline]
pub fn reciprocal(scale: f32) -> f32 {
    1.0 / scale
}

/// The dequant_scale of an MX block by torchao's default rule RCEIL: the least power of two not below `amax / MAX`.
///
/// No element of the block overflows. An amax of 0 gives 2^-127; an infinite or NaN one gives NaN.
///
/// ```
/// use fp8_core::{Format, mx_dequant_scale_rceil};
/// assert_eq!(mx_dequant_scale_rceil(448.0, Format::E4M3).to_f32(), 1.0);
/// assert_eq!(mx_dequant_scale_rceil(449.0, Format::E4M3).to_f32(), 2.0);
/// ```
#[inline]
pub fn mx_dequant_scale_rceil(amax: f32, format: Format) -> E8M0 {
    // Without branches, so that a loop over many of them is compiled to vectors.
    let bits = (amax.abs() / format.max()).to_bits();
    let (exponent, fraction) = (bits >> 23, bits & 0x007F_FFFF);
    // 2^-127 is an f32 subnormal, with the fraction 0x400000.
    let exact = if exponent == 0 { 0x0040_0000 } else { 0 };
    let code = exponent + u32::from(fraction > exact);
    E8M0::from_bits(match amax.is_finite() {
        true => code as u8,
        false => E8M0::NAN.to_bits(),
    })
}

/// The dequant_scale of an MX block by the rule FLOOR of the OCP specification: `2^(floor(log2 amax) - emax)`.
///
/// Elements may overflow, by less than a factor of two. An amax of 0 gives 2^-127; an infinite or NaN one gives NaN.
///
/// ```
/// use fp8_core::{Format, mx_dequant_scale_floor};
/// assert_eq!(mx_dequant_scale_floor(256.0, Format::E4M3).to_f32(), 1.0);
/// assert_eq!(mx_dequant_scale_floor(500.0, Format::E4M3).to_f32(), 1.0); // 500 saturates
/// ```
pub fn mx_dequant_scale_floor(amax: f32, format: Format) -> E8M0 {
    if !amax.is_finite() {
        return E8M0::NAN;
    }
    let exponent = (amax.to_bits() >> 23 & 0xFF) as i32 - format.max_exponent();
    E8M0::from_bits(exponent.max(0) as u8)
}
