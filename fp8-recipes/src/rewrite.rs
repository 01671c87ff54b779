//! Checkpoints rewritten layer by layer: all of [`fp8_files::rewrite`], and the amaxes that static scales are made of.

pub use fp8_files::rewrite::*;

use crate::autocast::{Autocast, fp8_autocast};
use crate::config::{Recipe, RecipeName};
use crate::error::Result;
use crate::module::{Fp8Layer, Fp8Module, Visitor};
use crate::prepare::{PrepareOptions, prepare_fp8};
use candle_core::Tensor;
use fp8_candle::Role;
use std::collections::BTreeMap;

/// Runs a model on samples and returns the amax of each linear layer's inputs by path:
/// [`QuantizeOptions::with_input_amaxes`](QuantizeOptions::with_input_amaxes).
///
/// The model computes in high precision. It is prepared for FP8 by this, which changes nothing outside of a guard.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Module, Tensor};
/// use fp8::{nn::Linear, rewrite::input_amaxes};
///
/// # fn main() -> fp8_recipes::Result<()> {
/// let weight = Tensor::ones((16, 32), DType::F32, &Device::Cpu)?;
/// let layer = Linear::new(weight, None).with_path("fc");
/// let amaxes = input_amaxes(&layer, || {
///     layer.forward(&Tensor::full(-3f32, (2, 32), &Device::Cpu)?)?;
///     Ok(())
/// })?;
/// assert_eq!(amaxes["fc"], 3.);
/// # Ok(()) }
/// ```
///
/// # Errors
/// Those of `run`; if an input is not finite, or a guard is open on this thread already that does not allow calibration.
pub fn input_amaxes<M: Fp8Module + ?Sized>(
    model: &M,
    run: impl FnOnce() -> Result<()>,
) -> Result<BTreeMap<String, f32>> {
    // Files have no form for convolutions.
    prepare_fp8(model, &PrepareOptions::default().with_convolutions(false))?;
    // Without a history, in which other inputs may stand.
    let recipe = Recipe::from(RecipeName::Tensorwise);
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true))?;
    run()?;
    guard.close()?;
    let mut amaxes = Amaxes::default();
    model.visit(&mut amaxes);
    Ok(amaxes.0)
}

#[derive(Default)]
struct Amaxes(BTreeMap<String, f32>);

impl Visitor for Amaxes {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        let amax = layer.fp8_state().and_then(|state| {
            let slot = state.slot(Role::Input)?;
            slot.calibrated_amax()
        });
        if let (Some(path), Some(amax)) = (layer.path(), amax) {
            self.0.insert(path.to_string(), amax);
        }
    }

    fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
}
