//! From amaxes to scales.

use crate::base::data::scales::{CurrentScale, ScalePolicy};
use crate::base::simd::simd;
use fp8_core::Format;

/// The quant_scale and the dequant_scale of each amax.
pub(super) fn of_amaxes(
    amaxes: &[f32],
    format: Format,
    current: CurrentScale,
    quant_scales: &mut [f32],
    dequant_scales: &mut [f32],
) {
    if current.divides() {
        each(amaxes, dequant_scales, move |amax| {
            fp8_core::inference_dequant_scale(amax, format)
        });
        reciprocals(dequant_scales, quant_scales);
    } else {
        multiplied(amaxes, format, current, quant_scales);
        reciprocals(quant_scales, dequant_scales);
    }
}

/// The quant_scale of each amax, where it is made first.
fn multiplied(amaxes: &[f32], format: Format, current: CurrentScale, scales: &mut [f32]) {
    match current.policy {
        ScalePolicy::Dynamic => each(amaxes, scales, move |amax| {
            fp8_core::dynamic_quant_scale(amax, format)
        }),
        ScalePolicy::Inference => each(amaxes, scales, move |amax| {
            fp8_core::inference_quant_scale(amax, format)
        }),
        ScalePolicy::Mx => each(
            amaxes,
            scales,
            #[inline(always)]
            move |amax| {
                let dequant_scale = fp8_core::mx_dequant_scale_rceil(amax, format);
                dequant_scale.reciprocal().to_f32()
            },
        ),
        ScalePolicy::Current { eps } => each(amaxes, scales, move |amax| {
            fp8_core::current_quant_scale(amax, format, eps)
        }),
    }
    if current.power_of_two {
        for scale in scales {
            *scale = fp8_core::floor_to_power_of_two(*scale);
        }
    }
}

/// `to = f(from)`, for each element.
fn each(from: &[f32], to: &mut [f32], f: impl Fn(f32) -> f32) {
    simd(
        #[inline(always)]
        move || {
            for (to, &from) in to.iter_mut().zip(from) {
                *to = f(from);
            }
        },
    );
}

/// The dequant_scale of each quant_scale, and the other way.
pub(super) fn reciprocals(scales: &[f32], inverse: &mut [f32]) {
    each(scales, inverse, fp8_core::reciprocal);
}
