//! Trains a small GPT on real text with FP8 recipes and in f32 side by side, then calibrates, saves and reloads the
//! FP8 model and lets it write.
//!
//! `cargo run --release --example train_gpt`

#[path = "../shared/candle_sources.rs"]
mod candle_sources;
#[path = "../shared/clock.rs"]
mod clock;
mod data;
#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[path = "../gpt/mod.rs"]
mod gpt;
mod plot;
mod record;
mod run;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use clap::Parser;
use data::{Batch, Data};
use device::DeviceName;
use end::end;
use fp8::recipes::{atomic, load, save_calibrated};
use gpt::{Gpt, GptConfig};
use indicatif::{ProgressBar, ProgressStyle};
use record::{Line, Metrics, Summary, write_json, write_summary};
use run::{Run, Settings, Step, forget_checkpoints, saved_settings};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Batches of a validation on the way, and of the one at the end.
const VALIDATION_BATCHES: usize = 4;
const FINAL_BATCHES: usize = 24;
const CALIBRATION_BATCHES: u64 = 8;
/// Steps between two readings of losses where reading waits for the device.
const READ_EVERY: u64 = 10;

/// Train a small GPT with FP8 recipes and in f32 side by side.
#[derive(Parser)]
struct Args {
    /// What to train, separated by commas: f32, bf16, tensorwise, rowwise, rowwise_with_gw_hp, delayed
    /// [default: f32,delayed]
    #[arg(long, value_delimiter = ',')]
    recipe: Option<Vec<String>>,
    /// Optimizer steps of each run [default: 200]
    #[arg(long)]
    steps: Option<u64>,
    /// Seed of weights and batches [default: 0]
    #[arg(long)]
    seed: Option<u64>,
    /// Sequences per batch [default: 8]
    #[arg(long)]
    batch: Option<usize>,
    /// Where to train; may change when a run is resumed
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// A text file or a folder of them [default: the sources of candle-core]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Where to write
    #[arg(long, default_value = "target/train_gpt")]
    out: PathBuf,
    /// Go on with the run in this folder
    #[arg(long)]
    resume: Option<PathBuf>,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 100)]
    checkpoint_every: u64,
}

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(example(&Args::parse()))
}

fn example(args: &Args) -> Result<()> {
    let device = args.device.open()?;
    let resume = args.resume.is_some();
    let dir = args.resume.clone().unwrap_or_else(|| args.out.clone());
    let mut settings = if resume {
        saved_settings(&dir)?
    } else {
        defaults()
    };
    if !resume {
        settings.recipes = args.recipe.clone().unwrap_or(settings.recipes);
        settings.steps = args.steps.unwrap_or(settings.steps);
        settings.seed = args.seed.unwrap_or(settings.seed);
        settings.batch = args.batch.unwrap_or(settings.batch);
    }
    ensure!(
        settings.steps > 0,
        "--steps 0: there is nothing to train, give at least 1"
    );
    ensure!(
        settings.batch > 0,
        "--batch 0: a batch needs at least one sequence"
    );
    ensure!(
        args.checkpoint_every > 0,
        "--checkpoint-every 0: give at least 1"
    );
    let data =
        Data::load(args.data.as_deref(), settings.batch, settings.model.context)?.on(&device);
    if resume {
        same("--recipe", args.recipe.as_ref(), &settings.recipes)?;
        same("--steps", args.steps.as_ref(), &settings.steps)?;
        same("--seed", args.seed.as_ref(), &settings.seed)?;
        same("--batch", args.batch.as_ref(), &settings.batch)?;
        ensure!(
            data.fingerprint == settings.data,
            "the text has changed since {} was written ({} then, {} now): name the old one with --data",
            dir.display(),
            settings.data,
            data.fingerprint
        );
    }
    settings.data = data.fingerprint.clone();
    println!("text: {}", data.description);

    let mut runs = vec![];
    for name in &settings.recipes {
        ensure!(
            runs.iter().all(|run: &Run| run.name != *name),
            "--recipe names {name} twice"
        );
        runs.push(Run::new(name, &settings, &device)?);
    }
    ensure!(!runs.is_empty(), "--recipe names nothing to train");
    if let Some(report) = runs.iter().find_map(|run| run.report.as_ref()) {
        println!("{report}");
    }
    std::fs::create_dir_all(dir.join("checkpoint"))
        .with_context(|| format!("creating {}", dir.display()))?;
    if resume {
        for run in &mut runs {
            run.resume(&dir)?;
        }
    } else {
        forget_checkpoints(&dir)?;
    }
    let done: BTreeMap<String, u64> = runs.iter().map(|r| (r.name.clone(), r.step)).collect();
    let mut metrics = Metrics::open(&dir, |line| {
        // The validation of the last step is the final one, which every finished run repeats.
        let repeated = matches!(line, Line::Validation { .. }) && line.step() == settings.steps;
        let done = done
            .get(line.recipe())
            .is_some_and(|&step| line.step() <= step);
        resume && done && !repeated
    })?;

    let finished = train(
        &mut runs,
        &settings,
        &data,
        &mut metrics,
        &dir,
        args.checkpoint_every,
    )?;
    for run in &runs {
        run.save(&dir)?;
    }
    if !finished {
        println!("stopped; go on with --resume {}", dir.display());
        return Ok(());
    }
    summarize(&runs, &settings, &data, &mut metrics, &dir)?;
    // The one FP8 run to serve: `delayed` if it is there.
    let fp8 = runs.iter().filter(|run| run.recipe.is_some());
    let served = fp8.max_by_key(|run| run.name == "delayed");
    match served {
        Some(run) => serve_fp8(run, &settings, &data, &dir, &device),
        None => save_plain(&runs[0], &settings, &dir),
    }
}

