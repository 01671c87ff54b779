//! What a run trains: parameters with their optimizer, plain or scaled.

use crate::data::Batch;
use crate::gpt::{Gpt, GptConfig, initial};
use crate::parameters::{set_plain, set_scaled};
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, resume_training, save_training, training_meta};
use fp8::fp8_candle::profile;
use fp8::nn::ops;
use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
use fp8::optim::{AdamW, AdamWConfig, StepReport};
use fp8::scaled::{
    self, Array, MatmulPrecision, Scaled, ScaledOptions, ScaledVarMap, TrainingState,
};
use fp8::{AutocastGuard, Recipe, check_gradients};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

pub enum Weights {
    Plain {
        vars: VarMap,
        optimizer: Box<AdamW>,
    },
    /// f16 data with scales; products under `options`.
    Scaled {
        vars: ScaledVarMap,
        optimizer: Box<ScaledAdamW>,
        options: ScaledOptions,
    },
}

/// What a checkpoint stores besides tensors.
pub struct Place {
    pub step: u64,
    pub quantized_tensors: u64,
    pub settings: Value,
}

const SETTINGS: &str = "settings";
const QUANTIZED: &str = "quantized_tensors";

/// The precision of products in the scaled run `name`; None for any other run.
pub fn scaled_matmul(name: &str) -> Option<MatmulPrecision> {
    match name {
        "scaled_fp16" => Some(MatmulPrecision::Data),
        "scaled_fp8" => Some(MatmulPrecision::FP8),
        _ => None,
    }
}

impl Weights {
    /// A model with the initial weights of the seed, and its optimizer.
    pub fn plain(
        dtype: DType,
        model: &GptConfig,
        seed: u64,
        config: AdamWConfig,
        device: &Device,
    ) -> Result<(Gpt, Self)> {
        let vars = VarMap::new();
        let gpt = Gpt::new(model, VarBuilder::from_varmap(&vars, dtype, device))?;
        set_plain(&vars, initial(model, seed))?;
        let optimizer = Box::new(AdamW::from_varmap(&vars, config)?);
        Ok((gpt, Self::Plain { vars, optimizer }))
    }

    /// The same in scaled arithmetic.
    pub fn scaled(
        matmul: MatmulPrecision,
        model: &GptConfig,
        seed: u64,
        config: AdamWConfig,
        device: &Device,
    ) -> Result<(Gpt, Self)> {
        let vars = ScaledVarMap::new(DType::F16, device)?;
        let gpt = Gpt::new(model, vars.var_builder())?;
        set_scaled(&vars, initial(model, seed))?;
        let optimizer = Box::new(ScaledAdamW::new(&vars, config)?);
        let options = ScaledOptions::default().with_matmul(matmul).with_seed(seed);
        Ok((
            gpt,
            Self::Scaled {
                vars,
                optimizer,
                options,
            },
        ))
    }

    /// One step; the loss and the report may still be on the device. `guard` covers the forward pass of a plain run. With `check`, a
    /// parameter without a gradient is an error.
    pub fn step(
        &mut self,
        gpt: &Gpt,
        (inputs, targets): &Batch,
        lr: f64,
        guard: Option<AutocastGuard>,
        check: bool,
    ) -> Result<(Tensor, StepReport)> {
        // Operations account for their own parts of this time.
        let _scope = profile::enter(profile::Kind::Candle);
        match self {
            Self::Plain { vars, optimizer } => {
                let loss = ops::cross_entropy(&gpt.forward(inputs)?, targets)?;
                if let Some(guard) = guard {
                    guard.close()?;
                }
                let grads = fp8::backward(&loss)?;
                if check {
                    let missing = check_gradients(vars, &grads);
                    let missing = missing.join(", ");
                    ensure!(missing.is_empty(), "no gradient reached {missing}");
                }
                optimizer.set_lr(lr)?;
                Ok((loss.detach(), optimizer.apply(&grads)?))
            }
            Self::Scaled {
                vars,
                optimizer,
                options,
            } => {
                let scope = scaled::scaled_scope(options.clone());
                let logits: Scaled = gpt.forward(inputs)?;
                let loss = logits.cross_entropy(targets)?;
                drop((scope, logits));
                let grads = loss.backward()?;
                if check {
                    let missing = vars.missing_gradients(&grads).join(", ");
                    ensure!(missing.is_empty(), "no gradient reached {missing}");
                }
                optimizer.set_lr(lr)?;
                Ok((Array::value(&loss)?, optimizer.apply(&grads)?))
            }
        }
    }

