//! Casts of bf16 by powers of two.

use half::bf16;

use super::{MIRI_STEP, all};
use crate::{
    Cast, Contraction, Format, Granularity, HighPrecision, Overflow,
    kernels::{
        Isa, Layout,
        decode::{self, Decoder},
        groups,
        nearest::{self, Nearest},
    },
};

/// All powers of two that are normal numbers, and what is next to them.
fn scales() -> impl Iterator<Item = f32> {
    let step = if cfg!(miri) { 30 } else { 1 };
    let powers = (1..255u32).step_by(step).map(|e| f32::from_bits(e << 23));
    powers.chain([f32::from_bits(1 << 22), -1., f32::INFINITY, 0.75])
}

/// Every bf16 in order; with zeros among them; and those that have normal codes under some scales, in another order.
fn sources() -> [Vec<bf16>; 3] {
    let every = all(bf16::from_bits);
    let zero = |i: usize| [bf16::ZERO, bf16::NEG_ZERO][i / 3 % 2];
    let with_zeros = (every.iter().enumerate())
        .map(|(i, x)| if i % 3 == 0 { zero(i) } else { *x })
        .collect();
    let near_one = |i: usize| {
        let magnitude = 0x3C00 + (i * 919 % 0x700) as u16;
        bf16::from_bits(magnitude | (i as u16 & 1) << 15)
    };
    let near_one = (0..4000).step_by(MIRI_STEP).map(near_one).collect();
    [every, with_zeros, near_one]
}

