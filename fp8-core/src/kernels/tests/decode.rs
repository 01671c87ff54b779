//! Decoding.

use half::{bf16, f16};

use crate::{
    Format, HighPrecision,
    kernels::{
        Isa, Layout,
        decode::{self, Decoder},
    },
};

fn check_decode<T: HighPrecision>(round: impl Fn(f32) -> T) {
    let codes: Vec<u8> = (0..3000).map(|i| i as u8).collect();
    let mut values = vec![T::default(); codes.len()];
    for format in Format::ALL {
        let decoder = Decoder::new(format);
        for scale in [
            1.0,
            0.37,
            -1e-3,
            1e-38,
            1e-45,
            1e36,
            3e38,
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NAN,
        ] {
            let expected = |code: &u8| round(format.decode(*code) * scale).to_f32();
            let expected: Vec<f32> = codes.iter().map(expected).collect();
            let check = |what: &str, isa: Isa, values: &mut [T]| {
                for ((code, value), expected) in codes.iter().zip(&mut *values).zip(&expected) {
                    let value = std::mem::take(value).to_f32();
                    // A NaN of a code keeps its sign.
                    let both = value.is_nan() && expected.is_nan();
                    let signed = format.is_nan(*code) && !scale.is_nan();
                    let signs = value.is_sign_negative() == expected.is_sign_negative();
                    let same = value.to_bits() == expected.to_bits() || both && (signs || !signed);
                    assert!(
                        same,
                        "{what} {format} {isa:?}: {code:#x} * {scale:e} = {value:e}, not {expected:e}"
                    );
                }
            };
            for isa in Isa::available() {
                // Tails, blocks shared by segments, and both sides of the length that has tables.
                for len in [16, 32, 48, 64, 77, 128, 1000, 1100, 3000] {
                    let scales = vec![scale; codes.len().div_ceil(len)];
                    let modes = if isa.has_vbmi() { 2 } else { 1 };
                    for vbmi in [false, true].into_iter().take(modes) {
                        let (layout, to) = (Layout::Segments(len), &mut values);
                        decode::decode_with(isa, vbmi, decoder, &codes, layout, &scales, to);
                        check(&format!("{len} {vbmi}"), isa, &mut values);
                    }
                }
                let scales = vec![scale; codes.len()];
                let layout = Layout::PerElement;
                decode::decode(isa, decoder, &codes, layout, &scales, &mut values);
                check("columns", isa, &mut values);
            }
        }
    }
}

/// Every length up to some blocks, in a longer buffer: nothing beyond the end is written.
#[test]
fn decoding_keeps_to_its_length() {
    fn check<T: HighPrecision + PartialEq + std::fmt::Debug>() {
        let guard = T::from_f32(7.0);
        for isa in Isa::available() {
            let decoder = Decoder::new(Format::E4M3);
            for len in (0..200).chain([1029]) {
                let codes: Vec<u8> = (0..len).map(|i| (i % 255) as u8).collect();
                let expected = |code: &u8| {
                    T::from_f32(Format::E4M3.decode(*code) * 0.3)
                        .to_f32()
                        .to_bits()
                };
                let mut values = vec![guard; len + 70];
                let (now, beyond) = values.split_at_mut(len);
                let whole = Layout::Segments(len.max(1));
                decode::decode(isa, decoder, &codes, whole, &[0.3], now);
                let same = |now: &[T]| {
                    codes.iter().zip(now).all(|(code, x)| {
                        x.to_f32().to_bits() == expected(code) || code & 0x7F == 0x7F
                    })
                };
                assert!(same(now), "{isa:?} {len}");
                let scales = vec![0.3; len];
                decode::decode(isa, decoder, &codes, Layout::PerElement, &scales, now);
                assert!(same(now), "{isa:?} {len}");
                assert!(beyond.iter().all(|x| *x == guard), "{isa:?} {len}");
            }
        }
    }
    check::<f32>();
    check::<bf16>();
    check::<f16>();
    check::<f64>();
}

#[test]
fn decoding_equals_the_definition() {
    check_decode(|x: f32| x);
    check_decode(bf16::from_f32);
    check_decode(f16::from_f32);
    check_decode(f64::from);
}
