//! The summary of a step.

use crate::error::Result;
use candle_core::Tensor;
use fp8_candle::state::{NonFinite, NonFiniteCounts, StepCells};
use std::sync::Arc;

/// What was cast in a step.
///
/// Counts of Inf and NaN stay on their device until [`StepSummary::non_finite`] asks for them.
#[derive(Debug, Clone, Default)]
pub struct StepSummary {
    pub(super) casts: u64,
    pub(super) layers: usize,
    pub(super) counts: Vec<NonFiniteCounts>,
    pub(super) kept_bytes: u64,
}

impl StepSummary {
    /// Adds a later summary.
    pub(super) fn merge(&mut self, later: Self) {
        self.casts += later.casts;
        self.layers += later.layers;
        self.kept_bytes += later.kept_bytes;
        self.counts.extend(later.counts);
    }

    /// Adds counts from cells that are not merged into a table.
    pub(super) fn add_recorded<'a>(
        &mut self,
        steps: impl Iterator<Item = &'a Arc<StepCells>>,
    ) -> Result<()> {
        for step in steps {
            let counts = step.recorded()?.non_finite;
            let none = Tensor::zeros_like(&counts)?;
            let table = step.table().clone();
            self.counts
                .push(NonFiniteCounts::between(table, none, counts));
        }
        Ok(())
    }

    /// How many tensors were cast to FP8 in the forward passes of the step, and in those backward passes that ran before its
    /// end.
    pub fn casts(&self) -> u64 {
        self.casts
    }

    /// How many prepared layers were used.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Bytes of the codes and scales that the step's forward passes have kept in place of activations in high precision, because the recipe
    /// has [`kept_activations`](crate::config::Fp8LinearConfig::kept_activations). With that option, 0 means that casts for products have left
    /// nothing in high precision, or that no module of the step was one node of the graph, so the option had no effect: a warning says so once.
    pub fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Where casts of the step saw Inf or NaN, under any recipe, in the order of time. Gradients are among them as soon as the
    /// backward pass has run, which may be after the guard has closed: ask then, or [`end_step`](crate::end_step). On a GPU the
    /// order is that in which the tensors were first cast. Copies counts to the host.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor, Var};
    /// # use fp8_recipes::{fp8_autocast, nn, prepare_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let weight = Var::randn(0f32, 1., (16, 32), &Device::Cpu)?;
    /// # let layer = nn::Linear::new(weight.as_tensor().clone(), None).with_path("fc");
    /// # prepare_fp8(&layer, &Default::default())?;
    /// # let x = Tensor::ones((4, 32), DType::F32, &Device::Cpu)?;
    /// let guard = fp8_autocast("delayed")?;
    /// let y = layer.forward(&x)?;
    /// let summary = guard.close()?;
    /// assert!(summary.non_finite()?.is_empty());
    /// (y.sum_all()? * f64::INFINITY)?.backward()?;
    /// assert_eq!(summary.non_finite()?[0].slot, "fc.grad_output");
    /// # Ok(()) }
    /// ```
    pub fn non_finite(&self) -> Result<Vec<NonFinite>> {
        Ok(NonFiniteCounts::list(&self.counts)?)
    }

    /// The tensor in which Inf or NaN first appeared since the last step without any: the origin of the problem, even if this
    /// step only shows its consequences. None if this step has seen none. Copies counts to the host.
    ///
    /// # Errors
    /// As [`StepSummary::non_finite`].
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        Ok(NonFiniteCounts::first(&self.counts)?)
    }
}
