//! Random tensors, checks of outputs, and the sizes of the caches.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Shape, Tensor};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};

/// Standard normal values, the same in every run.
pub fn normal(seed: u64, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| StandardNormal.sample(&mut rng))
        .collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Fails unless `|ours - reference| <= limit * |reference|` in the Frobenius norm.
pub fn check(what: &str, ours: &Tensor, reference: &Tensor, limit: f64) -> Result<()> {
    ensure!(
        ours.dims() == reference.dims(),
        "{what}: {:?} where {:?} is expected",
        ours.dims(),
        reference.dims()
    );
    let flat =
        |x: &Tensor| -> Result<Vec<f32>> { Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?) };
    let (ours, reference) = (flat(ours)?, flat(reference)?);
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = ours
        .iter()
        .zip(&reference)
        .map(|(o, r)| square(o - r))
        .sum();
    let norm: f64 = reference.iter().map(|&r| square(r)).sum();
    let error = (difference / norm).sqrt();
    ensure!(
        error < limit,
        "{what}: wrong output, relative error {error:.2e}, at most {limit:.0e}"
    );
    Ok(())
}

/// Bytes of the last-level cache; a guess if the system does not report it.
pub fn last_level_cache() -> usize {
    let read = || {
        let path = "/sys/devices/system/cpu/cpu0/cache/index3/size";
        let text = std::fs::read_to_string(path).ok()?;
        let kib: usize = text.trim().strip_suffix('K')?.parse().ok()?;
        Some(kib << 10)
    };
    read().unwrap_or(64 << 20)
}
