//! Optimizers with the same variables and gradients on any device, and their comparison.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use fp8_optim::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub const CPU: Device = Device::Cpu;
pub const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

/// Empty, shorter than one access, and a whole number of the kernels' chunks with one element more or fewer.
const SHAPES: [&[usize]; 10] = [
    &[],
    &[1],
    &[0],
    &[3],
    &[1000],
    &[7, 143],
    &[16384],
    &[16383],
    &[4097],
    &[65537],
];

/// Random values. The squares of the f64 values are not exact in f64.
pub fn random(seed: u64, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f64> = (0..shape.iter().product())
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Tensor::from_vec(values, shape, &CPU)?.to_dtype(dtype)
}

/// A store without gradients: candle has no public way to make one.
pub fn no_grads() -> Result<GradStore> {
    let var = Var::zeros((), DType::F32, &CPU)?;
    let mut grads = var.sqr()?.backward()?;
    grads.remove(&var);
    Ok(grads)
}

pub fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    // Composed operations and the kernels may differ in the sign of a zero in f64.
    let zero = |x: f64| if x == 0.0 { 0.0 } else { x };
    let flat = tensor
        .to_device(&CPU)?
        .flatten_all()?
        .to_dtype(DType::F64)?;
    let values = flat.to_vec1::<f64>()?.into_iter();
    Ok(values.map(|x| zero(x).to_bits()).collect())
}

/// One optimizer with its variables, on one device or several.
pub struct Side {
    pub vars: Vec<(String, Var)>,
    pub optimizer: AdamW,
}

impl Side {
    /// Variables of all `dtypes` and shapes; `place` gives the device of variable number i.
    pub fn new(
        dtypes: &[DType],
        config: &AdamWConfig,
        place: impl Fn(usize) -> Device,
    ) -> Result<Self> {
        let mut vars = Vec::new();
        for (i, shape) in SHAPES.iter().enumerate() {
            for (j, dtype) in dtypes.iter().enumerate() {
                let number = i * dtypes.len() + j;
                let start = random(number as u64, shape, *dtype)?.to_device(&place(number))?;
                vars.push((format!("v{number:02}"), Var::from_tensor(&start)?));
            }
        }
        let optimizer = AdamW::from_named(vars.clone(), config.clone())?
            .with_no_decay(|_, tensor| tensor.rank() == 0 || tensor.elem_count() % 2 == 0);
        Ok(Self { vars, optimizer })
    }

    /// Gradients that depend only on the step and on the variable's number. One of them contains `bad`.
    pub fn grads(&self, step: u64, bad: Option<f32>) -> Result<GradStore> {
        let mut grads = no_grads()?;
        let last = self.vars.len() - 1;
        for (i, (_, var)) in self.vars.iter().enumerate() {
            // Some variables have no gradient in some steps.
            if (i as u64 + step).is_multiple_of(5) && i != last {
                continue;
            }
            let mut grad = random(1000 * (step + 1) + i as u64, var.dims(), DType::F64)?;
            if let Some(bad) = bad.filter(|_| i == last) {
                let mut values = grad.flatten_all()?.to_vec1::<f64>()?;
                let middle = values.len() / 2;
                values[middle] = bad.into();
                grad = Tensor::from_vec(values, var.shape(), &CPU)?;
            }
            grads.insert(var, grad.to_dtype(var.dtype())?.to_device(var.device())?);
        }
        Ok(grads)
    }

    pub fn step(&mut self, step: u64, bad: Option<f32>) -> Result<StepReport> {
        let grads = self.grads(step, bad)?;
        Ok(self.optimizer.apply(&grads)?)
    }

    pub fn everything(&self) -> Result<Vec<(String, Vec<u64>)>> {
        let mut all = Vec::new();
        for (name, var) in &self.vars {
            all.push((name.clone(), bits(var)?));
        }
        let mut state: Vec<_> = self.optimizer.state()?.into_iter().collect();
        state.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, tensor) in state {
            all.push((name, bits(&tensor)?));
        }
        Ok(all)
    }
}

#[track_caller]
pub fn assert_same(what: &str, a: &Side, b: &Side) -> Result<()> {
    let (a, b) = (a.everything()?, b.everything()?);
    assert_eq!(a.len(), b.len(), "{what}");
    for ((name, a), (other, b)) in a.into_iter().zip(b) {
        assert_eq!(name, other, "{what}");
        let differing = a.iter().zip(&b).position(|(a, b)| a != b);
        assert!(
            a.len() == b.len() && differing.is_none(),
            "{what}: `{name}`, {} and {} elements, the first that differs: {differing:?}",
            a.len(),
            b.len()
        );
    }
    Ok(())
}

pub fn values(report: &StepReport) -> Result<(u64, u64, bool, usize)> {
    let norm = report.grad_norm()?;
    // All NaNs count as equal.
    let norm = if norm.is_nan() { f64::NAN } else { norm };
    let clip = report.clip_coefficient()?;
    Ok((
        norm.to_bits(),
        clip.to_bits(),
        report.skipped()?,
        report.updated,
    ))
}

pub fn config(max_grad_norm: Option<f64>, master_weights: bool) -> AdamWConfig {
    AdamWConfig {
        lr: 3e-3,
        weight_decay: 0.1,
        max_grad_norm,
        master_weights,
        ..AdamWConfig::default()
    }
}

/// In f32 and in FP8.
pub fn storages() -> [MomentStorage; 3] {
    let fp8 = Fp8Moments::default();
    let plain = fp8.with_expansion(false).with_stochastic(false);
    [
        MomentStorage::F32,
        MomentStorage::Fp8(fp8),
        MomentStorage::Fp8(plain),
    ]
}
