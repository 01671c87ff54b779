//! The FP8 casts of probabilities and of their gradients: a row becomes the values of its codes, under one power of two.

use super::layout::PANEL;
use crate::base::simd::simd;
use fp8_core::{Cast, Format, mx_dequant_scale_rceil, reciprocal};

/// Turns `row` into the values of the codes of `factor * row`, with a factor above 0. `amax` is that of `factor * row`, if it is known. The length is
/// a multiple of 32.
///
/// A row with Inf or NaN becomes NaN. A zero has no sign.
pub(super) fn cast_row(format: Format, row: &mut [f32], factor: f32, amax: Option<f32>) {
    let amax = amax.unwrap_or_else(|| {
        simd(
            #[inline(always)]
            // Products with a positive factor have the order of the values.
            || largest_magnitude(row) * factor,
        )
    });
    let dequant_scale = mx_dequant_scale_rceil(amax, format).to_f32();
    // Within these limits the numbers below are normal.
    if !(2f32.powi(-90)..=2f32.powi(60)).contains(&dequant_scale) {
        return cast_by_definition(format, row, factor, dequant_scale);
    }
    let steps = Steps::new(format, dequant_scale);
    simd(
        #[inline(always)]
        || {
            let (chunks, _) = row.as_chunks_mut::<PANEL>();
            // Most rows need no product.
            match factor == 1.0 {
                true => chunks
                    .iter_mut()
                    .flatten()
                    .for_each(|x| *x = steps.round(*x)),
                false => chunks
                    .iter_mut()
                    .flatten()
                    .for_each(|x| *x = steps.round(*x * factor)),
            }
        },
    );
}

/// The definition: [`Cast::encode`] and [`Format::decode`].
fn cast_by_definition(format: Format, row: &mut [f32], factor: f32, dequant_scale: f32) {
    let (cast, quant_scale) = (Cast::new(format), reciprocal(dequant_scale));
    for x in row {
        *x = format.decode(cast.encode_scaled(*x * factor, quant_scale, 0)) * dequant_scale;
    }
}

/// The largest magnitude. The bits of magnitudes have the order of their values, with NaN on top.
#[inline(always)]
fn largest_magnitude(row: &[f32]) -> f32 {
    let mut lanes = [0u32; PANEL];
    for chunk in row.as_chunks::<PANEL>().0 {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = (*lane).max(x.to_bits() & 0x7FFF_FFFF);
        }
    }
    f32::from_bits(lanes.into_iter().max().unwrap_or(0))
}

/// The distances of the values of a format under a scale.
#[derive(Clone, Copy)]
struct Steps {
    /// The exponent field of the least normal value.
    least_exponent: u32,
    /// From the exponent field of a value to the bits of 1.5 * 2^23 times the step there.
    to_large: u32,
}

impl Steps {
    fn new(format: Format, dequant_scale: f32) -> Self {
        Self {
            least_exponent: (format.min_normal() * dequant_scale).to_bits() & EXPONENT,
            to_large: ((23 - format.mantissa_bits()) << 23) + 0x0040_0000,
        }
    }

    /// Rounds to the nearest multiple of the step, ties to the even one: near 1.5 * 2^23 steps, a step is the last place.
    #[inline(always)]
    fn round(self, x: f32) -> f32 {
        let exponent = (x.to_bits() & EXPONENT).max(self.least_exponent);
        let large = f32::from_bits(exponent + self.to_large);
        (x + large) - large
    }
}

const EXPONENT: u32 = 0x7F80_0000;

#[cfg(test)]
mod tests {
    use super::*;

    /// Every magnitude at which rounding changes, and its neighbours, for scales of all sizes.
    #[test]
    fn rows_are_cast_by_the_definition() {
        for format in Format::ALL {
            let mut halves = vec![0.0, format.max()];
            for code in 0..format.max_code() {
                let (a, b) = (format.decode(code), format.decode(code + 1));
                let middle = (a + b) / 2.0;
                halves.extend([a, middle, middle.next_down(), middle.next_up()]);
            }
            for exponent in [-140, -100, -91, -90, -30, -1, 0, 7, 59, 60, 61, 90] {
                let size = 2f64.powi(exponent) as f32;
                for factor in [1.0f32, 0.37, 4.0] {
                    let mut row: Vec<f32> = halves.iter().map(|x| x * size).collect();
                    row.extend(halves.iter().map(|x| -x * size));
                    row.resize(row.len().next_multiple_of(PANEL), 0.0);
                    let amax = row.iter().fold(0f32, |a, x| a.max((x * factor).abs()));
                    let dequant_scale = mx_dequant_scale_rceil(amax, format).to_f32();
                    let mut expected = row.clone();
                    cast_by_definition(format, &mut expected, factor, dequant_scale);
                    let mut known = row.clone();
                    cast_row(format, &mut row, factor, None);
                    cast_row(format, &mut known, factor, Some(amax));
                    assert_eq!(row, expected, "{format:?} {exponent} {factor}");
                    assert_eq!(known, expected, "{format:?} {exponent} {factor}");
                    assert!(amax == 0.0 || row.iter().any(|x| *x != 0.0));
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_shows() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = [1.0; PANEL];
            row[17] = bad;
            cast_row(Format::E4M3, &mut row, 1.0, None);
            assert!(row.iter().all(|x| x.is_nan()), "{bad}");
        }
        let mut zeros = [0.0; PANEL];
        cast_row(Format::E5M2, &mut zeros, 1.0, None);
        assert_eq!(zeros, [0.0; PANEL]);
    }
}
