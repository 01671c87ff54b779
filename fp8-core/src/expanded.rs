//! Slices of values as blocks that each lie on a curve; `expansion.rs` defines them.

use crate::expansion::{EXPANDED_BLOCK, EXPANDED_WORDS, Expansion, RandomWords};
use crate::kernels;

/// The codes of `values` in blocks of [`EXPANDED_BLOCK`], and the amax and the curve of each block.
///
/// The element `x` of a block has the code of `y = 448 (|x| / amax)^k` with the sign of `x`, where `k` is 1, 2, 4 or 1/2 for the curves 0
/// to 3; the quotient is a product with the rounded reciprocal of the amax. A block that expands takes the largest `k` that leaves magnitudes
/// of a sixteenth of its mean their full precision.
///
/// Without `words`, `y` is rounded to nearest. With them it is rounded up at random: if `f` is how far `y` is on the way from one code to the
/// next, where `f * 2^20`, as an integer, and 20 bits of the element's word add up to at least 2^20. It is rounded down to one, but to
/// nearest where `y` is below 1/64, the smallest normal number.
///
/// An amax beyond the largest f32 is stored as the largest f32. NaN has the code of NaN.
///
/// ```
/// use fp8_core::{Expansion, decode_expanded, encode_expanded};
/// let values = [1.0f32, 0.9, -0.8, 0.85];
/// let expansion = Expansion { expands: true, ..Expansion::default() };
/// let (mut codes, mut amaxes, mut curves) = ([0; 4], [0.0], [0]);
/// encode_expanded(&values, expansion, None, (&mut codes, &mut amaxes, &mut curves));
/// assert_eq!((amaxes, curves), ([1.0], [2])); // k = 4
///
/// let mut back = [0.0; 4];
/// decode_expanded(&codes, &amaxes, &curves, &mut back);
/// assert!(values.iter().zip(back).all(|(x, y)| (x - y).abs() < 0.015)); // without expansion, E4M3 is up to 0.03 away
/// ```
///
/// # Panics
/// If lengths do not fit: a code for each value; an amax, a curve and [`EXPANDED_WORDS`] words for each block.
pub fn encode_expanded(
    values: &[f32],
    expansion: Expansion,
    words: Option<RandomWords<'_>>,
    (codes, amaxes, curves): (&mut [u8], &mut [f32], &mut [u8]),
) {
    check(values.len(), [codes.len(), amaxes.len(), curves.len()]);
    if let Some(RandomWords { words, .. }) = words {
        assert_eq!(words.len(), amaxes.len() * EXPANDED_WORDS, "words");
    }
    let isa = kernels::Isa::best();
    kernels::expanded::encode(isa, values, expansion, words, (codes, amaxes, curves));
}

/// The values of codes: the inverse of [`encode_expanded`]. The amax of a block comes back exactly. An unknown curve counts as curve 0.
///
/// # Panics
/// If lengths do not fit: a value for each code, an amax and a curve for each block.
pub fn decode_expanded(codes: &[u8], amaxes: &[f32], curves: &[u8], values: &mut [f32]) {
    check(values.len(), [codes.len(), amaxes.len(), curves.len()]);
    kernels::expanded::decode(kernels::Isa::best(), codes, amaxes, curves, values);
}

fn check(values: usize, [codes, amaxes, curves]: [usize; 3]) {
    let blocks = values.div_ceil(EXPANDED_BLOCK);
    assert_eq!(
        [codes, amaxes, curves],
        [values, blocks, blocks],
        "codes, amaxes, curves"
    );
}
