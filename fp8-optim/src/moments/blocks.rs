//! Blocks of a moment as E4M3 codes.

use fp8_candle::parallel::vectorized;
use fp8_core::{Cast, Format, Rounding, ScaleGrid, StochasticKey, encode_rows};

use super::curve::{Curve, LARGEST, shares};

/// Elements of a block.
pub(crate) const BLOCK: usize = 128;

/// Elements that are cast at a time.
const GROUP: usize = 4 * BLOCK;

/// How values become codes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Coding {
    /// Whether blocks choose a curve.
    pub(crate) expands: bool,
    /// Whether values above 0 stay above 0.
    pub(crate) non_negative: bool,
    /// None: codes are rounded to nearest.
    pub(crate) key: Option<StochasticKey>,
}

/// The values of some blocks, of which the last may be shorter.
pub(crate) fn decode(codes: &[u8], amaxes: &[f32], curves: &[u8], values: &mut [f32]) {
    let blocks = values.chunks_mut(BLOCK).zip(codes.chunks(BLOCK));
    for ((values, codes), (&amax, &curve)) in blocks.zip(amaxes.iter().zip(curves)) {
        let shares = shares(Curve::of(curve));
        for (value, code) in values.iter_mut().zip(codes) {
            *value = amax * shares[usize::from(*code)];
        }
    }
}

/// The codes, amaxes and curves of some blocks, the first of which begins with element number `first`. The last may be shorter.
pub(crate) fn encode(
    values: &[f32],
    coding: Coding,
    first: u64,
    (codes, amaxes, curves): (&mut [u8], &mut [f32], &mut [u8]),
) {
    let rounding = match coding.key {
        Some(key) => Rounding::Stochastic(key),
        None => Rounding::NearestEven,
    };
    let cast = Cast::new(Format::E4M3).with_rounding(rounding);
    let mut row = first as usize / BLOCK;
    let outs = codes
        .chunks_mut(GROUP)
        .zip(amaxes.chunks_mut(GROUP / BLOCK));
    let outs = outs.zip(curves.chunks_mut(GROUP / BLOCK));
    for (values, ((codes, amaxes), curves)) in values.chunks(GROUP).zip(outs) {
        let mut raised = [0f32; GROUP];
        let pieces = values.chunks(BLOCK).zip(raised.chunks_mut(BLOCK));
        for ((values, raised), (amax, curve)) in pieces.zip(amaxes.iter_mut().zip(curves)) {
            (*amax, *curve) = raise_block(values, coding.expands, raised);
        }
        // As rows of a matrix, which numbers its elements.
        let rows = amaxes.len();
        let grid = ScaleGrid::tensorwise(row + rows, BLOCK);
        let mut whole = [0u8; GROUP];
        let len = rows * BLOCK;
        encode_rows(&cast, &raised[..len], row, &grid, &[1.], &mut whole[..len]);
        codes.copy_from_slice(&whole[..codes.len()]);
        row += rows;
        if coding.non_negative {
            vectorized(
                #[inline(always)]
                || {
                    for (code, value) in codes.iter_mut().zip(values) {
                        *code = (*code).max(u8::from(*value > 0.));
                    }
                },
            );
        }
    }
}

/// Puts the values of a block on its curve; returns its amax and the curve.
fn raise_block(values: &[f32], expands: bool, raised: &mut [f32]) -> (f32, u8) {
    let (largest, sum) = vectorized(
        #[inline(always)]
        || measure(values),
    );
    // A moment that has overflowed keeps the largest number.
    let amax = largest.min(f32::MAX);
    let curve = match expands {
        true => Curve::for_spread(amax * values.len() as f32 / sum),
        false => Curve::Linear,
    };
    match curve {
        Curve::Linear => raise(values, amax, raised, |t| Curve::Linear.raise(t)),
        Curve::Square => raise(values, amax, raised, |t| Curve::Square.raise(t)),
        Curve::Fourth => raise(values, amax, raised, |t| Curve::Fourth.raise(t)),
        Curve::Root => raise(values, amax, raised, |t| Curve::Root.raise(t)),
    }
    (amax, curve as u8)
}

