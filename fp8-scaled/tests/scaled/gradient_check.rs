//! Values and gradients of one function, in scaled arithmetic and in candle's.

use candle_core::{DType, Device, Tensor, Var};
use fp8_scaled::Result;
use fp8_scaled::{Scaled, ScaledVar, as_scaled};

/// One function on some inputs.
pub struct Check<'a> {
    name: &'a str,
    inputs: Vec<Tensor>,
    candle_differentiates: bool,
}

/// Patternless f64 values near 1 in magnitude, all different, none closer to 0 than 1/16.
pub fn wave(dims: &[usize], seed: usize) -> Tensor {
    let count: usize = dims.iter().product();
    let value = |i: usize| {
        let x = (((i + 7) * (2 * seed + 9)) as f64 * 12.9898).sin();
        x + 0.0625 * x.signum()
    };
    let values: Vec<f64> = (0..count).map(value).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

/// The magnitudes of [`wave`].
pub fn positive(dims: &[usize], seed: usize) -> Tensor {
    wave(dims, seed).abs().unwrap()
}

impl<'a> Check<'a> {
    /// Inputs are f64.
    pub fn new(name: &'a str, inputs: &[Tensor]) -> Self {
        Self {
            name,
            inputs: inputs.to_vec(),
            candle_differentiates: true,
        }
    }

    /// For functions whose gradient candle gets wrong or does not have: finite differences only.
    pub fn without_candle(self) -> Self {
        Self {
            candle_differentiates: false,
            ..self
        }
    }

    /// Compares `scaled` with `plain`: values in f64 and f32, gradients with finite differences in f64 and with candle's autograd in
    /// f32, each with several scales of the inputs, whose values stay the same.
    pub fn run(
        &self,
        scaled: impl Fn(&[Scaled]) -> Result<Scaled>,
        plain: impl Fn(&[Tensor]) -> Result<Tensor>,
    ) -> Result<()> {
        for scales in [[0, 0, 0, 0], [3, -5, 2, -1], [-9, 4, -3, 6]] {
            let scales = &scales.map(|e| 2f32.powi(e))[..];
            self.against_differences(scales, &scaled, &plain)?;
            self.against_candle(scales, &scaled, &plain)?;
        }
        Ok(())
    }

    fn variables(&self, inputs: &[Tensor], dtype: DType, scales: &[f32]) -> Result<Vec<ScaledVar>> {
        let of = |(i, x): (usize, &Tensor)| {
            let x = as_scaled(&x.to_dtype(dtype)?, scales[i % scales.len()])?;
            ScaledVar::from_scaled(format!("input {i}"), &x)
        };
        inputs.iter().enumerate().map(of).collect()
    }

    /// A weighted sum of the result, so that its elements have different cotangents.
    fn loss(y: &Scaled) -> Result<Scaled> {
        let weights = as_scaled(&wave(y.dims(), 11), None)?;
        let dtype = y.dtype();
        y.mul(&weights.astype(dtype)?)?.sum_all()
    }

    fn against_differences(
        &self,
        scales: &[f32],
        scaled: &impl Fn(&[Scaled]) -> Result<Scaled>,
        plain: &impl Fn(&[Tensor]) -> Result<Tensor>,
    ) -> Result<()> {
        let forward = |inputs: &[Tensor]| -> Result<(Vec<ScaledVar>, Scaled)> {
            let vars = self.variables(inputs, DType::F64, scales)?;
            let values: Vec<Scaled> = vars.iter().map(ScaledVar::value).collect();
            Ok((vars, scaled(&values)?))
        };
        let (vars, y) = forward(&self.inputs)?;
        let expected = plain(&self.inputs)?;
        assert_eq!(y.dims(), expected.dims(), "{}: shape", self.name);
        self.close("value, f64", &values(&y)?, &f64s(&expected)?, 1e-6);
        let grads = Self::loss(&y)?.backward()?;
        for (i, (var, input)) in vars.iter().zip(&self.inputs).enumerate() {
            let grad = grads.get(var);
            let Some(grad) = grad else {
                panic!("{}: no gradient reached input {i}", self.name);
            };
            assert_eq!(grad.dims(), input.dims(), "{}: gradient {i}", self.name);
            let step = 1e-5;
            let values_here = f64s(input)?;
            let differences = (0..input.elem_count()).map(|j| {
                let at = |offset: f64| -> Result<f64> {
                    let mut moved = values_here.clone();
                    moved[j] += offset;
                    let mut inputs = self.inputs.clone();
                    inputs[i] = Tensor::from_vec(moved, input.dims(), &Device::Cpu)?;
                    Ok(values(&Self::loss(&forward(&inputs)?.1)?)?[0])
                };
                Ok((at(step)? - at(-step)?) / (2.0 * step))
            });
            let differences = differences.collect::<Result<Vec<f64>>>()?;
            self.close(
                &format!("gradient {i}, f64"),
                &values(grad)?,
                &differences,
                1e-6,
            );
        }
        Ok(())
    }

    fn against_candle(
        &self,
        scales: &[f32],
        scaled: &impl Fn(&[Scaled]) -> Result<Scaled>,
        plain: &impl Fn(&[Tensor]) -> Result<Tensor>,
    ) -> Result<()> {
        let vars = self.variables(&self.inputs, DType::F32, scales)?;
        let inputs: Vec<Scaled> = vars.iter().map(ScaledVar::value).collect();
        let y = scaled(&inputs)?;
        let plain_vars = (self.inputs.iter())
            .map(|x| Var::from_tensor(&x.to_dtype(DType::F32)?))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = plain_vars.iter().map(|v| v.as_tensor().clone()).collect();
        let expected = plain(&tensors)?;
        self.close("value, f32", &values(&y)?, &f64s(&expected)?, 1e-5);
        if !self.candle_differentiates {
            return Ok(());
        }
        let grads = Self::loss(&y)?.backward()?;
        let weights = wave(expected.dims(), 11).to_dtype(DType::F32)?;
        let plain_grads = (expected * weights)?.sum_all()?.backward()?;
        for (i, (var, plain)) in vars.iter().zip(&plain_vars).enumerate() {
            let (Some(grad), Some(expected)) = (grads.get(var), plain_grads.get(plain)) else {
                panic!("{}: no gradient reached input {i}", self.name);
            };
            self.close(
                &format!("gradient {i}, f32"),
                &values(grad)?,
                &f64s(expected)?,
                1e-5,
            );
        }
        Ok(())
    }

    /// Within `tolerance` of the largest.
    fn close(&self, what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
        assert_eq!(got.len(), expected.len(), "{}: {what}", self.name);
        let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (got - expected).abs();
            assert!(
                error <= tolerance * largest.max(1e-3),
                "{}, {what}: element {i} is {got}, expected {expected}; the largest is {largest}",
                self.name
            );
        }
    }
}

