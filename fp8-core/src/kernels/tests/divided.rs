//! Casts of quotients.

use half::{bf16, f16};

use super::{encode::other_casts, random_f32};
use crate::{
    Cast, Format, HighPrecision,
    kernels::{
        Isa,
        Layout::{PerElement, Segments},
        divided,
        nearest::Nearest,
    },
};

/// Ordinary scales, tiny and huge ones, and those that make NaN or infinities of most values.
const SCALES: [f32; 13] = [
    0.0068359375,
    1.0,
    -0.37,
    3.0e38,
    1.5e-30,
    1.0e-40,
    -1.0e-45,
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    -f32::NAN,
];

/// All layouts give the code of each quotient. The amax is that of the values, of which one is NaN.
fn check<T: HighPrecision>(src: &[T]) {
    let first = (1 << 34) + 3;
    assert!(src.iter().any(|x| x.to_f32().is_nan()), "the amax is NaN");
    let step = if cfg!(miri) { 17 } else { 1 };
    for (at, cast) in other_casts().step_by(step).enumerate() {
        let nearest = Nearest::new(&cast);
        // Segments shorter than the buffer of quotients, as long and longer.
        for len in [1, 7, 100, 512, 700, src.len()] {
            let scale = |i: usize| SCALES[(i + at) % SCALES.len()];
            let scales: Vec<f32> = (0..src.len().div_ceil(len)).map(scale).collect();
            let each: Vec<f32> = (0..src.len()).map(|i| scales[i / len]).collect();
            let code = |i: usize| cast.encode_divided(src[i].to_f32(), each[i], first + i as u64);
            let expected: Vec<u8> = (0..src.len()).map(code).collect();
            for isa in Isa::available() {
                for (layout, scales) in [(Segments(len), &scales), (PerElement, &each)] {
                    let mut codes = vec![0x55; src.len()];
                    let of = (&cast, nearest);
                    let max =
                        divided::encode::<T, true>(isa, of, src, layout, scales, first, &mut codes);
                    assert!(f32::from_bits(max).is_nan(), "{isa:?}");
                    for (i, (code, expected)) in codes.iter().zip(&expected).enumerate() {
                        let (x, scale) = (src[i].to_f32(), each[i]);
                        assert_eq!(code, expected, "{cast:?} {isa:?} {len}: {x:e} / {scale:e}");
                    }
                    codes.fill(0x55);
                    let max = divided::encode::<T, false>(
                        isa, of, src, layout, scales, first, &mut codes,
                    );
                    assert_eq!((max, &codes), (0, &expected), "{cast:?} {isa:?} {len}");
                }
            }
        }
    }
}

#[test]
fn quotients_of_f32_equal_the_definition() {
    check(&random_f32(1_500));
}

#[test]
fn quotients_of_16_bits_equal_the_definition() {
    let values = random_f32(1_500);
    let brains: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
    let halves: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
    check(&brains);
    check(&halves);
}

/// Whatever makes a quotient NaN, its code has the sign bit of the value; other quotients have the sign of a quotient.
#[test]
fn the_sign_of_a_nan_quotient_is_that_of_the_value() {
    let cast = Cast::new(Format::E4M3);
    let mut nans: Vec<(f32, f32)> = vec![(f32::NAN, -2.0), (-f32::NAN, -2.0)];
    for scale in [0.0, -0.0, f32::NAN, -f32::NAN] {
        nans.extend([(0.0, scale), (-0.0, scale)]);
    }
    for scale in [f32::INFINITY, f32::NEG_INFINITY] {
        nans.extend([(f32::INFINITY, scale), (f32::NEG_INFINITY, scale)]);
    }
    for (x, scale) in nans {
        let expected = if x.is_sign_negative() { 0xFF } else { 0x7F };
        assert_eq!(cast.encode_divided(x, scale, 0), expected, "{x} / {scale}");
    }
    for (x, scale, expected) in [
        (3.0, -0.0, 0xFE),
        (-3.0, 0.0, 0xFE),
        (-3.0, -0.0, 0x7E),
        (3.0, f32::NEG_INFINITY, 0x80),
        (f32::INFINITY, -2.0, 0xFE),
    ] {
        assert_eq!(cast.encode_divided(x, scale, 0), expected, "{x} / {scale}");
    }
}
