//! Parameters, gradients, and their values in f64.

use candle_core::{DType, Device, Tensor};
use fp8_scaled::{Scaled, ScaledGrads, ScaledVar, as_scaled};
pub use fp8_test_support::cpu_tensor;
use fp8_test_support::largest_of;

/// Less than a piece, not a multiple of one, several blocks; with scales far apart.
pub fn vars(dtype: DType) -> Vec<ScaledVar> {
    let shapes: [(&str, &[usize], f64); 4] = [
        ("w", &[200, 257], 0.02),
        ("bias", &[13], 1e-3),
        ("one", &[], 5.0),
        ("big", &[40_000], 1.0),
    ];
    let make = |(i, (name, dims, size)): (usize, (&str, &[usize], f64))| {
        let start = (cpu_tensor(i as u64, dims) * size).unwrap();
        ScaledVar::rescaled(name, &start, dtype).unwrap()
    };
    shapes.into_iter().enumerate().map(make).collect()
}

/// A gradient in f16 of the scale `scale`, which depends on the step alone.
pub fn grad(var: &ScaledVar, step: u64, scale: f32) -> Scaled {
    let data = cpu_tensor(1000 + step + var.dims().len() as u64, var.dims());
    Scaled::from_parts(&data.to_dtype(DType::F16).unwrap(), scale).unwrap()
}

pub fn grads(vars: &[ScaledVar], step: u64, scale: f32) -> ScaledGrads {
    let mut grads = ScaledGrads::default();
    for var in vars {
        grads.insert(var, grad(var, step, scale));
    }
    grads
}

/// Values in f64, without a rounding.
pub fn values(x: &Scaled) -> Vec<f64> {
    let data = x.detach().data().unwrap().flatten_all().unwrap();
    let data = data.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    let scale = f64::from(x.scale().to_f32());
    data.into_iter().map(|x| x * scale).collect()
}

/// Bits of data, and scales.
pub fn bits(vars: &[ScaledVar]) -> Vec<(Vec<u32>, f32)> {
    let of = |var: &ScaledVar| {
        let data = var.data_var().flatten_all().unwrap();
        let data = data.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        (
            data.into_iter().map(f32::to_bits).collect(),
            var.scale().to_f32(),
        )
    };
    vars.iter().map(of).collect()
}

/// The largest difference, as a share of the largest value.
#[track_caller]
pub fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let largest = largest_of(b.iter().map(|x| x.abs()));
    largest_of(a.iter().zip(b).map(|(a, b)| (a - b).abs())) / largest
}

pub fn single(values: &[f32]) -> (ScaledVar, Tensor) {
    let x = Tensor::new(values, &Device::Cpu).unwrap();
    (ScaledVar::rescaled("w", &x, DType::F16).unwrap(), x)
}

pub fn one_grad(var: &ScaledVar, values: &[f32]) -> ScaledGrads {
    let data = Tensor::new(values, &Device::Cpu).unwrap();
    let mut grads = ScaledGrads::default();
    grads.insert(var, as_scaled(&data, None).unwrap());
    grads
}
