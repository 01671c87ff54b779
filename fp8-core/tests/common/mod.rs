//! Shared by several tests: the outputs of other libraries, and a reproducible source of numbers.

#![allow(dead_code, reason = "each test binary uses its own part")]

use fp8_core::{Format, philox4x32_10};
use safetensors::{Dtype, SafeTensors};

/// A file with outputs of other libraries.
pub fn golden(name: &str) -> Vec<u8> {
    let path = format!(
        concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/{}"),
        name
    );
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub fn u8s<'a>(file: &SafeTensors<'a>, name: &str) -> &'a [u8] {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), Dtype::U8, "{name}");
    tensor.data()
}

fn u32s(file: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let tensor = file.tensor(name).unwrap();
    assert!(matches!(tensor.dtype(), Dtype::U32 | Dtype::F32), "{name}");
    tensor
        .data()
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&bytes| u32::from_le_bytes(bytes))
        .collect()
}

pub fn f32s(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    u32s(file, name).into_iter().map(f32::from_bits).collect()
}

/// The name that ml_dtypes and PyTorch use.
pub fn peer_name(format: Format) -> &'static str {
    match format {
        Format::E4M3 => "e4m3fn",
        other => other.name(),
    }
}

/// Equal codes, or two NaNs.
pub fn same_code(format: Format, a: u8, b: u8) -> bool {
    a == b || format.is_nan(a) && format.is_nan(b)
}

/// A random word that is the same in every run.
pub fn word(seed: u32, index: u32) -> u32 {
    philox4x32_10([index, 0, 0, 0], [seed, 0])[0]
}
