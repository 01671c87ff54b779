//! A training run as one value: model, variables, optimizer, FP8 state and a count of steps.

use crate::autocast::with_fp8;
use crate::checkpoint::{self, TrainingMeta};
use crate::config::Recipe;
use crate::error::{Error, Result, TrainingCheckpointError};
use crate::module::Fp8Module;
use crate::optim::{NamedOptimizer, ResumableOptimizer, StepReport};
use crate::prepare::{PrepareOptions, PrepareReport, prepare_fp8};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_nn::VarMap;
use std::collections::HashSet;
use std::path::Path;

/// flax's `TrainState`, also that of fp8layers: everything that a step of training changes, created, applied, saved and resumed together.
///
/// The optimizer holds variables of the VarMap and nothing else: FP8 state is in the model's [`StateTable`](crate::StateTable), is updated
/// from the amaxes of each step, and never gets a gradient. In fp8layers it travels as a gradient that overwrites it, which the optimizer
/// has to leave alone.
///
/// A layer that is used several times in a step, shared between places or scanned over blocks, records the largest of its amaxes, as in
/// fp8layers; its variables get the sum of their gradients.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8_recipes::optim::{AdamW, AdamWConfig};
/// use fp8_recipes::{PrepareOptions, Recipe, TrainState, nn};
/// # fn main() -> fp8_recipes::Result<()> {
/// # let dir = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
/// # let path = dir.path().join("run.safetensors");
/// let create = || -> fp8_recipes::Result<_> {
///     let vars = VarMap::new();
///     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
///     let model = nn::linear(16, 8, vb.pp("fc"))?;
///     let recipe: Recipe = "delayed".parse()?;
///     let tx = |vars: &VarMap| AdamW::from_varmap(vars, AdamWConfig::default());
///     TrainState::create(model, vars, Some(recipe), &PrepareOptions::default(), tx)
/// };
/// let mut state = create()?;
/// let x = Tensor::ones((4, 16), DType::F32, &Device::Cpu)?;
/// let (_loss, grads) = state.gradients(|model| -> fp8_recipes::Result<_> {
///     Ok(model.forward(&x)?.sqr()?.mean_all()?)
/// })?;
/// state.apply_gradients(&grads)?;
/// state.save(&path)?;
///
/// // In the next process:
/// let mut state = create()?;
/// state.resume(&path)?;
/// assert_eq!(state.step(), 1);
/// # Ok(()) }
/// ```
pub struct TrainState<M, O> {
    model: M,
    vars: VarMap,
    optimizer: O,
    recipe: Option<Recipe>,
    report: Option<PrepareReport>,
    step: u64,
    /// The state of the run's random generator, in a form that the caller chooses; saved and resumed.
    pub random: serde_json::Value,
    /// Any other values of the caller; saved and resumed.
    pub extra: serde_json::Value,
}

impl<M, O> TrainState<M, O>
where
    M: Fp8Module,
    O: NamedOptimizer + ResumableOptimizer,
{
    /// The state of a new run: prepares `model` if there is a recipe, and makes the optimizer by `tx`. `vars` holds the model's
    /// variables. Without a recipe, as in the high-precision run that others are compared with, `options` have no effect.
    ///
    /// # Errors
    /// What [`prepare_fp8`] and `tx` find; [`TrainingCheckpointError::ForeignVariable`] if the optimizer holds a variable that `vars` does
    /// not, which a checkpoint would miss.
    pub fn create<E>(
        model: M,
        vars: VarMap,
        recipe: Option<Recipe>,
        options: &PrepareOptions,
        tx: impl FnOnce(&VarMap) -> Result<O, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        let report = match &recipe {
            None => None,
            Some(recipe) => {
                recipe.resolve()?;
                Some(prepare_fp8(&model, options)?)
            }
        };
        let optimizer = tx(&vars)?;
        let known: HashSet<_> = vars.all_vars().iter().map(|var| var.id()).collect();
        let mut own = optimizer.named_vars().into_iter();
        if let Some((name, _)) = own.find(|(_, var)| !known.contains(&var.id())) {
            return Err(TrainingCheckpointError::ForeignVariable { name }.into());
        }
        Ok(Self {
            model,
            vars,
            optimizer,
            recipe,
            report,
            step: 0,
            random: serde_json::Value::Null,
            extra: serde_json::Value::Null,
        })
    }

    /// Computes a loss inside a guard with the recipe, and its gradients after the guard: flax's `value_and_grad`. Without a recipe
    /// there is no guard.
    ///
    /// # Errors
    /// The error of `loss`, with which the step leaves no trace in the FP8 state, or one of the guard or the backward pass.
    pub fn gradients<E: From<Error>>(
        &self,
        loss: impl FnOnce(&M) -> Result<Tensor, E>,
    ) -> Result<(Tensor, GradStore), E> {
        let loss = match &self.recipe {
            Some(recipe) => with_fp8(recipe.clone(), || loss(&self.model))?,
            None => loss(&self.model)?,
        };
        let grads = crate::backward(&loss).map_err(Error::from)?;
        Ok((loss, grads))
    }

    /// One step of the optimizer with these gradients, which counts whether or not a veto has skipped it. The FP8 state of the step is
    /// updated from its amaxes as always, not from `grads`.
    ///
    /// # Errors
    /// A gradient that does not fit its variable, or an error of the device; the count stays as it was.
    pub fn apply_gradients(&mut self, grads: &GradStore) -> Result<StepReport> {
        let report = self.optimizer.apply_gradients(grads)?;
        self.step += 1;
        Ok(report)
    }

    /// Saves all of it in one file ([`checkpoint::save_training`]).
    ///
    /// # Errors
    /// As there.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let meta = TrainingMeta {
            step: self.step,
            recipe: self.recipe.clone(),
            random: self.random.clone(),
            extra: self.extra.clone(),
        };
        checkpoint::save_training(path, &self.model, &self.vars, &self.optimizer, &meta)
    }

    /// Restores all of it from a file of [`TrainState::save`] or [`checkpoint::save_training`], so that the run continues bit for bit.
    ///
    /// # Errors
    /// As [`checkpoint::resume_training`]; nothing is changed then.
    pub fn resume(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let recipe = self.recipe.as_ref();
        let meta = checkpoint::resume_training(
            path,
            &self.model,
            &self.vars,
            &mut self.optimizer,
            recipe,
        )?;
        self.step = meta.step;
        self.random = meta.random;
        self.extra = meta.extra;
        Ok(())
    }
}

impl<M, O> std::fmt::Debug for TrainState<M, O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainState")
            .field("step", &self.step)
            .field("recipe", &self.recipe)
            .field("report", &self.report)
            .finish_non_exhaustive()
    }
}

impl<M, O> TrainState<M, O> {
    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The model, to change its settings; its parameters are those of [`TrainState::vars`].
    pub fn model_mut(&mut self) -> &mut M {
        &mut self.model
    }

    /// The variables.
    pub fn vars(&self) -> &VarMap {
        &self.vars
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// The optimizer, for example to set its learning rate.
    pub fn optimizer_mut(&mut self) -> &mut O {
        &mut self.optimizer
    }

    /// The recipe of the guards; None for a run in high precision.
    pub fn recipe(&self) -> Option<&Recipe> {
        self.recipe.as_ref()
    }

    /// What the preparation did with each layer; None without a recipe.
    pub fn report(&self) -> Option<&PrepareReport> {
        self.report.as_ref()
    }

    /// How often gradients were applied, by the runs that this one resumes too.
    pub fn step(&self) -> u64 {
        self.step
    }
}
