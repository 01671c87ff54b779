//! One training run.

use crate::data::{CLASSES, Data, Split};
use crate::net::{Mlp, initialize};
use crate::watch::{Kind, Watch};
use anyhow::Result;
use candle_core::{D, DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use clap::ValueEnum;
use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
use fp8::optim::{AdamW, AdamWConfig, LrSchedule};
use fp8::scaled::{
    Array, MatmulPrecision, Scaled, ScaledOptions, ScaledVarMap, as_scaled, scaled_scope,
};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Serialize;
use std::fmt;

/// What data are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Plain f32, for comparison
    F32,
    /// Scaled f16
    F16,
    /// Scaled f16, with every product in FP8
    Fp8,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Fp8 => "fp8",
        })
    }
}

/// What a run is told.
pub struct Settings {
    pub dtype: Precision,
    pub seed: u64,
    pub epochs: usize,
    pub batch: usize,
    pub lr: f64,
}

/// `summary.json`.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub dtype: Precision,
    pub seed: u64,
    /// Mean over the last epoch.
    pub final_train_loss: f64,
    pub test_accuracy: f64,
    /// Products computed by an FP8 GEMM, in training and testing.
    pub fp8_matmuls: u64,
    /// Products of a scaled run that were not.
    pub other_matmuls: u64,
    /// Mean share of what products read that is outside the normal range of its format.
    pub out_of_range: f64,
}

/// Steps between two looks at scales and data.
const WATCH_EVERY: u64 = 10;

/// The parameters and what moves them.
enum Weights {
    Plain(AdamW),
    Scaled(ScaledAdamW, ScaledOptions),
}

/// Trains and tests; `progress` hears the steps done, of how many, and the loss.
pub fn train(
    settings: &Settings,
    data: &Data,
    mut progress: impl FnMut(u64, u64, f64),
) -> Result<(Summary, Watch)> {
    let config = AdamWConfig {
        lr: settings.lr,
        weight_decay: 1e-4,
        ..AdamWConfig::default()
    };
    let (net, mut weights) = build(settings, data, config)?;
    let watch = Watch::default();
    let count = data.train.len();
    let batches = count.div_ceil(settings.batch);
    let steps = (settings.epochs * batches) as u64;
    let schedule = LrSchedule::cosine(settings.lr, (steps / 20).clamp(1, 100), steps);
    let mut rng = StdRng::seed_from_u64(settings.seed);
    let mut order: Vec<u32> = (0..count as u32).collect();
    let mut losses = vec![];
    for _ in 0..settings.epochs {
        order.shuffle(&mut rng);
        for part in order.chunks(settings.batch) {
            let step = losses.len() as u64;
            let (x, y) = select(&data.train, part)?;
            let lr = schedule.lr(step);
            let watched = step.is_multiple_of(WATCH_EVERY).then_some((&watch, step));
            losses.push(train_step(&net, &mut weights, (&x, &y), lr, watched)?);
            progress(losses.len() as u64, steps, losses[losses.len() - 1]);
        }
    }
    let test_accuracy = accuracy(&net, &weights, &data.test)?;
    let last = &losses[losses.len() - batches..];
    let counters = match &weights {
        Weights::Plain(_) => Default::default(),
        Weights::Scaled(_, options) => options.counters.clone(),
    };
    let summary = Summary {
        dtype: settings.dtype,
        seed: settings.seed,
        final_train_loss: last.iter().sum::<f64>() / last.len() as f64,
        test_accuracy,
        fp8_matmuls: counters.fp8_matmuls(),
        other_matmuls: counters.other_matmuls(),
        out_of_range: watch.out_of_range(),
    };
    Ok((summary, watch))
}

