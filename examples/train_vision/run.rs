//! One training run.

use crate::images::data::Data;
use crate::images::epochs::{Batch, Epochs, accuracy};
use crate::images::layers::uniform;
use crate::net::{ModelName, Net};
use crate::parameters::set_plain;
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::cast_counts;
use fp8::emulation::{EmulationMethod, Emulator, EmulatorOptions};
use fp8::optim::AdamW;
use fp8::training::any_number;
use fp8::{Autocast, PrepareOptions, RecipeName, nn, prepare_fp8, with_fp8};
use serde::Serialize;
use std::collections::BTreeMap;

/// Settings of a run.
#[derive(Clone)]
pub struct Settings {
    pub model: ModelName,
    /// Its seed is also that of weights and rounding.
    pub epochs: Epochs,
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
    #[serde(serialize_with = "any_number::serialize")]
    pub final_train_loss: f64,
    pub test_accuracy: f64,
    /// Steps that were skipped because a gradient was not finite.
    pub skipped_steps: u64,
    /// The final loss scale; 1 without loss scaling.
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
        let mut options = EmulatorOptions::default().with_seed(settings.epochs.seed);
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

/// Trains and tests; `progress` gets the steps done, the number of all steps and the loss.
pub fn train(
    name: &str,
    settings: &Settings,
    data: &Data,
    progress: impl FnMut(u64, u64, f64),
) -> Result<(Summary, Vec<f64>)> {
    let Settings { model, epochs, .. } = settings;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, data.train.images.device());
    let net = Net::new(*model, data.size, vb)?;
    set_plain(&vars, uniform(epochs.seed))?;
    let mut how = How::new(name, &net, settings)?;
    let mut optimizer = AdamW::from_varmap(&vars, epochs.optimizer())?;
    let mut skipped_steps = 0;
    let step = |batch: &Batch| {
        optimizer.set_lr(batch.lr)?;
        let logits = with_fp8(how.autocast(), || net.forward(&batch.images, true))?;
        let loss = nn::loss::cross_entropy(&logits, &batch.labels)?;
        let skipped = match &mut how {
            How::Emulated(emulator) => emulator.optimizer_step(&mut optimizer, &loss)?.skipped(),
            _ => optimizer.apply(&loss.backward()?)?.skipped()?,
        };
        skipped_steps += u64::from(skipped);
        Ok(f64::from(loss.to_scalar::<f32>()?))
    };
    let (losses, final_train_loss) = epochs.train(&data.train, step, progress)?;
    let autocast = how.autocast().training(false);
    let logits = |images: &Tensor| Ok(net.forward(images, false)?);
    let test_accuracy = with_fp8(autocast, || accuracy(&data.test, logits))?;
    let loss_scale = match &how {
        How::Emulated(emulator) => emulator.loss_scaler().loss_scale(),
        _ => 1.,
    };
    let casts = cast_counts(&net).into_iter();
    let summary = Summary {
        recipe: name.to_string(),
        model: *model,
        seed: epochs.seed,
        epochs: epochs.count,
        final_train_loss,
        test_accuracy,
        skipped_steps,
        loss_scale,
        casts: casts
            .map(|(operand, count)| (operand.to_string(), count))
            .collect(),
    };
    Ok((summary, losses))
}
