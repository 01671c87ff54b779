//! Checkpoints rewritten layer by layer: all of [`fp8_files::rewrite`], and the amaxes that static scales are made of.

pub use fp8_files::rewrite::*;

use crate::autocast::{Autocast, with_fp8};
use crate::config::{Recipe, RecipeName};
use crate::error::Result;
use crate::module::{Fp8Module, for_each_layer};
use crate::prepare::{PrepareOptions, prepare_fp8};
use fp8_candle::Role;
use std::collections::BTreeMap;

/// Runs a model on samples and returns the amax of each linear layer's inputs by path:
/// [`QuantizeOptions::with_input_amaxes`](QuantizeOptions::with_input_amaxes).
///
/// The model computes in high precision. It stays prepared for FP8, which changes nothing outside a guard.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Module, Tensor};
/// use fp8::{nn::Linear, rewrite::input_amaxes};
///
/// # fn main() -> fp8_recipes::Result<()> {
/// let weight = Tensor::ones((16, 32), DType::F32, &Device::Cpu)?;
/// let layer = Linear::new(weight, None).with_path("fc");
/// let amax_of = |value: f32| {
///     let run = || {
///         layer.forward(&Tensor::full(value, (2, 32), &Device::Cpu)?)?;
///         Ok(())
///     };
///     Ok::<f32, fp8::Error>(input_amaxes(&layer, run)?["fc"])
/// };
/// assert_eq!(amax_of(-3.)?, 3.);
/// assert_eq!(amax_of(2.)?, 2.);
/// # Ok(()) }
/// ```
///
/// An earlier calibration of the model's inputs is replaced, or, if `run` fails, forgotten.
///
/// # Errors
/// Those of `run`; if an input is not finite, or a guard cannot open on this thread.
pub fn input_amaxes<M: Fp8Module + ?Sized>(
    model: &M,
    run: impl FnOnce() -> Result<()>,
) -> Result<BTreeMap<String, f32>> {
    // Files have no form for convolutions.
    prepare_fp8(model, &PrepareOptions::default().with_convolutions(false))?;
    // Neither a delayed recipe nor an earlier calibration may mix in the amaxes of earlier inputs.
    for_each_layer(model, |layer| {
        let state = layer.fp8_state();
        if let Some(slot) = state.as_ref().and_then(|state| state.slot(Role::Input)) {
            slot.reset_calibration();
        }
    });
    let recipe = Recipe::from(RecipeName::Tensorwise);
    with_fp8(Autocast::new(recipe).calibrating(true), run)?;
    let mut amaxes = BTreeMap::new();
    for_each_layer(model, |layer| {
        let state = layer.fp8_state();
        let amax = state.and_then(|state| state.slot(Role::Input)?.calibrated_amax());
        if let (Some(path), Some(amax)) = (layer.path(), amax) {
            amaxes.insert(path.to_string(), amax);
        }
    });
    Ok(amaxes)
}