fn defaults() -> Settings {
    Settings {
        recipes: vec!["f32".into(), "delayed".into()],
        steps: 200,
        seed: 0,
        batch: 8,
        learning_rate: 6e-4,
        model: GptConfig::default(),
        data: String::new(),
    }
}

fn same<T: PartialEq + std::fmt::Debug>(flag: &str, asked: Option<&T>, saved: &T) -> Result<()> {
    match asked {
        Some(asked) if asked != saved => {
            bail!("{flag} {asked:?} does not fit the run to resume, which has {saved:?}")
        }
        _ => Ok(()),
    }
}

/// Takes every run to the end, step by step in turn, so that their times compare. False if Ctrl-C came.
fn train(
    runs: &mut [Run],
    settings: &Settings,
    data: &Data,
    metrics: &mut Metrics,
    dir: &Path,
    checkpoint_every: u64,
) -> Result<bool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::SeqCst) {
            // A second Ctrl-C does not wait; files are replaced atomically, none is left half-written.
            std::process::exit(130);
        }
    })?;
    let batch = settings.batch;
    let validation = data.validation_batches(VALIDATION_BATCHES, batch, settings.model.context)?;
    let validate_every = (settings.steps / 10).max(1);
    let tokens = (batch * settings.model.context) as f64;

    let bar = ProgressBar::new(settings.steps * runs.len() as u64).with_style(
        ProgressStyle::with_template("{bar:30} step {msg} [{elapsed}, {eta} left]")?,
    );
    bar.set_position(runs.iter().map(|run| run.step).sum());
    bar.reset_eta();
    // After a kill between two checkpoint files the runs are at different steps: the last one catches up.
    while let Some(step) = runs
        .iter()
        .map(|run| run.step)
        .min()
        .filter(|&s| s < settings.steps)
    {
        for run in runs.iter_mut().filter(|run| run.step == step) {
            run.train_step(data)?;
            bar.inc(1);
            let validates = run.step % validate_every == 0 && run.step < settings.steps;
            let saves = run.step % checkpoint_every == 0;
            let reads = validates || saves || run.step.is_multiple_of(READ_EVERY);
            if !reads && run.is_asynchronous() {
                continue;
            }
            let last = log_steps(run, metrics)?;
            if let Some(done) = &last {
                bar.set_message(format!(
                    "{}/{} {}: loss {:.3}, {:.0} tokens/s",
                    run.step,
                    settings.steps,
                    run.name,
                    done.loss,
                    tokens / done.ms * 1e3
                ));
            }
            if let (true, Some(done)) = (validates, &last) {
                let val_loss = run.validate(&validation)?;
                metrics.push(Line::Validation {
                    recipe: run.name.clone(),
                    step: run.step,
                    val_loss,
                })?;
                let text = format!(
                    "step {:>5}  {:<20} train {:.4}  validation {val_loss:.4}  {:.0} ms",
                    run.step, run.name, done.loss, done.ms
                );
                if bar.is_hidden() {
                    println!("{text}")
                } else {
                    bar.println(text)
                }
            }
            if saves {
                run.save(dir)?;
            }
        }
        if stop.load(Ordering::SeqCst) {
            for run in runs.iter_mut() {
                log_steps(run, metrics)?;
            }
            bar.abandon();
            return Ok(false);
        }
    }
    for run in runs.iter_mut() {
        log_steps(run, metrics)?;
    }
    bar.finish_and_clear();
    Ok(true)
}

/// Writes the steps that were not read yet; the last of them.
fn log_steps(run: &mut Run, metrics: &mut Metrics) -> Result<Option<Step>> {
    let mut last = None;
    for step in run.read_steps()? {
        ensure!(
            step.loss.is_finite(),
            "{}: the loss of step {} is {}",
            run.name,
            step.step,
            step.loss
        );
        metrics.push(Line::Train {
            recipe: run.name.clone(),
            step: step.step,
            train_loss: step.loss,
            lr: step.lr,
            grad_norm: step.grad_norm,
            step_ms: step.ms,
        })?;
        last = Some(step);
    }
    Ok(last)
}

