//! What a run trains: parameters with their optimizer, plain or scaled.

use crate::data::Batch;
use crate::gpt::{Gpt, GptConfig, initial};
use crate::parameters::{set_plain, set_scaled};
use crate::ranks::Ranks;
use crate::sharded::Sharded;
use anyhow::{Context, Result, bail, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, resume_training, save_training, training_meta};
use fp8::fp8_candle::profile;
use fp8::nn::ops;
use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
use fp8::optim::{
    AdamW, AdamWConfig, DataParallel, DataParallelOptions, GradAccumulator, StepReport,
};
use fp8::scaled::{
    self, Array, MatmulPrecision, Scaled, ScaledOptions, ScaledVarMap, TrainingState,
};
use fp8::{Autocast, Recipe, check_gradients, fp8_autocast};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

pub enum Weights {
    Plain {
        vars: VarMap,
        optimizer: Box<AdamW>,
        parallel: Option<Box<DataParallel>>,
    },
    /// Parts of the parameters; the others lie on other ranks.
    Sharded(Box<Sharded>),
    /// f16 data with scales; products under `options`.
    Scaled {
        vars: ScaledVarMap,
        optimizer: Box<ScaledAdamW>,
        options: ScaledOptions,
    },
}

/// One step: its micro-batches with their places in it, and what it needs besides.
pub struct StepOf<'a> {
    pub micro_batches: &'a [(u32, Batch)],
    /// The guard of a micro-batch; None in high precision.
    pub autocast: &'a dyn Fn(u32) -> Option<Autocast>,
    pub lr: f64,
    /// Whether a parameter without a gradient is an error.
    pub check: bool,
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
        let plain = Self::Plain {
            vars,
            optimizer,
            parallel: None,
        };
        Ok((gpt, plain))
    }

    /// Shares the gradients with other ranks.
    pub fn join(&mut self, ranks: &Ranks, name: &str) -> Result<()> {
        match self {
            Self::Plain { vars, parallel, .. } => {
                let options = DataParallelOptions::default().with_travel(ranks.travel.into());
                *parallel = Some(Box::new(DataParallel::new(&ranks.group, vars, options)?));
                Ok(())
            }
            Self::Sharded(_) => Ok(()),
            Self::Scaled { .. } => {
                bail!("{name}: --parallel does not take runs in scaled arithmetic")
            }
        }
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

    /// One step; the loss, summed over the micro-batches of this rank, and the report may still be on the device.
    pub fn step(&mut self, gpt: &Gpt, step: &StepOf<'_>) -> Result<(Tensor, StepReport)> {
        // Operations account for their own parts of this time.
        let _scope = profile::enter(profile::Kind::Candle);
        let (check, lr) = (step.check, step.lr);
        match self {
            Self::Plain {
                vars,
                optimizer,
                parallel,
            } => {
                let (loss, grads) = match (step.micro_batches, parallel) {
                    ([(_, batch)], None) => {
                        let guard = (step.autocast)(0).map(fp8_autocast).transpose()?;
                        let loss = loss_of(gpt, batch)?;
                        if let Some(guard) = guard {
                            guard.close()?;
                        }
                        (loss.detach(), fp8::backward(&loss)?)
                    }
                    (_, parallel) => accumulated(gpt, vars, parallel.as_deref_mut(), step)?,
                };
                if check {
                    let missing = check_gradients(vars, &grads);
                    let missing = missing.join(", ");
                    ensure!(missing.is_empty(), "no gradient reached {missing}");
                }
                optimizer.set_lr(lr)?;
                Ok((loss, optimizer.apply(&grads)?))
            }
            Self::Sharded(sharded) => sharded.step(gpt, step),
            Self::Scaled {
                vars,
                optimizer,
                options,
            } => {
                let [(_, (inputs, targets))] = step.micro_batches else {
                    bail!("runs in scaled arithmetic take no --micro-batches");
                };
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

    /// Bytes of moments and masters of a plain run.
    pub fn optimizer_bytes(&self) -> Option<u64> {
        match self {
            Self::Plain { optimizer, .. } => Some(optimizer.state_bytes()),
            _ => None,
        }
    }

    /// The loss of a batch, without a backward pass; the caller opens the guard of a recipe.
    pub fn loss(&self, gpt: &Gpt, batch: &Batch) -> Result<Tensor> {
        match self {
            Self::Plain { .. } | Self::Sharded(_) => Ok(loss_of(gpt, batch)?.detach()),
            Self::Scaled { options, .. } => {
                let (inputs, targets) = batch;
                let _scope = scaled::scaled_scope(options.clone().with_gradients(false));
                let logits: Scaled = gpt.forward(inputs)?;
                Ok(Array::value(&logits.cross_entropy(targets)?)?)
            }
        }
    }

    /// Casts to FP8 of a scaled run, forward and backward.
    pub fn scaled_casts(&self) -> u64 {
        match self {
            Self::Plain { .. } | Self::Sharded(_) => 0,
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
            Self::Sharded(_) => bail!("parameters in parts are gathered before they are read"),
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
        let meta = |place: Place| TrainingMeta {
            step: place.step,
            recipe,
            random: serde_json::json!({
                "seed": seed,
                "step": place.step,
                QUANTIZED: place.quantized_tensors,
            }),
            extra: place.settings,
        };
        match self {
            Self::Plain {
                vars, optimizer, ..
            } => Ok(save_training(path, gpt, vars, &**optimizer, &meta(place))?),
            Self::Sharded(sharded) => sharded.save(path, gpt, &meta(place)),
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
        let place = |meta: TrainingMeta| Place {
            step: meta.step,
            quantized_tensors: meta.random[QUANTIZED].as_u64().unwrap_or(0),
            settings: meta.extra,
        };
        match self {
            Self::Plain {
                vars, optimizer, ..
            } => {
                let meta = resume_training(path, gpt, vars, &mut **optimizer, recipe)?;
                Ok(place(meta))
            }
            Self::Sharded(sharded) => Ok(place(sharded.resume(path, gpt, recipe)?)),
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

pub fn loss_of(gpt: &Gpt, (inputs, targets): &Batch) -> Result<Tensor> {
    Ok(ops::cross_entropy(&gpt.forward(inputs)?, targets)?)
}

/// The sum of the losses of all micro-batches of this rank, in one guard, and the mean of the gradients over all ranks.
fn accumulated(
    gpt: &Gpt,
    vars: &VarMap,
    parallel: Option<&mut DataParallel>,
    step: &StepOf<'_>,
) -> Result<(Tensor, GradStore)> {
    let outer = (step.autocast)(0).map(fp8_autocast).transpose()?;
    let mut accumulator = GradAccumulator::new(vars);
    let mut sum: Option<Tensor> = None;
    let mut add = |loss: &Tensor| -> Result<Tensor> {
        let loss = loss.detach();
        let now = match sum.take() {
            Some(sum) => (sum + loss)?,
            None => loss,
        };
        Ok(sum.insert(now).clone())
    };
    let forward = |place: u32, batch: &Batch| -> Result<_> {
        let inner = (step.autocast)(place).map(fp8_autocast).transpose()?;
        Ok((loss_of(gpt, batch)?, inner))
    };
    let (loss, grads) = match (step.micro_batches, parallel) {
        // Gradients leave while the backward pass runs.
        ([(place, batch)], Some(parallel)) => {
            let (loss, inner) = forward(*place, batch)?;
            let grads = parallel.backward(&loss)?;
            drop(inner);
            (add(&loss)?, grads)
        }
        (micro_batches, parallel) => {
            let mut total = None;
            for (place, batch) in micro_batches {
                let (loss, inner) = forward(*place, batch)?;
                accumulator.add(fp8::backward(&loss)?)?;
                drop(inner);
                total = Some(add(&loss)?);
            }
            let grads = match parallel {
                Some(parallel) => parallel.mean_of(&mut accumulator)?,
                None => accumulator.finish_mean()?,
            };
            (total.context("a step without a micro-batch")?, grads)
        }
    };
    if let Some(guard) = outer {
        guard.close()?;
    }
    Ok((loss, grads))
}

/// The settings in the checkpoint at `path`, of either kind.
pub fn saved_settings(path: &Path) -> Result<Value> {
    if let Ok(state) = scaled::training_state(path) {
        return (state.extra.get(SETTINGS).cloned())
            .with_context(|| format!("{}: not a checkpoint of this example", path.display()));
    }
    Ok(training_meta(path)?.extra)
}
