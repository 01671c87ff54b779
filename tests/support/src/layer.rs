//! One linear layer, its FP8 state, and the recipes that tests go through.

use crate::{flat, var};
use candle_core::Var;
use fp8_recipes::config::{DelayedScaling, InitialScale, Recipe};
use fp8_recipes::nn::Linear;
use fp8_recipes::{Fp8Module, PrepareOptions, PrepareReport, prepare_fp8};

/// A linear layer and its variables.
pub struct Layer {
    /// Shape `[out, in]`.
    pub weight: Var,
    /// Shape `[out]`.
    pub bias: Var,
    /// The layer over both.
    pub linear: Linear,
}

impl Layer {
    /// A layer whose values depend on `seed`.
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

    /// The state of one role.
    pub fn slot(&self, role: &str) -> Slot {
        slot(&self.linear, role)
    }
}

/// Prepares with the default options.
pub fn prepare<M: Fp8Module>(model: &mut M) -> PrepareReport {
    prepare_fp8(model, &PrepareOptions::default()).unwrap()
}

/// What a slot holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Slot {
    /// What values are multiplied by before the cast.
    pub quant_scale: f32,
    /// The amaxes of the last steps.
    pub history: Vec<f32>,
    /// How many casts met inf or NaN.
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

/// Every named recipe, and two more with delayed scaling.
pub fn recipes() -> Vec<(&'static str, Recipe)> {
    let named = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"];
    let mut all: Vec<_> = named.map(|name| (name, name.parse().unwrap())).into();
    all.push(("delayed, short", delayed(3).into()));
    let first_batch = delayed(4).with_initial(InitialScale::FirstBatch);
    all.push(("delayed, first batch", first_batch.into()));
    all
}
