//! Where Inf or NaN came from.

use super::super::error::{Error, NotFinite, Result};
use super::super::objective::Objective;
use super::{Trainer, UNKNOWN, Unread};
use crate::{Fp8Module, PrepareOptions, RecipeName, fp8_autocast, prepare_fp8};
use candle_core::DType;

impl<M: Fp8Module, T: Objective<M>> Trainer<M, T> {
    pub(super) fn not_finite(&self, unread: &Unread, what: NotFinite) -> Result<Error> {
        let checkpoint = self.checkpoint.clone();
        Ok(Error::NotFinite {
            name: self.name.clone(),
            step: unread.step,
            what,
            origin: self.origin(unread)?,
            checkpoint: checkpoint.zip(self.saved),
        })
    }

    /// Where Inf or NaN came first in a step.
    fn origin(&self, unread: &Unread) -> Result<String> {
        if let Some(summary) = &unread.summary
            && let Some(first) = summary.first_non_finite()?
        {
            return Ok(first);
        }
        if let Some(parameter) = self.parameter()? {
            return Ok(parameter);
        }
        if self.recipe(unread.step).is_none()
            && let Some(operand) = self.operand(unread.step - 1)?
        {
            return Ok(operand);
        }
        Ok(UNKNOWN.to_string())
    }

    /// The first parameter with Inf or NaN, by name.
    pub(super) fn parameter(&self) -> Result<Option<String>> {
        let vars = self.state.vars().data().lock();
        let vars = vars.map_err(|_| candle_core::Error::msg("the VarMap's lock is poisoned"))?;
        let mut names: Vec<_> = vars.iter().collect();
        names.sort_by_key(|(name, _)| *name);
        for (name, var) in names {
            // Zero for finite numbers, however large, and NaN for Inf and NaN.
            let sum = (var.to_dtype(DType::F32)? * 0.)?.sum_all()?;
            if sum.to_scalar::<f32>()?.is_nan() {
                return Ok(Some(format!("the parameter {name}")));
            }
        }
        Ok(None)
    }

    /// The operand of a linear layer in which Inf or NaN comes first if the batch of a step is computed again: the step of a run in high
    /// precision has no casts that would have seen it. A step with Inf or NaN has changed no parameter, so the values are the same but
    /// for the rounding of these casts. None if no layer can be cast, such as those of an FP8 file, or none sees any.
    fn operand(&self, step: u64) -> Result<Option<String>> {
        if self.config.recipe.is_none() {
            let report = prepare_fp8(self.state.model(), &PrepareOptions::default())?;
            if report.converted() == 0 {
                return Ok(None);
            }
        }
        let guard = fp8_autocast(RecipeName::Tensorwise)?;
        let replayed = self.parts(step);
        let summary = guard.close()?;
        replayed?;
        Ok(summary.first_non_finite()?)
    }
}