/// The values in f64.
pub fn values(x: &Scaled) -> Result<Vec<f64>> {
    f64s(&x.to_tensor(DType::F64)?)
}

fn f64s(x: &Tensor) -> Result<Vec<f64>> {
    Ok(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

#[test]
fn arithmetic() -> Result<()> {
    let (a, b) = (wave(&[2, 3], 1), wave(&[2, 3], 2));
    let row = wave(&[3], 3);
    Check::new("add", &[a.clone(), b.clone()])
        .run(|x| x[0].add(&x[1]), |x| Ok((&x[0] + &x[1])?))?;
    Check::new("add a row", &[a.clone(), row.clone()])
        .run(|x| x[0].add(&x[1]), |x| Ok(x[0].broadcast_add(&x[1])?))?;
    Check::new("subtract from a row", &[row.clone(), a.clone()])
        .run(|x| x[0].sub(&x[1]), |x| Ok(x[0].broadcast_sub(&x[1])?))?;
    Check::new("mul", &[a.clone(), row.clone()])
        .run(|x| x[0].mul(&x[1]), |x| Ok(x[0].broadcast_mul(&x[1])?))?;
    Check::new("div", &[a.clone(), b.clone()])
        .run(|x| x[0].div(&x[1]), |x| Ok((&x[0] / &x[1])?))?;
    Check::new("a value used three times", std::slice::from_ref(&a)).run(
        |x| x[0].mul(&x[0])?.add(&x[0]),
        |x| Ok((x[0].sqr()? + &x[0])?),
    )?;
    Check::new("sum", &[a]).run(|x| x[0].sum_keepdim(&[1]), |x| Ok(x[0].sum_keepdim(1)?))
}
