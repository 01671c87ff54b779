//! One training run.

use crate::data::{CLASSES, Data, Split};
use crate::net::{ModelName, Net, initialize};
use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::cast_counts;
use fp8::emulation::{EmulationMethod, Emulator, EmulatorOptions};
use fp8::optim::{AdamW, AdamWConfig, LrSchedule};
use fp8::{Autocast, PrepareOptions, RecipeName, nn, prepare_fp8, with_fp8};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Serialize;
use std::collections::BTreeMap;

/// What a run is told.
#[derive(Clone)]
pub struct Settings {
    pub model: ModelName,
    pub epochs: usize,
    pub batch: usize,
    pub lr: f64,
    pub seed: u64,
    /// Layers left in high precision, as paths or globs.
    pub exempt: Vec<String>,
}

/// A run in `summary.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    pub recipe: String,
    pub model: ModelName,
    pub seed: u64,
    pub epochs: usize,
    /// Mean over the last epoch.
    pub final_train_loss: f64,
    pub test_accuracy: f64,
    /// Steps left out because a gradient was not finite.
    pub skipped_steps: u64,
    /// The loss scale at the end; 1 without one.
    pub loss_scale: f64,
    /// Casts of each kind of tensor.
    pub casts: BTreeMap<String, u64>,
}

/// How the forward pass computes.
enum How {
    F32,
    Recipe(RecipeName),
    Emulated(Box<Emulator>),
}

impl How {
    fn new(name: &str, net: &Net, settings: &Settings) -> Result<Self> {
        let method = match name {
            "f32" => return Ok(Self::F32),
            "direct" => EmulationMethod::Direct,
            "hybrid" => EmulationMethod::ScaledHybrid,
            other => {
                let recipe: RecipeName = other
                    .parse()
                    .context("--recipe takes f32 and the names of recipes")?;
                let mut options = PrepareOptions::default();
                for pattern in &settings.exempt {
                    options = options.with_off(pattern)?;
                }
                let report = prepare_fp8(net, &options)?;
                ensure!(report.unmatched.is_empty(), "--exempt: {report}");
                return Ok(Self::Recipe(recipe));
            }
        };
        let mut options = EmulatorOptions::default().with_seed(settings.seed);
        for pattern in &settings.exempt {
            options = options.with_exempt(pattern);
        }
        let emulator = Emulator::initialize(net, method, options)?;
        println!("{}", emulator.cast_table()?);
        Ok(Self::Emulated(Box::new(emulator)))
    }

    fn autocast(&self) -> Autocast {
        match self {
            Self::F32 => Autocast::disabled(),
            Self::Recipe(recipe) => Autocast::new(*recipe),
            Self::Emulated(emulator) => emulator.autocast(),
        }
    }
}

/// Trains and tests; `progress` hears the steps done, of how many, and the loss.
pub fn train(
    name: &str,
    settings: &Settings,
    data: &Data,
    mut progress: impl FnMut(u64, u64, f64),
) -> Result<(Summary, Vec<f64>)> {
    let Settings {
        model,
        epochs,
        batch,
        lr,
        seed,
        ..
    } = *settings;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, data.train.images.device());
    let net = Net::new(model, data.size, vb)?;
    initialize(&vars, seed)?;
    let mut how = How::new(name, &net, settings)?;
    let config = AdamWConfig {
        lr,
        weight_decay: 1e-4,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::from_varmap(&vars, config)?;
    let count = data.train.len();
    let batches = count.div_ceil(batch);
    let steps = (epochs * batches) as u64;
    let schedule = LrSchedule::cosine(lr, (steps / 20).clamp(1, 100), steps);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut order: Vec<u32> = (0..count as u32).collect();
    let mut losses = vec![];
    let mut skipped_steps = 0;
    for _ in 0..epochs {
        order.shuffle(&mut rng);
        for part in order.chunks(batch) {
            let step = losses.len() as u64;
            optimizer.set_lr(schedule.lr(step))?;
            let (x, y) = select(&data.train, part)?;
            let logits = with_fp8(how.autocast(), || net.forward(&x, true))?;
            let loss = nn::loss::cross_entropy(&logits, &y)?;
            let skipped = match &mut how {
                How::Emulated(emulator) => {
                    emulator.optimizer_step(&mut optimizer, &loss)?.skipped()
                }
                _ => optimizer.apply(&loss.backward()?)?.skipped()?,
            };
            skipped_steps += u64::from(skipped);
            losses.push(f64::from(loss.to_scalar::<f32>()?));
            progress(losses.len() as u64, steps, losses[losses.len() - 1]);
        }
    }
    let autocast = how.autocast().training(false);
    let test_accuracy = with_fp8(autocast, || accuracy(&net, &data.test))?;
    let last = &losses[losses.len() - batches..];
    let loss_scale = match &how {
        How::Emulated(emulator) => emulator.loss_scaler().loss_scale(),
        _ => 1.,
    };
    let casts = cast_counts(&net).into_iter();
    let summary = Summary {
        recipe: name.to_string(),
        model,
        seed,
        epochs,
        final_train_loss: last.iter().sum::<f64>() / last.len() as f64,
        test_accuracy,
        skipped_steps,
        loss_scale,
        casts: casts
            .map(|(operand, count)| (operand.to_string(), count))
            .collect(),
    };
    Ok((summary, losses))
}

fn select(split: &Split, indexes: &[u32]) -> candle_core::Result<(Tensor, Tensor)> {
    let indexes = Tensor::from_slice(indexes, indexes.len(), split.images.device())?;
    Ok((
        split.images.index_select(&indexes, 0)?,
        split.labels.index_select(&indexes, 0)?,
    ))
}

/// The share of images whose largest logit is that of their label.
fn accuracy(net: &Net, split: &Split) -> candle_core::Result<f64> {
    const BATCH: usize = 500;
    let mut right = 0;
    for from in (0..split.len()).step_by(BATCH) {
        let count = BATCH.min(split.len() - from);
        let logits = net.forward(&split.images.narrow(0, from, count)?, false)?;
        assert_eq!(logits.dim(1)?, CLASSES);
        let found = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
        let labels = split.labels.narrow(0, from, count)?.to_vec1::<u32>()?;
        right += found.iter().zip(&labels).filter(|(a, b)| a == b).count();
    }
    Ok(right as f64 / split.len() as f64)
}
