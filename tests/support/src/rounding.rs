//! How far a sum of products in f32 may be from the exact one: from the length of the sum, whatever machine made it.
//!
//! Every rounding is an error of at most `u = 2^-24` of the value it makes. Products of two FP8 values are exact in f32.
//! So what is left is one rounding for each addition, of which a term meets at most as many as the sum has terms, in
//! whatever order, tiles or lanes they are added, and a few for the scales.
//!
//! - Always: with `n` roundings in the way of each term, `|error| <= gamma(n) * sum |a||b|`, `gamma(n) = n u / (1 - n u)`
//!   (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). That is all there is to say about a short sum.
//! - Where the signs of the terms are independent and even, as in these tests, every partial sum has a standard deviation
//!   of at most `q = sqrt(sum (a b)^2)`, in every order, and its rounding errors are as likely up as down. `n` of them
//!   then have a standard deviation of at most `u q sqrt(n)` (Higham and Mary, A new approach to probabilistic rounding
//!   error analysis). [`LAMBDA`] of these are allowed.

/// The largest relative error of one rounding to f32.
pub const UNIT: f64 = 1. / (1u32 << 24) as f64;

/// Standard deviations that an element may be off: by chance none of the millions of elements of all tests is farther off.
pub const LAMBDA: f64 = 8.;

/// Roundings in the way of a term of a sum of `len`, scales included: the additions; one more addition for each stretch with
/// scales of its own, which has at least 16 terms; two multiplications for the scales of each operand, and a product that
/// these made inexact.
pub fn roundings(len: usize) -> usize {
    len + len / 16 + 5
}

/// The bound that needs nothing of the terms, as a share of their `sum |a||b|`.
pub fn gamma(roundings: usize) -> f64 {
    let share = roundings as f64 * UNIT;
    share / (1. - share)
}

/// The error that one sum of `len` products may have: `magnitude` is their `sum |a||b|`, `square` their `sum (a b)^2`. The signs
/// of the terms are random.
pub fn bound(len: usize, magnitude: f64, square: f64) -> f64 {
    let n = roundings(len);
    let always = gamma(n) * magnitude;
    always.min(LAMBDA * UNIT * (n as f64 * square).sqrt())
}

/// The Euclidean norm of the errors of many such sums, as a share of the norm of the exact ones: their standard deviations,
/// since a norm is a mean. Half of it is room for the exact sums' own chance.
pub fn norm_share(len: usize) -> f64 {
    1.5 * UNIT * (roundings(len) as f64).sqrt()
}
