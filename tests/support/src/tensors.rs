//! Numbers: tensors that are the same in every run, and their values.

use crate::device;
use candle_core::{DType, Device, Shape, Tensor, Var};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::path::PathBuf;

/// Values in -1..1, the same for the same seed and shape.
pub fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random::<f32>() * 2. - 1.).collect()
}

/// [`values`] as a tensor.
pub fn tensor(seed: u64, dims: &[usize]) -> Tensor {
    cpu_tensor(seed, dims).to_device(&device()).unwrap()
}

/// [`tensor`] on the CPU, whatever the device of the tests.
pub fn cpu_tensor(seed: u64, dims: &[usize]) -> Tensor {
    Tensor::from_vec(values(seed, dims.iter().product()), dims, &Device::Cpu).unwrap()
}

/// [`values`] as a variable.
pub fn var(seed: u64, dims: &[usize]) -> Var {
    Var::from_tensor(&tensor(seed, dims)).unwrap()
}

/// A tensor of these values.
pub fn of(values: &[f32], dims: &[usize]) -> Tensor {
    Tensor::from_slice(values, dims, &device()).unwrap()
}

/// Standard normal values, the same in every run.
pub fn normal(seed: u64, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| {
            // Box-Muller.
            let radius = (-2. * (1. - rng.random::<f64>()).ln()).sqrt();
            (radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()) as f32
        })
        .collect();
    Tensor::from_vec(values, shape, &device()).unwrap()
}

/// `sin` of large multiples: f64 values in -1..1 without a pattern, on the CPU.
pub fn wave(dims: &[usize], seed: usize) -> Tensor {
    let value = |i: usize| (((i + 7) * (seed * 2 + 9)) as f64 * 12.9898).sin();
    let values: Vec<f64> = (0..dims.iter().product()).map(value).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

/// [`wave`] in f32.
pub fn wave_f32(dims: &[usize], seed: usize) -> Tensor {
    wave(dims, seed).to_dtype(DType::F32).unwrap()
}

/// 97 values in -1..1 that repeat in an order given by `seed`.
pub fn steps(seed: u32, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i as u32 * 31 + seed * 17) % 97) as f32 / 48. - 1.)
        .collect()
}

/// The values in f32, row by row.
pub fn flat(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// The bits of the values in f32 (exact for bf16 and f16 too).
pub fn bits(x: &Tensor) -> Vec<u32> {
    flat(x).into_iter().map(f32::to_bits).collect()
}

/// The values in f64, row by row.
pub fn flat64(x: &Tensor) -> Vec<f64> {
    if x.elem_count() == 0 {
        return vec![]; // candle cannot convert empty tensors on a GPU
    }
    let x = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    x.to_vec1().unwrap()
}

/// Distance from a 16-bit value to the next one of larger magnitude; 0 for wider dtypes.
pub fn ulp(dtype: DType, value: f64) -> f64 {
    let (bits, min_exponent) = match dtype {
        DType::BF16 => (7, -126),
        DType::F16 => (10, -14),
        _ => return 0.,
    };
    let exponent = match value.abs().log2().floor() {
        exponent if exponent.is_finite() => exponent as i32,
        _ => min_exponent,
    };
    2f64.powi(exponent.max(min_exponent) - bits)
}

/// Largest finite magnitude.
pub fn largest(x: &Tensor) -> f64 {
    let finite = flat64(x).into_iter().filter(|x| x.is_finite());
    finite.fold(0., |max, x| x.abs().max(max))
}

/// A file in `tests/golden`, with results of other libraries.
pub fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../golden")
        .join(name)
}
