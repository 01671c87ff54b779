//! Casts and values against ml_dtypes 0.6.0 and PyTorch 2.15.

use crate::common::{f32s, golden, peer_name, same_code, u8s};
use fp8_core::{Cast, E8M0, Format, Overflow, encode};
use half::{bf16, f16};
use safetensors::SafeTensors;

const OVERFLOWS: [(&str, Overflow); 2] = [
    ("ml_dtypes", Overflow::NonFinite),
    ("torch_sat", Overflow::Saturate),
];

fn assert_codes(what: &str, format: Format, inputs: &[f32], codes: &[u8], expected: &[u8]) {
    assert_eq!(codes.len(), expected.len(), "{what}");
    for ((x, &code), &expected) in inputs.iter().zip(codes).zip(expected) {
        assert!(
            same_code(format, code, expected),
            "{what}: {x:e} gives {code:#04x}, not {expected:#04x}"
        );
    }
}

/// The inputs of the file in f32: all bf16, all f16, and 60000 of f32.
fn inputs(file: &SafeTensors<'_>) -> [(&'static str, Vec<f32>); 3] {
    [
        (
            "bf16",
            (0..=u16::MAX)
                .map(|bits| bf16::from_bits(bits).to_f32())
                .collect(),
        ),
        (
            "f16",
            (0..=u16::MAX)
                .map(|bits| f16::from_bits(bits).to_f32())
                .collect(),
        ),
        ("f32", f32s(file, "f32.input_bits")),
    ]
}

#[test]
fn both_overflow_modes_equal_the_peers() {
    let bytes = golden("casts.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (dtype, inputs) in inputs(&file) {
        for format in Format::ALL {
            for (peer, overflow) in OVERFLOWS {
                let cast = Cast::new(format).with_overflow(overflow);
                let name = format!("{dtype}.{peer}.{}", peer_name(format));
                let codes: Vec<u8> = inputs.iter().map(|&x| cast.encode(x, 0)).collect();
                assert_codes(&name, format, &inputs, &codes, u8s(&file, &name));
            }
        }
    }
}

#[test]
fn slices_of_every_input_type_equal_the_peers() {
    let bytes = golden("casts.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let bf16s: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let f16s: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let [.., (_, f32s)] = inputs(&file);
    let f64s: Vec<f64> = f32s.iter().map(|&x| x.into()).collect();
    for format in Format::ALL {
        for (peer, overflow) in OVERFLOWS {
            let cast = Cast::new(format).with_overflow(overflow);
            let expected =
                |dtype: &str| u8s(&file, &format!("{dtype}.{peer}.{}", peer_name(format)));
            let mut codes = vec![0; bf16s.len()];
            encode(&cast, &bf16s, 1.0, &mut codes);
            assert_codes(
                "bf16",
                format,
                &bf16s.iter().map(|x| x.to_f32()).collect::<Vec<_>>(),
                &codes,
                expected("bf16"),
            );
            encode(&cast, &f16s, 1.0, &mut codes);
            assert_codes(
                "f16",
                format,
                &f16s.iter().map(|x| x.to_f32()).collect::<Vec<_>>(),
                &codes,
                expected("f16"),
            );
            let mut codes = vec![0; f32s.len()];
            encode(&cast, &f32s, 1.0, &mut codes);
            assert_codes("f32", format, &f32s, &codes, expected("f32"));
            encode(&cast, &f64s, 1.0, &mut codes);
            assert_codes("f64", format, &f32s, &codes, expected("f32"));
        }
    }
}

/// PyTorch's plain cast saturates E4M3 (since 2.12) and overflows in the other formats; NaN and finite values within
/// the range are the same everywhere.
#[test]
fn torch_direct_is_one_of_the_overflow_modes() {
    let bytes = golden("casts.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (dtype, inputs) in inputs(&file) {
        for format in Format::ALL {
            let name = format!("{dtype}.torch_direct.{}", peer_name(format));
            let overflow = if format == Format::E4M3 {
                Overflow::Saturate
            } else {
                Overflow::NonFinite
            };
            let cast = Cast::new(format).with_overflow(overflow);
            let codes: Vec<u8> = inputs.iter().map(|&x| cast.encode(x, 0)).collect();
            assert_codes(&name, format, &inputs, &codes, u8s(&file, &name));
        }
    }
}

#[test]
fn values_of_all_codes_equal_the_peers() {
    let bytes = golden("casts.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for format in Format::ALL {
        let table = f32s(&file, &format!("table.{}", peer_name(format)));
        assert_eq!(table.len(), 256, "{format}");
        for (code, expected) in (0..=255).zip(table) {
            let value = format.decode(code);
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same, "{format} {code:#04x} is {value:e}, not {expected:e}");
        }
    }
    let table = f32s(&file, "table.e8m0fnu");
    assert_eq!(table.len(), 256);
    for (code, expected) in (0..=255).zip(table) {
        let value = E8M0::from_bits(code).to_f32();
        assert!(
            value == expected || value.is_nan() && expected.is_nan(),
            "e8m0 {code:#04x}: {value:e} {expected:e}"
        );
    }
}

#[test]
fn values_equal_those_of_the_float8_crate() {
    for code in 0..=255 {
        let pairs = [
            (Format::E4M3, float8::F8E4M3::from_bits(code).to_f32()),
            (Format::E5M2, float8::F8E5M2::from_bits(code).to_f32()),
        ];
        for (format, expected) in pairs {
            let value = format.decode(code);
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same, "{format} {code:#04x} is {value:e}, not {expected:e}");
        }
    }
}

/// ml_dtypes for every input; PyTorch for positive ones, as it drops the sign and calls zero 2^-127.
#[test]
fn e8m0_equals_the_peers() {
    let bytes = golden("casts.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (dtype, inputs) in inputs(&file) {
        let ml_dtypes = u8s(&file, &format!("{dtype}.ml_dtypes.e8m0fnu"));
        let torch = u8s(&file, &format!("{dtype}.torch_direct.e8m0fnu"));
        assert_eq!([ml_dtypes.len(), torch.len()], [inputs.len(); 2], "{dtype}");
        for ((&x, &ml_dtypes), &torch) in inputs.iter().zip(ml_dtypes).zip(torch) {
            let code = E8M0::from_f32(x).to_bits();
            assert_eq!(code, ml_dtypes, "{dtype} {x:e}");
            if x > 0.0 {
                assert_eq!(code, torch, "{dtype} {x:e}");
            }
        }
    }
}
