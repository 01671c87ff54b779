//! Variables, gradients and comparisons.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use fp8_optim::*;
use fp8_test_support::device;
pub use fp8_test_support::flat64;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub fn random(rng: &mut StdRng, shape: &[usize]) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Tensor::from_vec(values, shape, &device()).unwrap()
}

/// Variables of several sizes: less than a block, not a multiple of a vector, several blocks.
pub fn vars(dtype: DType) -> Vec<(String, Var)> {
    let mut rng = StdRng::seed_from_u64(7);
    [
        ("w", vec![200, 257]),
        ("bias", vec![13]),
        ("one", vec![]),
        ("big", vec![40_000]),
    ]
    .into_iter()
    .map(|(name, shape)| {
        let tensor = random(&mut rng, &shape).to_dtype(dtype).unwrap();
        (name.to_string(), Var::from_tensor(&tensor).unwrap())
    })
    .collect()
}

pub fn copies(vars: &[(String, Var)]) -> Vec<(String, Var)> {
    let copy = |var: &Var| Var::from_tensor(&var.as_tensor().copy().unwrap()).unwrap();
    vars.iter()
        .map(|(name, var)| (name.clone(), copy(var)))
        .collect()
}

/// Gradients that depend on the step and the variable's position only. candle has no public way to
/// make an empty store, so one comes from a backward pass over the variables.
pub fn grads(vars: &[(String, Var)], step: u64, gain: f64) -> GradStore {
    let mut rng = StdRng::seed_from_u64(100 + step);
    let mut loss = Tensor::zeros((), DType::F64, &device()).unwrap();
    for (_, var) in vars {
        let target = (random(&mut rng, var.dims()) * gain).unwrap();
        let product = (var.to_dtype(DType::F32).unwrap() * target).unwrap();
        loss = (loss + product.sum_all().unwrap().to_dtype(DType::F64).unwrap()).unwrap();
    }
    loss.backward().unwrap()
}

pub fn bits(tensor: &Tensor) -> Vec<u64> {
    flat64(tensor).into_iter().map(f64::to_bits).collect()
}

pub fn all_bits(vars: &[(String, Var)]) -> Vec<Vec<u64>> {
    vars.iter().map(|(_, var)| bits(var)).collect()
}

pub fn state_bits(optimizer: &AdamW) -> Vec<(String, Vec<u64>)> {
    let mut state: Vec<_> = optimizer.state().unwrap().into_iter().collect();
    state.sort_by(|a, b| a.0.cmp(&b.0));
    state
        .into_iter()
        .map(|(name, tensor)| (name, bits(&tensor)))
        .collect()
}

#[track_caller]
pub fn close(a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!(a.dims(), b.dims());
    for (i, (a, b)) in flat64(a).into_iter().zip(flat64(b)).enumerate() {
        // Kernels of a device fuse multiplications and additions, which shows when a variable comes close to 0.
        assert!(
            (a - b).abs() <= tolerance * b.abs().max(0.1),
            "element {i}: {a} {b}"
        );
    }
}
