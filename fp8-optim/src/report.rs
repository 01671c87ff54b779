//! The report of one step, read from the device only when asked.

#[cfg(feature = "cuda")]
use std::sync::{Arc, OnceLock};

use super::error::Result;
use super::veto::CastVeto;
#[cfg(feature = "cuda")]
use super::veto::SkipStreak;
#[cfg(feature = "cuda")]
use candle_core::Tensor;
use fp8_candle::state::NonFinite;

/// What one step did.
///
/// When all variables are on one CUDA device, the norm and the decision to skip stay there: the first call of a method here copies them to
/// the host, which waits for the device. A program that does not read its reports never waits. Later steps do not change the values.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// The learning rate of this step.
    pub lr: f64,
    /// How many variables had a gradient. They were updated unless the step was skipped.
    pub updated: usize,
    outcome: Outcome,
    veto: CastVeto,
}

#[derive(Clone, Debug)]
enum Outcome {
    Known(Values),
    #[cfg(feature = "cuda")]
    OnDevice(Arc<DeviceValues>),
}

#[derive(Clone, Copy, Debug)]
struct Values {
    grad_norm: f64,
    clip_coefficient: f64,
    skipped: bool,
}

/// f64 `[4]`: norm, clip coefficient, 1 if skipped, steps taken.
#[cfg(feature = "cuda")]
#[derive(Debug)]
struct DeviceValues {
    tensor: Tensor,
    streak: SkipStreak,
    read: OnceLock<Values>,
}

impl StepReport {
    /// A step that was taken, with the norm of the gradients before clipping and the factor of clipping.
    ///
    /// ```
    /// use fp8_optim::StepReport;
    /// let report = StepReport::taken(1e-3, 12, 4., 0.25);
    /// assert!(!report.skipped()? && report.clip_coefficient()? == 0.25);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn taken(lr: f64, updated: usize, grad_norm: f64, clip_coefficient: f64) -> Self {
        let values = Values {
            grad_norm,
            clip_coefficient,
            skipped: false,
        };
        Self::known(lr, updated, values, CastVeto::default())
    }

    /// A step that was skipped after `step` steps because of gradients of this norm; warns in `tracing`.
    pub fn skipped_step(lr: f64, updated: usize, grad_norm: f64, step: u64) -> Self {
        Self::skipped_by(lr, updated, grad_norm, step, (CastVeto::default(), None))
    }

    /// [`StepReport::skipped_step`], with the casts that have seen Inf or NaN, and the tensor of the first one.
    pub(super) fn skipped_by(
        lr: f64,
        updated: usize,
        grad_norm: f64,
        step: u64,
        (veto, first): (CastVeto, Option<String>),
    ) -> Self {
        warn_skipped(grad_norm, step, first.as_deref());
        let values = Values {
            grad_norm,
            clip_coefficient: 0.0,
            skipped: true,
        };
        Self::known(lr, updated, values, veto)
    }

    fn known(lr: f64, updated: usize, values: Values, veto: CastVeto) -> Self {
        Self {
            lr,
            updated,
            outcome: Outcome::Known(values),
            veto,
        }
    }

    /// A step whose outcome lies in `tensor`, as `MultiTensorAdamW::step` returns it.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(
        lr: f64,
        updated: usize,
        tensor: Tensor,
        veto: CastVeto,
        streak: SkipStreak,
    ) -> Self {
        let values = DeviceValues {
            tensor,
            streak,
            read: OnceLock::new(),
        };
        Self {
            lr,
            updated,
            outcome: Outcome::OnDevice(Arc::new(values)),
            veto,
        }
    }

    fn values(&self) -> Result<Values> {
        match &self.outcome {
            Outcome::Known(values) => Ok(*values),
            #[cfg(feature = "cuda")]
            Outcome::OnDevice(device) => {
                if let Some(values) = device.read.get() {
                    return Ok(*values);
                }
                let all = device.tensor.to_vec1::<f64>()?;
                let &[grad_norm, clip_coefficient, skipped, step] = all.as_slice() else {
                    let error = format!("a step report has 4 values, got {}", all.len());
                    return Err(candle_core::Error::msg(error).into());
                };
                let values = Values {
                    grad_norm,
                    clip_coefficient,
                    skipped: skipped != 0.0,
                };
                // Only the first reader warns.
                if device.read.set(values).is_ok() {
                    if values.skipped {
                        device.streak.add();
                        let first = self.veto.first()?;
                        warn_skipped(grad_norm, step as u64, first.as_deref());
                    } else {
                        device.streak.end();
                    }
                }
                Ok(values)
            }
        }
    }

    /// Euclidean norm over all gradients before clipping. It is not finite when a gradient is not, and NaN when a cast of the step has seen
    /// Inf or NaN, which a saturating cast makes finite.
    ///
    /// # Errors
    /// candle's, when it cannot be copied from the device.
    pub fn grad_norm(&self) -> Result<f64> {
        Ok(self.values()?.grad_norm)
    }

    /// What the gradients were multiplied by: 1 when nothing was clipped, 0 for a skipped step.
    ///
    /// # Errors
    /// As [`StepReport::grad_norm`].
    pub fn clip_coefficient(&self) -> Result<f64> {
        Ok(self.values()?.clip_coefficient)
    }

    /// Whether nothing was changed because the gradient norm was not finite.
    ///
    /// # Errors
    /// As [`StepReport::grad_norm`].
    pub fn skipped(&self) -> Result<bool> {
        Ok(self.values()?.skipped)
    }

    /// Where casts of the step saw Inf or NaN in the models that have variables of this optimizer, in the order of time; empty for a step
    /// that was taken.
    ///
    /// # Errors
    /// As [`StepReport::grad_norm`].
    pub fn non_finite(&self) -> Result<Vec<NonFinite>> {
        self.veto.casts()
    }

    /// The tensor in which Inf or NaN was first seen since the last clean step, as `StepSummary::first_non_finite`.
    ///
    /// # Errors
    /// As [`StepReport::grad_norm`].
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        self.veto.first()
    }
}

fn warn_skipped(grad_norm: f64, step: u64, first: Option<&str>) {
    tracing::warn!(
        grad_norm,
        step,
        first_non_finite = first,
        "gradients are not finite: optimizer step skipped"
    );
}
