//! Fine-tunes a frozen FP8 model by LoRA: the base stays in FP8 codes, only the adapters are trained.
//!
//! `cargo run --release --example lora`

mod bytes;
#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[path = "../shared/flags.rs"]
mod flags;
mod net;
#[allow(dead_code, reason = "scaled_mnist uses the rest")]
#[path = "../shared/parameters.rs"]
mod parameters;
#[allow(dead_code, reason = "train_gpt uses the rest")]
#[path = "../shared/runs.rs"]
mod runs;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use end::end;
use flags::Flags;
use fp8::optim::{AdamWConfig, LrSchedule};
use fp8::training::{
    Events, Learner, Metrics, Progress, Silent, Stop, Trainer, TrainerConfig, TurnOptions, train,
};
use fp8::{Autocast, Recipe, fp8_autocast, load, save_calibrated};
use net::{Net, initialize};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The base learns this text; the adapters then learn it in capitals.
const TEXT: &str = include_str!("../../README.md");
const BATCH: usize = 64;

/// Train adapters on a frozen FP8 base.
#[derive(Parser)]
struct Args {
    /// FP8 base: a model.safetensors, with its config.json beside it, that this example has made before [default: a new one]
    #[arg(long)]
    model: Option<PathBuf>,
    /// Steps of the adapters
    #[arg(long, default_value_t = 300)]
    steps: u64,
    /// Rank of the adapters
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    rank: u16,
    /// Seed of weights and batches
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    flags: Flags,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let device = args.flags.device.open()?;
    let out = args.flags.begin("target/lora", false)?;
    let mut rng = StdRng::seed_from_u64(args.seed);
    let model = match &args.model {
        Some(model) => model.clone(),
        None => make_base(&out.join("base"), args.seed, &mut rng, &device)?,
    };
    let base = Net::new(load::var_builder(&[&model], DType::F32, &device)?)
        .with_context(|| format!("{} is not a base of this example", model.display()))?;
    let (weights, bytes) = base.size();
    println!(
        "base: {}, {weights} weights in {bytes} bytes",
        model.display()
    );

    // Only the adapters have variables; the base has none.
    let adapters = VarMap::new();
    let vb = VarBuilder::from_varmap(&adapters, DType::F32, &device);
    let net = base.with_adapters(args.rank.into(), vb)?;
    initialize(&adapters, &mut rng)?;
    let trainable: usize = adapters.all_vars().iter().map(|var| var.elem_count()).sum();
    println!("adapters: {trainable} trainable parameters");

    let capitals = Bytes::new(TEXT.to_uppercase(), BATCH, args.seed, &device);
    // No recipe: the layers of an FP8 file compute in FP8 on their own.
    let mut trainer = Trainer::new("lora", net, adapters, capitals, config(5e-3, 0.))?;
    let before = validated(&mut trainer)?;
    println!("loss before training: {before:.3}");
    learn(&mut trainer, args.steps, &mut Shown)?;
    let trained = validated(&mut trainer)?;
    println!("loss after training: {trained:.3}");

    let path = out.join("adapters.safetensors");
    trainer.vars().save(&path)?;
    // Load them into fresh adapters, as another program would.
    initialize(trainer.vars(), &mut rng)?;
    load::dequantize_into(trainer.vars(), &[&path])?;
    let loaded = validated(&mut trainer)?;
    ensure!(loaded == trained, "the saved adapters give {loaded}");
    println!("saved: {}", path.display());
    Ok(())
}

/// A constant learning rate.
fn config(lr: f64, weight_decay: f64) -> TrainerConfig {
    let schedule = LrSchedule::Constant {
        lr,
        warmup_steps: 0,
    };
    TrainerConfig::new(schedule).with_optimizer(AdamWConfig {
        lr,
        weight_decay,
        ..AdamWConfig::default()
    })
}

/// Makes steps until the last one.
fn learn(
    trainer: &mut impl Learner<Error = fp8::training::Error>,
    steps: u64,
    events: &mut dyn Events,
) -> Result<Metrics> {
    let mut metrics = Metrics::in_memory();
    let options = TurnOptions::new(steps)
        .with_validate_every(None)
        .with_checkpoint_every(None);
    let trainers = std::slice::from_mut(trainer);
    train(trainers, &options, &mut metrics, events, &Stop::default())?;
    Ok(metrics)
}

fn validated(trainer: &mut impl Learner<Error = fp8::training::Error>) -> Result<f64> {
    trainer.validate()?.context("there is no validation")
}

/// Prints the loss now and then.
struct Shown;

impl Events for Shown {
    fn stepped(&mut self, progress: &Progress<'_>) {
        let shows = progress.step.is_multiple_of(50) || progress.step == progress.steps;
        if let (true, Some(last)) = (shows, progress.last) {
            println!("step {:4}  loss {:.3}", progress.step, last.loss);
        }
    }
}

/// Trains a base for a while in FP8, calibrates it and saves it as an FP8 file.
fn make_base(folder: &Path, seed: u64, rng: &mut StdRng, device: &Device) -> Result<PathBuf> {
    const STEPS: u64 = 400;
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, device))?;
    initialize(&vars, rng)?;
    let recipe: Recipe = "delayed".parse()?;
    let default = AdamWConfig::default();
    let config = config(default.lr, default.weight_decay).with_recipe(Some(recipe.clone()));
    let text = Bytes::new(TEXT.to_string(), BATCH, seed, device);
    let mut trainer = Trainer::new("base", net, vars, text, config)?;
    let metrics = learn(&mut trainer, STEPS, &mut Silent)?;
    let last = metrics.last_train_loss("base");
    println!("trained a base for {STEPS} steps, loss {last:.3}");
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true))?;
    let objective = trainer.objective();
    trainer.model().loss(&objective.validation()?)?;
    guard.close()?;
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let path = folder.join("model.safetensors");
    save_calibrated(trainer.model(), &path)?;
    Ok(path)
}