/// The largest magnitude and the sum of magnitudes, in an order that is the same for all instruction sets.
#[inline(always)]
fn measure(values: &[f32]) -> (f32, f32) {
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (mut largest, mut sums) = ([0f32; LANES], [0f32; LANES]);
    let (whole, rest) = values.as_chunks::<LANES>();
    for lanes in whole {
        for i in 0..LANES {
            largest[i] = larger(largest[i], lanes[i].abs());
            sums[i] += lanes[i].abs();
        }
    }
    for (i, x) in rest.iter().enumerate() {
        largest[i] = larger(largest[i], x.abs());
        sums[i] += x.abs();
    }
    (largest.into_iter().fold(0., larger), sums.into_iter().sum())
}

fn raise(values: &[f32], amax: f32, raised: &mut [f32], raise: impl Fn(f32) -> f32 + Copy) {
    // A block of zeros.
    let divisor = if amax == 0. { 1. } else { amax };
    vectorized(
        #[inline(always)]
        || {
            for (raised, x) in raised.iter_mut().zip(values) {
                let t = x.abs() / divisor;
                // NaN stays NaN.
                let t = if t > 1. { 1. } else { t };
                *raised = (LARGEST * raise(t)).copysign(*x);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::curve::CURVES;
    use super::*;

    const KEY: StochasticKey = StochasticKey {
        seed: 5,
        step: 3,
        tensor: 1,
    };

    /// Element by element, in f64.
    fn reference(values: &[f32], coding: Coding, first: u64) -> (Vec<u8>, Vec<f64>) {
        let mut codes = vec![];
        let mut decoded = vec![];
        for (b, block) in values.chunks(BLOCK).enumerate() {
            let amax = block.iter().fold(0f32, |max, x| max.max(x.abs())) as f64;
            let mean = block.iter().map(|x| x.abs() as f64).sum::<f64>() / block.len() as f64;
            let k = match amax / mean {
                _ if !coding.expands => 1.,
                s if s <= 1.25 => 4.,
                s if s <= 10. => 2.,
                s if s <= 48. => 1.,
                _ => 0.5,
            };
            for (i, &x) in block.iter().enumerate() {
                let t = if amax == 0. {
                    0.
                } else {
                    x.abs() as f64 / amax
                };
                let y = (448. * t.powf(k)).copysign(x as f64) as f32;
                let rounding = coding
                    .key
                    .map_or(Rounding::NearestEven, Rounding::Stochastic);
                let cast = Cast::new(Format::E4M3).with_rounding(rounding);
                let mut code = cast.encode(y, first + (b * BLOCK + i) as u64);
                if coding.non_negative && x > 0. && code == 0 {
                    code = 1;
                }
                codes.push(code);
                let t = Format::E4M3.decode(code).abs() as f64 / 448.;
                decoded.push((amax * t.powf(1. / k)).copysign(x as f64));
            }
        }
        (codes, decoded)
    }

    /// Blocks of every spread: each curve is used.
    fn values(len: usize, sign: bool) -> Vec<f32> {
        (0..len)
            .map(|i| {
                let (block, noise) = (i / BLOCK, (i as f32 * 12.9898).sin());
                let x = match block % 5 {
                    0 => 1. + 0.1 * noise,
                    1 => noise,
                    2 => noise.abs().powi(200) + 1e-4,
                    3 if i % BLOCK == 7 => 50.,
                    3 => 1e-3 * noise,
                    _ => 0.,
                };
                let x = x * 10f32.powi(block as i32 % 7 - 6);
                if sign { x } else { x.abs() }
            })
            .collect()
    }

    fn coded(values: &[f32], coding: Coding, first: u64) -> (Vec<u8>, Vec<f32>, Vec<u8>) {
        let blocks = values.len().div_ceil(BLOCK);
        let (mut codes, mut amaxes) = (vec![0; values.len()], vec![0.; blocks]);
        let mut curves = vec![0; blocks];
        encode(
            values,
            coding,
            first,
            (&mut codes, &mut amaxes, &mut curves),
        );
        (codes, amaxes, curves)
    }

    #[test]
    fn codes_and_values_are_those_of_the_definition() {
        for key in [None, Some(KEY)] {
            for expands in [false, true] {
                for non_negative in [false, true] {
                    let coding = Coding {
                        expands,
                        non_negative,
                        key,
                    };
                    let values = values(20 * BLOCK + 57, !non_negative);
                    let first = 3 * BLOCK as u64;
                    let (codes, amaxes, curves) = coded(&values, coding, first);
                    let (expected, decoded) = reference(&values, coding, first);
                    // f32 may round to the other side of a border between two codes, rarely.
                    let differ = codes.iter().zip(&expected).filter(|(a, b)| a != b);
                    assert!(differ.count() <= 3, "{coding:?}");
                    assert!(expands == curves.iter().any(|curve| *curve > 0));
                    let mut found = vec![0.; values.len()];
                    decode(&codes, &amaxes, &curves, &mut found);
                    for (i, (found, exact)) in found.iter().zip(decoded).enumerate() {
                        if codes[i] == expected[i] {
                            let error = (*found as f64 - exact).abs();
                            assert!(error <= 1e-6 * exact.abs(), "{i}: {found} {exact}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_curve_is_inverted_and_the_largest_comes_back_exactly() {
        let coding = Coding {
            expands: true,
            ..Coding::default()
        };
        let values = values(35 * BLOCK, true);
        let (codes, amaxes, curves) = coded(&values, coding, 0);
        let used: std::collections::BTreeSet<u8> = curves.iter().copied().collect();
        assert_eq!(used.len(), usize::from(CURVES));
        let mut found = vec![0.; values.len()];
        decode(&codes, &amaxes, &curves, &mut found);
        for (block, found) in values.chunks(BLOCK).zip(found.chunks(BLOCK)) {
            let amax = |x: &[f32]| x.iter().fold(0f32, |max, x| max.max(x.abs()));
            assert_eq!(amax(block), amax(found));
        }
        // Coded again they are the same.
        let again = coded(&found, coding, 0);
        assert_eq!(again.1, amaxes);
    }

    #[test]
    fn a_moment_that_is_above_zero_stays_above_zero() {
        let mut values = vec![1e-30f32; BLOCK];
        values[0] = 1.;
        for key in [None, Some(KEY)] {
            let coding = Coding {
                expands: false,
                non_negative: true,
                key,
            };
            let (codes, amaxes, curves) = coded(&values, coding, 0);
            assert!(codes[1..].iter().all(|code| *code == 1));
            let mut found = vec![0.; BLOCK];
            decode(&codes, &amaxes, &curves, &mut found);
            assert!(found.iter().all(|x| *x > 0.));
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        let mut values = vec![1f32; BLOCK];
        (values[3], values[5]) = (f32::NAN, f32::INFINITY);
        let (codes, amaxes, curves) = coded(&values, Coding::default(), 0);
        let mut found = vec![0.; BLOCK];
        decode(&codes, &amaxes, &curves, &mut found);
        assert!(found[3].is_nan());
        assert_eq!(found[5], f32::MAX);
    }

    /// On the curve; what the codes stand for is off by less where the curve is bent.
    #[test]
    fn the_mean_of_stochastic_codes_is_the_value() {
        for expands in [false, true] {
            let bend = if expands { 1. / 256. } else { 0. };
            mean_of_stochastic_codes(expands, bend);
        }
    }

    fn mean_of_stochastic_codes(expands: bool, bend: f64) {
        let values: Vec<f32> = (0..BLOCK).map(|i| 0.5 + i as f32 / 256.).collect();
        let mut sums = vec![0f64; BLOCK];
        let rounds = 2000;
        for step in 0..rounds {
            let coding = Coding {
                expands,
                key: Some(StochasticKey { step, ..KEY }),
                ..Coding::default()
            };
            let (codes, amaxes, curves) = coded(&values, coding, 0);
            assert_eq!(expands, curves[0] > 0);
            let mut found = vec![0.; BLOCK];
            decode(&codes, &amaxes, &curves, &mut found);
            sums.iter_mut()
                .zip(found)
                .for_each(|(sum, x)| *sum += f64::from(x));
        }
        for (value, sum) in values.iter().zip(sums) {
            // Codes are up to 1/16 apart: six standard deviations of their mean.
            let bound = 6. * (1. / 32.) / f64::from(rounds).sqrt() + bend;
            let error = (sum / f64::from(rounds) - f64::from(*value)).abs();
            assert!(error < bound, "{value}: {error}");
        }
    }
}
