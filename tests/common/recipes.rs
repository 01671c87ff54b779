//! Data, models and comparisons that the tests of guard, conversion, export and resume share.
#![allow(dead_code)] // each test binary uses its own part

#[path = "../../fp8-candle/tests/common/device.rs"]
mod device;

#[allow(unused_imports, reason = "each test binary uses its own part")]
pub use device::{device, on_cuda, skipped_on_cuda};

use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8::recipes::config::{DelayedScaling, InitialScale, Recipe};
use fp8::recipes::nn::{self, Linear};
use fp8::recipes::{Fp8Module, PrepareOptions, PrepareReport, prepare_fp8};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Values in -1..1, the same for the same seed and shape.
pub fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random::<f32>() * 2. - 1.).collect()
}

/// [`values`] as a tensor.
pub fn tensor(seed: u64, dims: &[usize]) -> Tensor {
    Tensor::from_vec(values(seed, dims.iter().product()), dims, &device()).unwrap()
}

/// [`values`] as a variable.
pub fn var(seed: u64, dims: &[usize]) -> Var {
    Var::from_tensor(&tensor(seed, dims)).unwrap()
}

/// A tensor of these values.
pub fn of(values: &[f32], dims: &[usize]) -> Tensor {
    Tensor::from_slice(values, dims, &device()).unwrap()
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

/// Same dtype, shape and bits, or a panic that names the case and the first difference.
#[track_caller]
pub fn assert_same(case: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!(
        (got.dtype(), got.dims()),
        (expected.dtype(), expected.dims()),
        "{case}: dtype and shape"
    );
    let (got, expected) = (flat(got), flat(expected));
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        assert_eq!(
            g.to_bits(),
            e.to_bits(),
            "{case}: element {i}: got {g}, expected {e}"
        );
    }
}

/// The opposite of [`assert_same`], for the same shapes.
#[track_caller]
pub fn assert_differ(case: &str, got: &Tensor, other: &Tensor) {
    assert_eq!(got.dims(), other.dims(), "{case}: shape");
    assert_ne!(bits(got), bits(other), "{case}: the same bits");
}

/// Every element within `tolerance` of the largest expected magnitude; gives the largest deviation so measured.
#[track_caller]
pub fn assert_close(case: &str, got: &Tensor, expected: &Tensor, tolerance: f32) -> f32 {
    assert_eq!(got.dims(), expected.dims(), "{case}: shape");
    let (got, expected) = (flat(got), flat(expected));
    let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
    let mut worst = 0f32;
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        let deviation = (g - e).abs() / largest;
        assert!(
            deviation <= tolerance,
            "{case}: element {i}: got {g}, expected {e}"
        );
        worst = worst.max(deviation);
    }
    worst
}

/// The text of the error, which must contain every part.
#[track_caller]
pub fn assert_text<E: std::fmt::Display>(case: &str, error: E, parts: &[&str]) -> String {
    let text = error.to_string();
    for part in parts {
        assert!(
            text.contains(part),
            "{case}: `{part}` is not in the message: {text}"
        );
    }
    text
}

/// A linear layer over variables, with the path `path`, not prepared.
pub struct Layer {
    pub weight: Var,
    pub bias: Var,
    pub linear: Linear,
}

impl Layer {
    pub fn new(path: &str, seed: u64, out: usize, inp: usize) -> Self {
        let (weight, bias) = (var(seed, &[out, inp]), var(seed + 1, &[out]));
        let linear = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        Self {
            weight,
            bias,
            linear: linear.with_path(path),
        }
    }

    /// With FP8 state.
    pub fn prepared(path: &str, seed: u64, out: usize, inp: usize) -> Self {
        let mut layer = Self::new(path, seed, out, inp);
        let report = prepare(&mut layer.linear);
        assert_eq!(report.converted(), 1, "{report}");
        layer
    }

    /// candle-nn's layer over the same variables.
    pub fn stock(&self) -> candle_nn::Linear {
        let (weight, bias) = (
            self.weight.as_tensor().clone(),
            self.bias.as_tensor().clone(),
        );
        candle_nn::Linear::new(weight, Some(bias))
    }

    pub fn slot(&self, role: &str) -> Slot {
        slot(&self.linear, role)
    }
}

/// Prepares with the default options.
pub fn prepare<M: fp8::recipes::Fp8Module>(model: &mut M) -> PrepareReport {
    prepare_fp8(model, &PrepareOptions::default()).unwrap()
}

/// What a slot holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Slot {
    pub quant_scale: f32,
    pub history: Vec<f32>,
    pub non_finite: u32,
}

/// The state of one role (`input`, `weight` or `grad_output`) of a prepared layer.
#[track_caller]
pub fn slot(linear: &Linear, role: &str) -> Slot {
    let state = linear.fp8_state().expect("a prepared layer");
    let mut slots = state.slots().iter();
    let (_, slot) = slots.find(|(own, _)| own.name() == role).expect("a role");
    let tensors = slot.tensors().unwrap();
    Slot {
        quant_scale: flat(&tensors.quant_scale)[0],
        history: flat(&tensors.amax_history),
        non_finite: slot.non_finite_count().unwrap(),
    }
}

/// All three slots.
pub fn slots(linear: &Linear) -> [Slot; 3] {
    ["input", "weight", "grad_output"].map(|role| slot(linear, role))
}

/// Delayed scaling with a short history.
pub fn delayed(len: usize) -> DelayedScaling {
    DelayedScaling::default().with_amax_history_len(len)
}

/// Every named recipe and two more delayed ones.
pub fn recipes() -> Vec<(&'static str, Recipe)> {
    let named = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"];
    let mut all: Vec<_> = named.map(|name| (name, name.parse().unwrap())).into();
    all.push(("delayed, short", delayed(3).into()));
    let first_batch = delayed(4).with_initial(InitialScale::FirstBatch);
    all.push(("delayed, first batch", first_batch.into()));
    all
}

/// Two layers with a norm and a GELU between them.
#[derive(Debug, Clone, Fp8Module)]
pub struct Mlp {
    pub up: Linear,
    pub norm: nn::LayerNorm,
    pub down: Linear,
}

impl Mlp {
    pub const IN: usize = 12;
    pub const HIDDEN: usize = 20;
    pub const OUT: usize = 6;

    pub fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            up: nn::linear(Self::IN, Self::HIDDEN, vb.pp("up"))?,
            norm: nn::layer_norm(Self::HIDDEN, 1e-5, vb.pp("norm"))?,
            down: nn::linear(Self::HIDDEN, Self::OUT, vb.pp("down"))?,
        })
    }
}

impl candle_core::Module for Mlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down
            .forward(&self.norm.forward(&self.up.forward(x)?)?.gelu_erf()?)
    }
}

/// Gives every variable values that depend on its name and `seed` only.
pub fn fill(vars: &VarMap, seed: u64) {
    let vars = vars.data().lock().unwrap();
    for (name, var) in vars.iter() {
        let salt = name
            .bytes()
            .fold(seed, |hash, b| hash.wrapping_mul(31) + u64::from(b));
        let noise = (tensor(salt, var.dims()) * 0.4).unwrap();
        // Norm weights stay near 1.
        let value = if name.ends_with("norm.weight") {
            (noise + 1.).unwrap()
        } else {
            noise
        };
        var.set(&value).unwrap();
    }
}
