//! Losses over held-out data.

use super::super::error::{Error, NotFinite, Result};
use super::super::learner::Learner;
use super::super::objective::Objective;
use super::{Trainer, UNKNOWN};
use crate::{Autocast, Fp8Module, Recipe, fp8_autocast};

impl<M: Fp8Module, T: Objective<M>> Trainer<M, T> {
    /// The mean loss over held-out data as the model computes it without the run's recipe: before the first step that of the model that the
    /// run begins with. None without held-out data.
    ///
    /// # Errors
    /// As [`Learner::validate`].
    pub fn validate_high_precision(&mut self) -> Result<Option<f64>> {
        self.validate_by(None)
    }

    /// [`Learner::validate`] under a recipe.
    pub(super) fn validate_by(&mut self, recipe: Option<Recipe>) -> Result<Option<f64>> {
        let guard = recipe.map(|recipe| fp8_autocast(Autocast::new(recipe).training(false)));
        let _guard = guard.transpose()?;
        let (mut sum, mut targets, mut hits) = (0., 0, Some(0));
        for index in 0..self.objective.validation_batches() {
            let batch = self.objective.validation_batch(index)?;
            let count = self.objective.targets(&batch);
            if count > 0 {
                let measured = self.objective.measure(self.state.model(), &batch)?;
                hits = hits.zip(measured.hits).map(|(sum, hits)| sum + hits);
                let loss = measured
                    .loss
                    .to_dtype(candle_core::DType::F32)?
                    .to_scalar::<f32>()?;
                sum += f64::from(loss) * count as f64;
                targets += count;
            }
        }
        let mean = (targets > 0).then(|| sum / targets as f64);
        let hits = hits.filter(|_| targets > 0);
        self.accuracy = hits.map(|hits| hits as f64 / targets as f64);
        match mean {
            Some(loss) if !loss.is_finite() => Err(Error::NotFinite {
                name: self.name.clone(),
                step: self.step(),
                what: NotFinite::Validation,
                origin: self.parameter()?.unwrap_or_else(|| UNKNOWN.to_string()),
                checkpoint: self.checkpoint.clone().zip(self.saved),
            }),
            mean => Ok(mean),
        }
    }
}