#[test]
fn codes_under_powers_of_two_are_those_of_the_definition() {
    let cast = Cast::new(Format::E4M3);
    let casts = [
        cast,
        cast.with_overflow(Overflow::NonFinite),
        Cast::new(Format::E5M2),
    ];
    for src in sources() {
        for (i, scale) in scales().enumerate() {
            // The others take no part in this.
            let cast = if i % 16 == 0 { casts[i / 16 % 3] } else { cast };
            let expected = |x: &bf16| cast.encode_scaled(x.to_f32(), scale, 0);
            let expected: Vec<u8> = src.iter().map(expected).collect();
            let kernel = Nearest::new(&cast).unwrap();
            for isa in Isa::available() {
                for len in [64, 128, 200, src.len()] {
                    let scales = vec![scale; src.len().div_ceil(len)];
                    let mut codes = vec![0x55; src.len()];
                    let layout = Layout::Segments(len);
                    nearest::encode::<_, false>(isa, kernel, &src, layout, &scales, &mut codes);
                    for ((x, code), expected) in src.iter().zip(&codes).zip(&expected) {
                        assert_eq!(code, expected, "{cast:?} {isa:?} {len}: {x} * {scale:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn values_under_powers_of_two_are_those_of_the_definition() {
    // Every code but NaN, then every code.
    let codes: Vec<u8> = (0..1000)
        .map(|i| (i * 7 % 256) as u8)
        .filter(|code| code & 0x7F != 0x7F)
        .chain((0..1000).map(|i| i as u8))
        .collect();
    for format in [Format::E4M3, Format::E5M2, Format::E4M3Fnuz] {
        let decoder = Decoder::new(format);
        for scale in scales() {
            let expected = |code: &u8| bf16::from_f32(format.decode(*code) * scale);
            let expected: Vec<bf16> = codes.iter().map(expected).collect();
            for isa in Isa::available() {
                for len in [64, 128, 200, codes.len()] {
                    let scales = vec![scale; codes.len().div_ceil(len)];
                    let mut values = vec![bf16::ONE; codes.len()];
                    let layout = Layout::Segments(len);
                    decode::decode(isa, decoder, &codes, layout, &scales, &mut values);
                    for ((code, value), expected) in codes.iter().zip(&values).zip(&expected) {
                        let same = value.to_bits() == expected.to_bits()
                            || value.is_nan() && expected.is_nan();
                        assert!(
                            same,
                            "{format} {isa:?} {len}: {code:#x} * {scale:e} = {value}"
                        );
                    }
                }
            }
        }
    }
}

/// One scale decides how all are tried.
#[test]
fn scales_of_both_kinds_beside_each_other() {
    let cast = Cast::new(Format::E4M3);
    let kernel = Nearest::new(&cast).unwrap();
    let decoder = Decoder::new(Format::E4M3);
    let src: Vec<bf16> = (0..640)
        .map(|i| bf16::from_f32((i as f32 - 300.) * 0.1))
        .collect();
    for scales in [[2f32, 0.3, 0.5, 1e-30, 1e38], [0.3, 2., 0.5, 0.1, 4.]] {
        let expected = |i: usize| cast.encode_scaled(src[i].to_f32(), scales[i / 128], 0);
        let expected: Vec<u8> = (0..src.len()).map(expected).collect();
        let value = |i: usize| bf16::from_f32(Format::E4M3.decode(expected[i]) * scales[i / 128]);
        let values: Vec<bf16> = (0..src.len()).map(value).collect();
        for isa in Isa::available() {
            let layout = Layout::Segments(128);
            let mut codes = vec![0x55; src.len()];
            nearest::encode::<_, false>(isa, kernel, &src, layout, &scales, &mut codes);
            assert_eq!(codes, expected, "{isa:?} {scales:?}");
            let mut found = vec![bf16::ONE; src.len()];
            decode::decode(isa, decoder, &codes, layout, &scales, &mut found);
            assert_eq!(found, values, "{isa:?} {scales:?}");
        }
    }
}

/// The definition: for each group its codes, and the dequant_scale.
fn in_groups<T: HighPrecision>(src: &[T], cols: usize, group: usize) -> (Vec<u8>, Vec<f32>) {
    let cast = Cast::new(Format::E4M3);
    let (mut codes, mut scales) = (vec![], vec![]);
    for group in src.chunks(cols).flat_map(|row| row.chunks(group)) {
        let magnitude = |x: &T| f32::from_bits(x.to_f32().to_bits() & 0x7FFF_FFFF);
        let larger = |a: f32, b: f32| if a.to_bits() > b.to_bits() { a } else { b };
        let amax = group.iter().map(magnitude).fold(1e-12, larger);
        let quotient = 448. / amax;
        let quant_scale = match quotient.is_nan() {
            true => quotient,
            false => f32::from_bits(quotient.to_bits() & 0x7F80_0000),
        };
        codes.extend(
            group
                .iter()
                .map(|x| cast.encode_scaled(x.to_f32(), quant_scale, 0)),
        );
        scales.push(1. / quant_scale);
    }
    (codes, scales)
}

fn check_groups<T: HighPrecision>(src: &[T]) {
    for (cols, group) in [
        (64, 64),
        (128, 128),
        (512, 128),
        (384, 192),
        (1024, 1024),
        (100, 100),
        (96, 32),
        (96, 128),
        (200, 64),
        (30, 7),
        (1, 1),
    ] {
        let src = &src[..src.len() / cols * cols];
        let (expected, expected_scales) = in_groups(src, cols, group);
        let granularity = Granularity::Blockwise {
            rows: 1,
            cols: group,
        };
        let grid = granularity.grid(src.len() / cols, cols, Contraction::Cols);
        for isa in Isa::available() {
            let mut codes = vec![0x55; src.len()];
            let mut scales = vec![7.; expected_scales.len()];
            groups::encode(isa, src, &grid, &mut codes, &mut scales);
            let what = format!("{isa:?} {cols} {group}");
            for (i, (scale, expected)) in scales.iter().zip(&expected_scales).enumerate() {
                let same = scale == expected || scale.is_nan() && expected.is_nan();
                assert!(same, "{what}: scale {i} is {scale:e}, not {expected:e}");
            }
            assert_eq!(codes, expected, "{what}");
        }
    }
}

#[test]
fn groups_have_the_codes_and_scales_of_the_definition() {
    for src in sources() {
        check_groups(&src);
    }
    // Groups of every magnitude, some with infinity, NaN, or only zeros.
    let value = |i: usize| {
        let (group, place) = (i / 64, i % 64);
        let power = (group as i32 % 290 - 160) as f32;
        match group % 7 {
            2 if place == 5 => f32::INFINITY,
            3 if place == 60 => f32::NAN,
            4 => 0.,
            5 if place % 3 == 0 => 0.,
            _ => (place as f32 - 30.3) * power.exp2(),
        }
    };
    let values: Vec<f32> = (0..64 * 600).map(value).collect();
    let words: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
    check_groups(&words);
    check_groups(&values);
}
