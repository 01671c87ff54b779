//! Fine-tunes a frozen FP8 model by LoRA: the base stays in FP8 codes, only the adapters are trained.
//!
//! `cargo run --release --example lora`

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
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use end::end;
use flags::Flags;
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{
    Autocast, Recipe, check_gradients, fp8_autocast, load, prepare_fp8, save_calibrated, with_fp8,
};
use net::{Net, batch, initialize};
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
        None => make_base(&out.join("base"), &mut rng, &device)?,
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

    let capitals = TEXT.to_uppercase();
    let validation = batch(capitals.as_bytes(), 1024, &mut rng, &device)?;
    let validate = |net: &Net<_>| net.loss(&validation)?.to_scalar::<f32>();
    println!("loss before training: {:.3}", validate(&net)?);
    let config = AdamWConfig {
        lr: 5e-3,
        weight_decay: 0.,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::from_varmap(&adapters, config)?;
    for step in 1..=args.steps {
        // No guard: the layers of an FP8 file compute in FP8 on their own.
        let loss = net.loss(&batch(capitals.as_bytes(), BATCH, &mut rng, &device)?)?;
        let grads = loss.backward()?;
        if step == 1 {
            let missing = check_gradients(&adapters, &grads);
            ensure!(
                missing.is_empty(),
                "no gradient reached {}",
                missing.join(", ")
            );
            println!("every adapter has a gradient");
        }
        let report = optimizer.apply(&grads)?;
        ensure!(
            !report.skipped()?,
            "step {step}: the gradient is not finite"
        );
        if step % 50 == 0 || step == args.steps {
            println!("step {step:4}  loss {:.3}", loss.to_scalar::<f32>()?);
        }
    }
    let trained = validate(&net)?;
    println!("loss after training: {trained:.3}");

    let path = out.join("adapters.safetensors");
    adapters.save(&path)?;
    // Load them into fresh adapters, as another program would.
    initialize(&adapters, &mut rng)?;
    load::dequantize_into(&adapters, &[&path])?;
    let loaded = validate(&net)?;
    ensure!(loaded == trained, "the saved adapters give {loaded}");
    println!("saved: {}", path.display());
    Ok(())
}

/// Trains a base for a while in FP8, calibrates it and saves it as an FP8 file.
fn make_base(folder: &Path, rng: &mut StdRng, device: &Device) -> Result<PathBuf> {
    const STEPS: usize = 400;
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, device))?;
    initialize(&vars, rng)?;
    prepare_fp8(&net, &Default::default())?;
    let recipe: Recipe = "delayed".parse()?;
    let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default())?;
    let mut last = f32::NAN;
    for _ in 0..STEPS {
        let batch = batch(TEXT.as_bytes(), BATCH, rng, device)?;
        let loss = with_fp8(recipe.clone(), || net.loss(&batch))?;
        let report = optimizer.apply(&loss.backward()?)?;
        ensure!(!report.skipped()?, "the gradient of the base is not finite");
        last = loss.to_scalar()?;
    }
    println!("trained a base for {STEPS} steps, loss {last:.3}");
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true))?;
    net.loss(&batch(TEXT.as_bytes(), 1024, rng, device)?)?;
    guard.close()?;
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let path = folder.join("model.safetensors");
    save_calibrated(&net, &path)?;
    Ok(path)
}
