//! One training run.

use crate::images::data::Data;
use crate::images::epochs::{Batch, Epochs, accuracy};
use crate::images::layers::uniform;
use crate::net::Mlp;
use crate::parameters::{set_plain, set_scaled};
use crate::watch::{Kind, Watch};
use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use clap::ValueEnum;
use fp8::optim::AdamW;
use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
use fp8::scaled::{
    Array, MatmulPrecision, Scaled, ScaledOptions, ScaledVarMap, as_scaled, scaled_scope,
};
use fp8::training::any_number;
use serde::Serialize;
use std::fmt;

/// The format of the data.
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

/// `summary.json`.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub dtype: Precision,
    pub seed: u64,
    /// Mean over the last epoch.
    #[serde(serialize_with = "any_number::serialize")]
    pub final_train_loss: f64,
    pub test_accuracy: f64,
    /// Products computed by an FP8 GEMM, in training and testing.
    pub fp8_matmuls: u64,
    /// Other products of a scaled run.
    pub other_matmuls: u64,
    /// Mean share of the operands of products that is outside the normal range of its format.
    pub out_of_range: f64,
}

/// Steps between two records of scales and data.
const WATCH_EVERY: u64 = 10;

/// The optimizer, which has the parameters.
enum Weights {
    Plain(AdamW),
    Scaled(ScaledAdamW, ScaledOptions),
}

/// Trains and tests; `progress` gets the steps done, the number of all steps and the loss.
pub fn train(
    dtype: Precision,
    epochs: &Epochs,
    data: &Data,
    progress: impl FnMut(u64, u64, f64),
) -> Result<(Summary, Watch)> {
    let (net, mut weights) = build(dtype, epochs, data)?;
    let watch = Watch::default();
    let step = |batch: &Batch| {
        let watched = batch.step.is_multiple_of(WATCH_EVERY).then_some(&watch);
        train_step(&net, &mut weights, batch, watched)
    };
    let (_, final_train_loss) = epochs.train(&data.train, step, progress)?;
    let test_accuracy = accuracy(&data.test, |images| logits(&net, &weights, images))?;
    let counters = match &weights {
        Weights::Plain(_) => Default::default(),
        Weights::Scaled(_, options) => options.counters.clone(),
    };
    let summary = Summary {
        dtype,
        seed: epochs.seed,
        final_train_loss,
        test_accuracy,
        fp8_matmuls: counters.fp8_matmuls(),
        other_matmuls: counters.other_matmuls(),
        out_of_range: watch.out_of_range(),
    };
    Ok((summary, watch))
}

/// The same initial weights for every dtype.
fn build(dtype: Precision, epochs: &Epochs, data: &Data) -> Result<(Mlp, Weights)> {
    let (size, device) = (data.size, data.train.images.device());
    let config = epochs.optimizer();
    let matmul = match dtype {
        Precision::F32 => {
            let vars = VarMap::new();
            let net = Mlp::new(size, VarBuilder::from_varmap(&vars, DType::F32, device))?;
            set_plain(&vars, uniform(epochs.seed))?;
            return Ok((net, Weights::Plain(AdamW::from_varmap(&vars, config)?)));
        }
        Precision::F16 => MatmulPrecision::Data,
        Precision::Fp8 => MatmulPrecision::FP8,
    };
    let vars = ScaledVarMap::new(DType::F16, device)?;
    let net = Mlp::new(size, vars.var_builder())?;
    set_scaled(&vars, uniform(epochs.seed))?;
    let options = ScaledOptions::default()
        .with_matmul(matmul)
        .with_seed(epochs.seed);
    let optimizer = ScaledAdamW::new(&vars, config)?;
    Ok((net, Weights::Scaled(optimizer, options)))
}

/// One step; its loss.
fn train_step(
    net: &Mlp,
    weights: &mut Weights,
    batch: &Batch,
    watch: Option<&Watch>,
) -> Result<f64> {
    let Batch { step, lr, .. } = *batch;
    let (x, y) = (&batch.images.flatten_from(1)?, &batch.labels);
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
                let Some(watch) = watch else {
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

/// Records the operands of a layer's product in the forward pass.
fn look(net: &Mlp, watch: &Watch, step: u64, layer: usize, fp8: bool, x: &Scaled) -> Result<()> {
    watch.note(step, (layer, Kind::Input), fp8, x)?;
    if let Some(weight) = net.layers[layer].scaled_weight() {
        watch.note(step, (layer, Kind::Weight), fp8, &weight.value())?;
    }
    Ok(())
}

/// Logits of images, in testing.
fn logits(net: &Mlp, weights: &Weights, images: &Tensor) -> Result<Tensor> {
    let x = images.flatten_from(1)?;
    match weights {
        Weights::Plain(_) => Ok(net.forward(&x, &mut |_, _, y| y)?.value()?),
        Weights::Scaled(_, options) => {
            let _scope = scaled_scope(options.clone().with_gradients(false));
            let x = as_scaled(&x, None)?.astype(DType::F16)?;
            Ok(Array::value(&net.forward(&x, &mut |_, _, y| y)?)?)
        }
    }
}