/// Final validation, `summary.json`, `loss.svg` and a table.
fn summarize(
    runs: &[Run],
    settings: &Settings,
    data: &Data,
    metrics: &mut Metrics,
    dir: &Path,
) -> Result<()> {
    let Settings {
        batch, ref model, ..
    } = *settings;
    let validation: Vec<Batch> = data.validation_batches(FINAL_BATCHES, batch, model.context)?;
    let mut summaries = vec![];
    for run in runs {
        let final_val_loss = run.validate(&validation)?;
        metrics.push(Line::Validation {
            recipe: run.name.clone(),
            step: run.step,
            val_loss: final_val_loss,
        })?;
        let curve = metrics.train_curve(&run.name);
        let last: Vec<f64> = curve.iter().rev().take(10).map(|p| p.1).collect();
        let median_step_ms = metrics.median_step_ms(&run.name);
        let tokens = (batch * model.context) as f64;
        summaries.push(Summary {
            recipe: run.name.clone(),
            steps: run.step,
            final_train_loss: last.iter().sum::<f64>() / last.len().max(1) as f64,
            final_val_loss,
            median_step_ms,
            tokens_per_s: if median_step_ms > 0. {
                tokens / median_step_ms * 1e3
            } else {
                0.
            },
            linear_weight_bytes: run.served_weight_bytes()?,
            converted_layers: run.converted_layers(),
            quantized_tensors: run.quantized_tensors(),
        });
    }
    write_summary(dir, &summaries)?;
    plot::write_loss_svg(dir, metrics, &settings.recipes)?;

    let base = summaries.iter().find(|s| s.recipe == "f32");
    println!("\nrecipe                train   validation  against f32   ms/step  tokens/s  casts");
    for s in &summaries {
        let against = base.map_or("-".into(), |base| {
            format!(
                "{:+.2}%",
                (s.final_val_loss / base.final_val_loss - 1.) * 100.
            )
        });
        println!(
            "{:<20} {:>6.4}  {:>10.4}  {:>11}  {:>8.1}  {:>8.0}  {:>5}",
            s.recipe,
            s.final_train_loss,
            s.final_val_loss,
            against,
            s.median_step_ms,
            s.tokens_per_s,
            s.quantized_tensors
        );
    }
    Ok(())
}

/// Calibrates, saves, reloads, compares and generates.
fn serve_fp8(
    run: &Run,
    settings: &Settings,
    data: &Data,
    dir: &Path,
    device: &Device,
) -> Result<()> {
    run.calibrate(data, CALIBRATION_BATCHES)?;
    write_json(&dir.join("config.json"), &settings.model)?;
    let report = save_calibrated(&run.model, dir.join("model.safetensors"))?;
    let vb = load::var_builder(&[&report.model], DType::F32, device)?;
    let served = Gpt::new(&settings.model, vb)?;

    let prompt = data.prompt(settings.model.context);
    let tokens: Vec<u32> = prompt.iter().map(|&byte| byte.into()).collect();
    let tokens = Tensor::from_vec(tokens, (1, prompt.len()), device)?;
    let ours = {
        let _guard = run.evaluation_guard()?;
        run.model.forward(&tokens)?
    };
    let difference = (served.forward(&tokens)? - &ours)?
        .abs()?
        .flatten_all()?
        .max(0)?;
    let largest = ours.abs()?.flatten_all()?.max(0)?;
    let relative = (difference / largest)?.to_scalar::<f32>()?;
    let (bytes, f32_bytes) = served.linear_weight_bytes();
    println!(
        "\n{} saved as FP8: {} layers, {bytes} bytes of linear weights ({:.3} of f32), reloaded logits differ by {relative:.1e} of the largest\n",
        run.name,
        report.quantized.len(),
        bytes as f64 / f32_bytes as f64,
    );
    write_text(&served, &prompt[..32.min(prompt.len())], settings.seed)?;
    println!("\n\nwritten: {}", dir.display());
    Ok(())
}

fn write_text(model: &Gpt, prompt: &[u8], seed: u64) -> Result<()> {
    print!("{}", String::from_utf8_lossy(prompt));
    let text = model.generate(prompt, 200, 0.8, seed, |_| ())?;
    print!("{}", String::from_utf8_lossy(&text));
    Ok(std::io::stdout().flush()?)
}

/// A high-precision model, in the same place.
fn save_plain(run: &Run, settings: &Settings, dir: &Path) -> Result<()> {
    write_json(&dir.join("config.json"), &settings.model)?;
    let vars = run
        .vars()
        .data()
        .lock()
        .map_err(|_| anyhow::anyhow!("the VarMap's lock is poisoned"))?;
    let tensors: BTreeMap<String, Tensor> = vars
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().detach()))
        .collect();
    atomic::write_safetensors_atomic(dir.join("model.safetensors"), &tensors, None)?;
    println!("\nwritten: {}", dir.display());
    Ok(())
}