    /// The loss of a batch, without a backward pass; the caller opens the guard of a recipe.
    pub fn loss(&self, gpt: &Gpt, (inputs, targets): &Batch) -> Result<Tensor> {
        match self {
            Self::Plain { .. } => Ok(ops::cross_entropy(&gpt.forward(inputs)?, targets)?.detach()),
            Self::Scaled { options, .. } => {
                let _scope = scaled::scaled_scope(options.clone().with_gradients(false));
                let logits: Scaled = gpt.forward(inputs)?;
                Ok(Array::value(&logits.cross_entropy(targets)?)?)
            }
        }
    }

    /// Casts to FP8 of a scaled run, forward and backward.
    pub fn scaled_casts(&self) -> u64 {
        match self {
            Self::Plain { .. } => 0,
            Self::Scaled { options, .. } => options.counters.fp8_casts(),
        }
    }

    /// Values of all parameters by name, in the dtype of a plain run and in f32 of a scaled one.
    pub fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        match self {
            Self::Plain { vars, .. } => {
                let vars = vars
                    .data()
                    .lock()
                    .map_err(|_| anyhow::anyhow!("the VarMap's lock is poisoned"))?;
                let tensors = vars
                    .iter()
                    .map(|(name, var)| (name.clone(), var.as_tensor().detach()));
                Ok(tensors.collect())
            }
            Self::Scaled { vars, .. } => Ok(vars.to_tree()?.to_tensors(DType::F32)?),
        }
    }

    pub fn save(
        &self,
        path: &Path,
        gpt: &Gpt,
        recipe: Option<Recipe>,
        place: Place,
        seed: u64,
    ) -> Result<()> {
        match self {
            Self::Plain { vars, optimizer } => {
                let meta = TrainingMeta {
                    step: place.step,
                    recipe,
                    random: serde_json::json!({
                        "seed": seed,
                        "step": place.step,
                        QUANTIZED: place.quantized_tensors,
                    }),
                    extra: place.settings,
                };
                Ok(save_training(path, gpt, vars, &**optimizer, &meta)?)
            }
            Self::Scaled {
                vars, optimizer, ..
            } => {
                let state = TrainingState::new(place.step)
                    .with_extra(SETTINGS, place.settings)
                    .with_extra(QUANTIZED, place.quantized_tensors);
                Ok(scaled::save_training(path, vars, &**optimizer, &state)?)
            }
        }
    }

    /// Resumes from the checkpoint at `path`, once `fits` has accepted its settings.
    pub fn resume(
        &mut self,
        path: &Path,
        gpt: &Gpt,
        recipe: Option<&Recipe>,
        fits: impl Fn(&Value) -> Result<()>,
    ) -> Result<Place> {
        fits(&saved_settings(path)?)?;
        match self {
            Self::Plain { vars, optimizer } => {
                let meta = resume_training(path, gpt, vars, &mut **optimizer, recipe)?;
                Ok(Place {
                    step: meta.step,
                    quantized_tensors: meta.random[QUANTIZED].as_u64().unwrap_or(0),
                    settings: meta.extra,
                })
            }
            Self::Scaled {
                vars, optimizer, ..
            } => {
                let mut state = scaled::resume_training(path, vars, &mut **optimizer)?;
                Ok(Place {
                    step: state.step,
                    quantized_tensors: state.extra[QUANTIZED].as_u64().unwrap_or(0),
                    settings: state.extra.remove(SETTINGS).unwrap_or_default(),
                })
            }
        }
    }
}

/// The settings in the checkpoint at `path`, of either kind.
pub fn saved_settings(path: &Path) -> Result<Value> {
    if let Ok(state) = scaled::training_state(path) {
        return (state.extra.get(SETTINGS).cloned())
            .with_context(|| format!("{}: not a checkpoint of this example", path.display()));
    }
    Ok(training_meta(path)?.extra)
}