/// The same initial weights for every dtype.
fn build(settings: &Settings, data: &Data, config: AdamWConfig) -> Result<(Mlp, Weights)> {
    let (size, device) = (data.size, data.train.images.device());
    let matmul = match settings.dtype {
        Precision::F32 => {
            let vars = VarMap::new();
            let net = Mlp::new(size, VarBuilder::from_varmap(&vars, DType::F32, device))?;
            let named = vars
                .data()
                .lock()
                .map_err(|_| anyhow::anyhow!("the lock of the VarMap is poisoned"))?
                .clone();
            let shapes = named
                .iter()
                .map(|(name, var)| (name.clone(), var.dims().to_vec()));
            initialize(shapes.collect(), settings.seed, |name, value| {
                Ok(named[name].set(&value.to_device(device)?)?)
            })?;
            return Ok((net, Weights::Plain(AdamW::from_varmap(&vars, config)?)));
        }
        Precision::F16 => MatmulPrecision::Data,
        Precision::Fp8 => MatmulPrecision::FP8,
    };
    let vars = ScaledVarMap::new(DType::F16, device)?;
    let net = Mlp::new(size, vars.var_builder())?;
    let shapes = (vars.vars().iter())
        .map(|var| (var.name().to_string(), var.dims().to_vec()))
        .collect();
    initialize(shapes, settings.seed, |name, value| {
        Ok(vars.set(name, &value.to_device(device)?)?)
    })?;
    let options = ScaledOptions::default()
        .with_matmul(matmul)
        .with_seed(settings.seed);
    Ok((
        net,
        Weights::Scaled(ScaledAdamW::new(&vars, config)?, options),
    ))
}

/// One step; its loss.
fn train_step(
    net: &Mlp,
    weights: &mut Weights,
    (x, y): (&Tensor, &Tensor),
    lr: f64,
    watched: Option<(&Watch, u64)>,
) -> Result<f64> {
    let loss = match weights {
        Weights::Plain(optimizer) => {
            let loss = net.forward(x, &mut |_, _, y| y)?.cross_entropy(y)?;
            optimizer.set_lr(lr)?;
            optimizer.apply(&loss.backward()?)?;
            loss.value()?
        }
        Weights::Scaled(optimizer, options) => {
            let scope = scaled_scope(options.clone());
            let x = as_scaled(x, None)?.astype(DType::F16)?;
            let fp8 = options.matmul == MatmulPrecision::FP8;
            let mut failed = None;
            let logits = net.forward(&x, &mut |layer, x, y| {
                let Some((watch, step)) = watched else {
                    return y;
                };
                if let Err(error) = look(net, watch, step, layer, fp8, x) {
                    failed = Some(error);
                }
                let watch = watch.clone();
                y.inspect_backward(move |g| watch.note(step, (layer, Kind::Gradient), fp8, g))
            })?;
            if let Some(error) = failed {
                return Err(error);
            }
            let loss = logits.cross_entropy(y)?;
            drop(scope);
            optimizer.set_lr(lr)?;
            optimizer.apply(&loss.backward()?)?;
            Array::value(&loss)?
        }
    };
    Ok(f64::from(loss.to_scalar::<f32>()?))
}

/// Notes what the product of a layer reads on the way forward.
fn look(net: &Mlp, watch: &Watch, step: u64, layer: usize, fp8: bool, x: &Scaled) -> Result<()> {
    watch.note(step, (layer, Kind::Input), fp8, x)?;
    if let Some(weight) = net.layers[layer].scaled_weight() {
        watch.note(step, (layer, Kind::Weight), fp8, &weight.value())?;
    }
    Ok(())
}

fn select(split: &Split, indexes: &[u32]) -> candle_core::Result<(Tensor, Tensor)> {
    let indexes = Tensor::from_slice(indexes, indexes.len(), split.images.device())?;
    Ok((
        split.images.index_select(&indexes, 0)?.flatten_from(1)?,
        split.labels.index_select(&indexes, 0)?,
    ))
}

/// The share of images whose largest logit is that of their label.
fn accuracy(net: &Mlp, weights: &Weights, split: &Split) -> Result<f64> {
    const BATCH: usize = 500;
    let mut right = 0;
    for from in (0..split.len()).step_by(BATCH) {
        let count = BATCH.min(split.len() - from);
        let x = split.images.narrow(0, from, count)?.flatten_from(1)?;
        let logits = match weights {
            Weights::Plain(_) => net.forward(&x, &mut |_, _, y| y)?.value()?,
            Weights::Scaled(_, options) => {
                let _scope = scaled_scope(options.clone().with_gradients(false));
                let x = as_scaled(&x, None)?.astype(DType::F16)?;
                Array::value(&net.forward(&x, &mut |_, _, y| y)?)?
            }
        };
        assert_eq!(logits.dim(1)?, CLASSES);
        let found = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
        let labels = split.labels.narrow(0, from, count)?.to_vec1::<u32>()?;
        right += found.iter().zip(&labels).filter(|(a, b)| a == b).count();
    }
    Ok(right as f64 / split.len() as f64)
}
