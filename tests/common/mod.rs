//! What the tests of layers share: one prepared layer, one training step of it, and ways to compare tensors.

#![allow(dead_code, reason = "each test binary uses its own part")]

#[path = "../../fp8-candle/tests/common/device.rs"]
mod device;

#[path = "../../fp8-candle/tests/common/levels.rs"]
pub mod levels;
#[path = "../../fp8-candle/tests/common/rounding.rs"]
pub mod rounding;

#[allow(unused_imports, reason = "each test binary uses its own part")]
pub use device::{device, on_cuda, skipped_on_cuda};

use candle_core::{DType, Module, Result, Tensor};
use fp8::recipes::nn::Linear;
use fp8::recipes::{Autocast, Fp8Module, end_step, fp8_autocast, prepare_fp8};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::path::PathBuf;

/// A file of peers' outputs.
pub fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

/// A model of one linear layer, `l`.
#[derive(Fp8Module)]
pub struct Model {
    pub l: Linear,
}

impl Model {
    /// The layer with FP8 state.
    pub fn prepared(weight: &Tensor, bias: Option<&Tensor>) -> Self {
        let l = Linear::new(weight.clone(), bias.cloned()).with_path("l");
        let model = Self { l };
        let report = prepare_fp8(&model, &Default::default()).unwrap();
        assert_eq!(report.converted(), 1, "{report}");
        model
    }

    /// How many tensors the layer has cast so far.
    pub fn casts(&self) -> u64 {
        self.l.fp8_state().unwrap().quantized_tensors()
    }

    /// Forward and backward under a guard, with `grad_output` as the gradient of the result, and the end of the step.
    pub fn step(
        &self,
        x: &Tensor,
        grad_output: &Tensor,
        autocast: impl Into<Autocast>,
    ) -> Result<Step> {
        let guard = fp8_autocast(autocast)?;
        let y = self.l.forward(x)?;
        let step = self.backward(x, y, grad_output)?;
        guard.close()?;
        end_step()?;
        Ok(step)
    }

    /// The gradients that flow from `grad_output` at `y`.
    pub fn backward(&self, x: &Tensor, y: Tensor, grad_output: &Tensor) -> Result<Step> {
        let grads = (&y * grad_output)?.sum_all()?.backward()?;
        let of = |tensor: &Tensor| grads.get(tensor).cloned();
        Ok(Step {
            grad_x: of(x),
            grad_weight: of(&self.l.weight()?),
            grad_bias: self.l.bias().and_then(of),
            y,
        })
    }
}

/// What one training step of one layer computes.
pub struct Step {
    pub y: Tensor,
    pub grad_x: Option<Tensor>,
    pub grad_weight: Option<Tensor>,
    pub grad_bias: Option<Tensor>,
}

impl Step {
    /// Result and gradients with their names; those that must be there.
    pub fn named(&self) -> Vec<(&'static str, &Tensor)> {
        [
            ("y", Some(&self.y)),
            ("grad_x", self.grad_x.as_ref()),
            ("grad_weight", self.grad_weight.as_ref()),
            ("grad_bias", self.grad_bias.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| Some((name, tensor?)))
        .collect()
    }

    pub fn grad_x(&self) -> &Tensor {
        self.grad_x.as_ref().expect("x has a gradient")
    }

    pub fn grad_weight(&self) -> &Tensor {
        self.grad_weight
            .as_ref()
            .expect("the weight has a gradient")
    }

    pub fn grad_bias(&self) -> &Tensor {
        self.grad_bias.as_ref().expect("the bias has a gradient")
    }
}

/// Standard normal values, the same in every run.
pub fn normal(seed: u64, shape: impl Into<candle_core::Shape>) -> Tensor {
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

/// All values, row-major, exact in f64.
pub fn flat(x: &Tensor) -> Vec<f64> {
    let x = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    x.to_vec1().unwrap()
}

/// Signal to quantization noise in dB.
pub fn sqnr(reference: &Tensor, x: &Tensor) -> f64 {
    assert_eq!(reference.dims(), x.dims());
    let (reference, x) = (flat(reference), flat(x));
    let signal: f64 = reference.iter().map(|r| r * r).sum();
    let noise: f64 = reference.iter().zip(&x).map(|(r, x)| (r - x).powi(2)).sum();
    10. * (signal / noise).log10()
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

/// Fails unless the two tensors have one dtype and shape and the same bits (any NaN equals any other).
#[track_caller]
pub fn assert_same_bits(what: &str, ours: &Tensor, theirs: &Tensor) {
    assert_eq!(ours.dtype(), theirs.dtype(), "dtype of {what}");
    assert_eq!(ours.dims(), theirs.dims(), "shape of {what}");
    for (at, (ours, theirs)) in flat(ours).into_iter().zip(flat(theirs)).enumerate() {
        assert!(
            ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
            "{what} at {at}: {ours:e}, expected {theirs:e}"
        );
    }
}

/// Fails unless each element is within `bound(index, expected)` of the expected one. NaN equals NaN only, an infinity
/// the same infinity only.
#[track_caller]
pub fn assert_within(
    what: &str,
    ours: &Tensor,
    theirs: &Tensor,
    bound: impl Fn(usize, f64) -> f64,
) {
    assert_eq!(ours.dtype(), theirs.dtype(), "dtype of {what}");
    assert_eq!(ours.dims(), theirs.dims(), "shape of {what}");
    for (at, (ours, theirs)) in flat(ours).into_iter().zip(flat(theirs)).enumerate() {
        let close = if theirs.is_finite() {
            (ours - theirs).abs() <= bound(at, theirs)
        } else {
            ours == theirs || ours.is_nan() && theirs.is_nan()
        };
        assert!(
            close,
            "{what} at {at}: {ours:e}, expected {theirs:e} +- {:e}",
            bound(at, theirs)
        );
    }
}

/// Largest finite magnitude.
pub fn largest(x: &Tensor) -> f64 {
    let finite = flat(x).into_iter().filter(|x| x.is_finite());
    finite.fold(0., |max, x| x.abs().max(max))
}
