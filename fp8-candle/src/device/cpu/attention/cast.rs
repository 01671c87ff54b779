//! The FP8 casts of probabilities and of their gradients: a row becomes the values of its codes, under one power of two.

use crate::base::simd::simd;
use fp8_core::{Cast, Format, mx_dequant_scale_rceil, reciprocal};

/// The cast of rows to a format.
#[derive(Clone, Copy)]
pub(super) struct RowCast {
    format: Format,
    /// The bits of the largest value.
    max: u32,
    /// The exponent field of the least normal value.
    min_normal: u32,
    /// From a power of two to 1.5 * 2^23 times the step of the values from there on.
    to_large: f32,
}

impl RowCast {
    pub(super) fn new(format: Format) -> Self {
        Self {
            format,
            max: format.max().to_bits(),
            min_normal: format.min_normal().to_bits() & EXPONENT,
            to_large: 1.5 * (1u32 << (23 - format.mantissa_bits())) as f32,
        }
    }

    /// Turns `row` into the values of the codes of `factor * row`, with a factor above 0. `amax` is that of `factor * row`.
    ///
    /// A row with Inf or NaN becomes NaN. A zero has no sign.
    #[inline(always)]
    pub(super) fn apply(self, row: &mut [f32], factor: f32, amax: f32) {
        let Some(steps) = self.steps(amax) else {
            return self.by_definition(row, factor, amax);
        };
        // Most rows need no product.
        if factor == 1.0 {
            for x in row {
                *x = steps.round(*x);
            }
        } else {
            for x in row {
                *x = steps.round(*x * factor);
            }
        }
    }

    /// Turns `row` into the values of its codes.
    pub(super) fn round(self, row: &mut [f32]) {
        simd(
            #[inline(always)]
            || self.apply(row, 1.0, amax(row)),
        );
    }

    /// The definition: [`Cast::encode`] and [`Format::decode`].
    #[cold]
    #[inline(never)]
    fn by_definition(self, row: &mut [f32], factor: f32, amax: f32) {
        let dequant_scale = mx_dequant_scale_rceil(amax, self.format).to_f32();
        let (cast, quant_scale) = (Cast::new(self.format), reciprocal(dequant_scale));
        for x in row {
            let code = cast.encode_scaled(*x * factor, quant_scale, 0);
            *x = self.format.decode(code) * dequant_scale;
        }
    }

    /// The steps under [`mx_dequant_scale_rceil`]; none where numbers below would not be normal.
    #[inline(always)]
    pub(super) fn steps(self, amax: f32) -> Option<Steps> {
        const FRACTION: u32 = 0x007F_FFFF;
        let bits = amax.to_bits();
        if !(LEAST.to_bits()..=MOST.to_bits()).contains(&bits) {
            return None;
        }
        // amax / MAX is at most the quotient of the powers of two, or else at most twice that.
        let is_above = u32::from(bits & FRACTION > self.max & FRACTION);
        let (amax, max) = ((bits & EXPONENT) + (is_above << 23), self.max & EXPONENT);
        Some(Steps {
            // The least normal value times the scale, amax / max.
            least_exponent: amax + self.min_normal - max,
            to_large: self.to_large,
        })
    }
}

/// The amaxes between which all numbers of [`RowCast::steps`] are normal, for every format.
const LEAST: f32 = f32::from_bits((127 - 70) << 23);
const MOST: f32 = f32::from_bits((127 + 60) << 23);

/// The largest magnitude. The bits of magnitudes have the order of their values, with NaN on top.
#[inline(always)]
pub(super) fn amax(row: &[f32]) -> f32 {
    // In a loop that compilers recognize.
    let largest = row
        .iter()
        .fold(0, |largest, x| (x.to_bits() & 0x7FFF_FFFF).max(largest));
    f32::from_bits(largest)
}

/// The distances of the values of a format under a scale.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    /// The exponent field of the least normal value.
    pub(super) least_exponent: u32,
    /// That of [`RowCast`].
    pub(super) to_large: f32,
}

impl Steps {
    /// Rounds to the nearest multiple of the step, ties to the even one: near 1.5 * 2^23 steps, a step is the last place.
    #[inline(always)]
    fn round(self, x: f32) -> f32 {
        let power = f32::from_bits((x.to_bits() & EXPONENT).max(self.least_exponent));
        // Both are rounded once, and the products are exact.
        let sum = power.mul_add(self.to_large, x);
        power.mul_add(-self.to_large, sum)
    }
}

pub(super) const EXPONENT: u32 = 0x7F80_0000;

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
            let cast = RowCast::new(format);
            for exponent in [-140, -100, -91, -90, -30, -1, 0, 7, 44, 52, 60, 61, 90] {
                let size = 2f64.powi(exponent) as f32;
                for factor in [1.0f32, 0.37, 4.0] {
                    let mut row: Vec<f32> = halves.iter().map(|x| x * size).collect();
                    row.extend(halves.iter().map(|x| -x * size));
                    let amax = row.iter().fold(0f32, |a, x| a.max((x * factor).abs()));
                    assert_eq!(super::amax(&row) * factor, amax);
                    let mut expected = row.clone();
                    cast.by_definition(&mut expected, factor, amax);
                    cast.apply(&mut row, factor, amax);
                    assert_eq!(row, expected, "{format:?} {exponent} {factor}");
                    assert!(amax == 0.0 || row.iter().any(|x| *x != 0.0));
                }
            }
        }
    }

    /// The scales of all amaxes near those where they change.
    #[test]
    fn steps_are_those_of_the_scale() {
        for format in Format::ALL {
            let cast = RowCast::new(format);
            for exponent in -75..65 {
                for fraction in [0, 1, 0x3F_FFFF, 0x40_0000, 0x7F_FFFF]
                    .into_iter()
                    .chain((0x5F_FFF0..0x60_0010).chain(0x6F_FFF0..0x70_0010))
                {
                    let amax = f32::from_bits(((exponent + 127) as u32) << 23 | fraction);
                    let Some(steps) = cast.steps(amax) else {
                        assert!(!(LEAST..=MOST).contains(&amax));
                        continue;
                    };
                    let scale = mx_dequant_scale_rceil(amax, format).to_f32();
                    let least = format.min_normal() * scale;
                    assert_eq!(f32::from_bits(steps.least_exponent), least, "{amax:e}");
                    let smallest = format.min_subnormal() * scale;
                    assert!(smallest.is_normal() && (amax * steps.to_large).is_finite());
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_shows() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = [1.0; 40];
            row[17] = bad;
            RowCast::new(Format::E4M3).round(&mut row);
            assert!(row.iter().all(|x| x.is_nan()), "{bad}");
        }
        let mut zeros = [0.0; 40];
        RowCast::new(Format::E5M2).round(&mut zeros);
        assert_eq!(zeros, [0.0; 40]);
    }
}
