//! How far a sum of products in f32 may be from the exact one. The bounds depend on the length of the sum, not on the
//! machine.
//!
//! Every rounding changes a value by at most `u = 2^-24` of it. Products of two FP8 values are exact in f32. What remains is
//! one rounding for each addition and a few for the scales. Whatever the order, tiles or lanes of the additions, a term goes
//! through at most as many of them as the sum has terms.
//!
//! - If each term goes through `n` roundings, then always `|error| <= gamma(n) * sum |a||b|` with `gamma(n) = n u / (1 - n u)`
//!   (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). For short sums this is the bound.
//! - If the signs of the terms are random, as in these tests, every partial sum has a standard deviation of at most
//!   `q = sqrt(sum (a b)^2)`, in any order, and roundings go up as often as down. The errors of `n` of them have a standard
//!   deviation of at most `u q sqrt(n)` (Higham and Mary, A new approach to probabilistic rounding error analysis). For long
//!   sums [`LAMBDA`] times that is allowed.

use crate::device::on_cuda;
use fp8_core::Format;

/// The largest relative error of rounding to f32.
pub const UNIT: f64 = 1. / (1u32 << 24) as f64;

/// The largest relative error of rounding to f64.
pub const UNIT_F64: f64 = UNIT / (1u32 << 29) as f64;

/// How many standard deviations an element may be off: so many that none of the millions of elements in all tests is
/// farther off by chance.
pub const LAMBDA: f64 = 8.;

/// How many roundings a term of a sum of `len` terms goes through: one per addition; one more addition for each stretch
/// of at least 16 terms that has its own scales; two multiplications by the scales of each operand, and the product,
/// which is then inexact.
pub fn roundings(len: usize) -> usize {
    len + len / 16 + 5
}

/// The bound that holds for any terms, as a share of `sum |a||b|`.
pub fn gamma(roundings: usize) -> f64 {
    let share = roundings as f64 * UNIT;
    share / (1. - share)
}

/// The largest error of a sum of `len` products with random signs: `magnitude` is their `sum |a||b|`, `square` their
/// `sum (a b)^2`.
pub fn bound(len: usize, magnitude: f64, square: f64) -> f64 {
    let n = roundings(len);
    let always = gamma(n) * magnitude;
    always.min(LAMBDA * UNIT * (n as f64 * square).sqrt())
}

/// How far two results in f32 may be apart, as a share of the largest of many, if they do the same in different orders and a term
/// of either goes through at most this many roundings: twice [`bound`]. Signs are as good as random, and the standard
/// deviation of a sum is at most the largest of many.
pub fn two_orders(roundings: usize) -> f64 {
    2. * LAMBDA * UNIT * (roundings as f64).sqrt()
}

/// [`bound`] for FP8 tensor cores, which keep about 14 bits of a sum: they shift the products of a step of 32 terms and the sum
/// so far to the largest exponent among them and drop what lies 13 bits below it (measured for Hopper in "DeepSeek-V3 Technical
/// Report", arXiv:2412.19437, section 3.3.2). Each of `len` terms loses at most `2^-13` of the largest partial sum, which is
/// `3 q` with hardly an exception; the standard deviation of what a truncation takes is that over `sqrt(3)`, and signs are random.
pub fn tensor_core_bound(len: usize, square: f64) -> f64 {
    LAMBDA * 2f64.powi(-13) * (3. * roundings(len) as f64 * square).sqrt()
}

/// The bound of an FP8 product on the device of the tests: [`bound`] for sums in f32, on a GPU with that of tensor cores on top.
pub fn product_bound(len: usize, magnitude: f64, square: f64) -> f64 {
    let in_f32 = bound(len, magnitude, square);
    match on_cuda() {
        true => in_f32 + tensor_core_bound(len, square),
        false => in_f32,
    }
}

/// [`two_orders`] of results that FP8 products of the device of the tests have part in, with sums of `lens` terms one after the
/// other. On a GPU the bound of [`tensor_core_bound`] is added for each: of either result, as a share of the largest of many.
pub fn two_products(lens: &[usize]) -> f64 {
    let count = lens.iter().map(|&len| roundings(len)).sum();
    let in_f32 = two_orders(count);
    match on_cuda() {
        true => {
            in_f32
                + 2. * lens
                    .iter()
                    .map(|&len| tensor_core_bound(len, 1.))
                    .sum::<f64>()
        }
        false => in_f32,
    }
}

/// The least signal to noise, in dB, between two results of an FP8 product in f32 that differ in the order of `count` sums of `len`
/// terms each, computed by FP8 tensor cores without fast accumulation.
///
/// As in [`tensor_core_bound`], a step adds 32 products and the sum so far, 33 values, of each of which up to `2^-13` of the largest
/// is dropped; the mean square of what is dropped is a third of that squared. After 128 terms the sum goes to f32, whose roundings
/// are nothing beside this, and the next begins at 0. With random signs and products of the mean square `p`, the sum so far has
/// the mean square `32 j p` in step `j` of such a stretch, and the square of the largest product is at most the sum of 32
/// squares: the largest of both has at most `(16 + s / 2) p` over the steps of a stretch of `s` terms, whose sum has `s p`. So the
/// noise is at most `33 / 32 / 3 * 2^-26 * (16 + s / 2)` of the signal, twice that between two results; for the chance in mean
/// squares see [`least_sqnr`].
pub fn least_sqnr_of_tensor_cores(len: usize, count: usize) -> f64 {
    let stretch = len.min(128) as f64;
    let share = 33. / 32. / 3. * 2f64.powi(-26) * (16. + stretch / 2.);
    let chance = 1. + 4. * (4. / count as f64).sqrt();
    -10. * (chance * 2. * share).log10()
}

/// The least signal to noise, in dB, of so many sums of products of values cast to these formats, one for each operand.
///
/// Values are uniform between their amax and its negative, and the amax is scaled to the largest code, 1.75 times a power of
/// two. A cast to `m` bits of mantissa is off by a uniform share of an ulp, whose mean square is `ulp^2 / 12`. Over the
/// binades below the amax that is `2^(-2 m) / 24` of the mean square of the values. Errors of the operands add up, since they
/// are independent. The mean square of `n` sums varies by `sqrt(2 / n)` of itself, that of signal and noise together by
/// `sqrt(4 / n)`, and four times that is allowed.
pub fn least_sqnr(operands: [Format; 2], sums: usize) -> f64 {
    let share = |format: Format| 2f64.powi(-2 * format.mantissa_bits() as i32) / 24.;
    let chance = 1. + 4. * (4. / sums as f64).sqrt();
    -10. * (chance * operands.map(share).iter().sum::<f64>()).log10()
}

/// The largest Euclidean norm of the errors of many such sums, as a share of the norm of the exact sums. A norm
/// averages, so it is close to the standard deviation; a factor of 1.5 leaves room for the chance in the exact sums.
pub fn norm_share(len: usize) -> f64 {
    1.5 * UNIT * (roundings(len) as f64).sqrt()
}
