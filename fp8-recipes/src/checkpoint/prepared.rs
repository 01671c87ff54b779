//! The prepared layers of a model, the check that no step of theirs is unfinished, and how many casts they have made.

use crate::autocast::{Fp8State, end_step, unfinished_steps};
use crate::config::Operand;
use crate::error::{Result, TrainingCheckpointError};
use crate::module::{Fp8Layer, Fp8Module, Fp8Operator, Visitor};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A prepared layer or operator.
pub(super) struct PreparedLayer {
    /// None for an operator without a GEMM.
    pub(super) weight: Option<Tensor>,
    pub(super) state: Arc<Fp8State>,
}

/// The prepared layers and operators of a model; those that share their state occur once.
pub(super) fn prepared_layers<M: Fp8Module + ?Sized>(model: &M) -> Vec<PreparedLayer> {
    #[derive(Default)]
    struct Layers(Vec<PreparedLayer>);
    impl Layers {
        fn note(&mut self, state: Option<Arc<Fp8State>>, weight: Option<&Tensor>) {
            if let Some(state) = state
                && !self.0.iter().any(|other| Arc::ptr_eq(&other.state, &state))
            {
                let weight = weight.cloned();
                self.0.push(PreparedLayer { weight, state });
            }
        }
    }
    impl Visitor for Layers {
        fn layer(&mut self, layer: &dyn Fp8Layer) {
            self.note(layer.fp8_state(), Some(layer.held_weight()));
        }

        fn operator(&mut self, operator: &dyn Fp8Operator) {
            self.note(operator.fp8_state(), None);
        }
    }
    let mut all = Layers::default();
    model.visit(&mut all);
    all.0
}

/// An error in the middle of a step, which a checkpoint would end: the rest of it would compute with other scales. `announces`: whether the
/// run's optimizer is known to announce each of its steps. If not, it may have taken this one unnoticed, so there is only a warning.
pub(super) fn check_between_steps(layers: &[PreparedLayer], announces: bool) -> Result<()> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let unfinished = unfinished_steps();
    let Some((_, layer)) = unfinished.first() else {
        return Ok(());
    };
    // Weights may have been changed without an announcement.
    for PreparedLayer { weight, state } in layers {
        let Some(weight) = weight else { continue };
        for (step, _) in &unfinished {
            if state.cache.has_changed_since(weight, step)? {
                return Ok(());
            }
        }
    }
    if announces {
        let layer = layer.clone();
        return Err(TrainingCheckpointError::UnfinishedStep { layer }.into());
    }
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            layer,
            "saving ends the FP8 step that is open on this thread, in which no change of parameters was announced or noticed: if the \
             optimizer's step is yet to come, the rest of the step computes with other scales; save after it"
        );
    }
    Ok(())
}

/// Ends the last step of `model`; its prepared layers. `announces` as in [`check_between_steps`].
///
/// # Errors
/// [`TrainingCheckpointError::UnfinishedStep`] in the middle of a step, which goes on then.
pub(super) fn settled_layers<M: Fp8Module + ?Sized>(
    model: &M,
    announces: bool,
) -> Result<Vec<PreparedLayer>> {
    let layers = prepared_layers(model);
    check_between_steps(&layers, announces)?;
    end_step()?;
    for layer in &layers {
        // The guards of the last step may belong to another thread, which `end_step` does not reach.
        layer.state.table().update_gradients()?;
    }
    Ok(layers)
}

/// How many casts of each operand the model's layers and operators have made so far. A copy that serves both uses of an operand
/// counts for the first.
///
/// ```
/// # use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes::{PrepareOptions, RecipeName, checkpoint::cast_counts, config::Operand, nn, prepare_fp8, with_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let x = Tensor::randn(0f32, 1., (4, 32), &Device::Cpu)?;
/// # let layer = nn::Linear::new(Tensor::randn(0f32, 1., (16, 32), &Device::Cpu)?, None).with_path("fc");
/// # prepare_fp8(&layer, &PrepareOptions::default())?;
/// with_fp8(RecipeName::Hybrid, || layer.forward(&x))?;
/// let counts = cast_counts(&layer);
/// assert_eq!(counts[&Operand::Output], 1);
/// assert_eq!(counts[&Operand::GradOutput], 0);
/// # Ok(()) }
/// ```
pub fn cast_counts<M: Fp8Module + ?Sized>(model: &M) -> BTreeMap<Operand, u64> {
    let layers = prepared_layers(model);
    let all = Operand::OF_GEMMS.into_iter().chain(Operand::RESULTS);
    let counts = all.map(|operand| {
        let casts = layers.iter().map(|layer| layer.state.casts(operand));
        (operand, casts.sum())
    });
    counts.collect()
}

/// How many tensors the model's layers have cast to FP8 so far, forward and backward.
pub fn quantized_tensors<M: Fp8Module + ?Sized>(model: &M) -> u64 {
    let layers = prepared_layers(model);
    let casts = layers.iter().map(|layer| layer.state.quantized_tensors());
    casts.sum()
}
