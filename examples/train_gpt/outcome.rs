//! The results of finished runs: figures, a drawing, a model to serve.

use crate::data::{Batch, Data};
use crate::gpt::Gpt;
use crate::gpt::attention::Operands;
use crate::ranks::{Parallel, Ranks};
use crate::record::{Sent, Summary, write_json, write_summary};
use crate::run::Run;
use crate::settings::Settings;
use crate::size;
use crate::vocabulary::{self, Vocabulary};
use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use fp8::training::{Metrics, loss_svg};
use fp8::{ExportOptions, atomic, load, save_calibrated_with};
use std::io::Write;
use std::path::Path;

/// Batches of the final validation.
const FINAL_BATCHES: usize = 24;
const CALIBRATION_BATCHES: u64 = 8;

/// Final validation, `summary.json`, `loss.svg` and a table.
pub fn summarize(
    runs: &[Run],
    settings: &Settings,
    data: &Data,
    metrics: &mut Metrics,
    dir: &Path,
    ranks: &Ranks,
) -> Result<()> {
    let Settings {
        batch, ref model, ..
    } = *settings;
    let steps: u64 = runs.iter().map(|run| run.step).sum();
    let validation: Vec<Batch> = data.validation_batches(FINAL_BATCHES, batch, model.context)?;
    let mut summaries = vec![];
    for run in runs {
        let final_val_loss = run.validate(&validation)?;
        metrics.push_validation(&run.name, run.step, final_val_loss, None)?;
        let median_step_ms = metrics.median_step_ms(&run.name);
        let tokens = (batch * model.context) as f64;
        summaries.push(Summary {
            recipe: run.name.clone(),
            steps: run.step,
            final_train_loss: metrics.last_train_loss(&run.name),
            final_val_loss,
            skipped_steps: metrics.skipped_steps(&run.name),
            median_step_ms,
            tokens_per_s: if median_step_ms > 0. {
                tokens / median_step_ms * 1e3
            } else {
                0.
            },
            linear_weight_bytes: run.served_weight_bytes()?,
            converted_layers: run.converted_layers(),
            quantized_tensors: run.quantized_tensors(),
            model: serde_json::to_value(&run.config)?,
            parameters: size::check(model)?,
            optimizer_bytes: run.weights.optimizer_bytes(),
            micro_batches: settings.micro_batches,
            ranks: ranks.group.size(),
            parallel: ranks.parallel.map(Parallel::name),
            sent: {
                let sent = ranks.sent(steps).into_iter();
                let sent = sent.map(|(operation, [calls_per_step, bytes_per_step])| {
                    let sent = Sent {
                        calls_per_step,
                        bytes_per_step,
                    };
                    (operation, sent)
                });
                sent.collect()
            },
            profile_ms: run.profile.as_ref().map(|profile| {
                let parts = profile.parts().into_iter();
                parts.map(|part| (part.kind.name(), part.ms)).collect()
            }),
        });
    }
    write_summary(dir, &summaries)?;
    let svg = loss_svg(metrics, &settings.recipes, "cross entropy per token (nats)")?;
    atomic::write_atomic(dir.join("loss.svg"), |out| out.write_all(svg.as_bytes()))?;

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
    for s in summaries.iter().filter(|s| s.skipped_steps > 0) {
        let (name, skipped) = (&s.recipe, s.skipped_steps);
        println!("{name}: {skipped} steps had gradients that are not finite, and changed nothing");
    }
    Ok(())
}

/// Calibrates, saves, reloads, compares and generates.
pub fn serve_fp8(
    run: &Run,
    settings: &Settings,
    data: &Data,
    dir: &Path,
    device: &Device,
) -> Result<()> {
    run.calibrate(data, CALIBRATION_BATCHES)?;
    let config = serde_json::to_value(&run.config)?;
    let config = config.as_object().cloned().unwrap_or_default();
    // No other engine knows this model, so inputs may keep the recipe's powers of two.
    let options = ExportOptions::new()
        .with_config(config)
        .with_power_of_two_inputs(true);
    let report = save_calibrated_with(&run.model, dir.join("model.safetensors"), &options)?;
    let vb = load::var_builder(&[&report.model], DType::F32, device)?;
    let served = Gpt::new(&run.config, vb)?;

    let prompt = data.prompt(run.config.context);
    let tokens = Tensor::from_slice(prompt, (1, prompt.len()), device)?;
    let ours = {
        let _guard = run.serving_guard()?;
        run.model.forward::<Tensor>(&tokens)?
    };
    let difference = (served.forward::<Tensor>(&tokens)? - &ours)?
        .abs()?
        .flatten_all()?
        .max(0)?;
    let largest = ours.abs()?.flatten_all()?.max(0)?;
    let equal = difference.to_scalar::<f32>()? == 0.;
    let relative = (&difference / largest)?.to_scalar::<f32>()?;
    ensure!(
        equal || !run.keeps_logits()?,
        "{}: reloaded logits differ by {relative:.1e} of the largest from those of the calibrated model, where none may: {} is not to be served",
        run.name,
        report.model.display()
    );
    let (bytes, f32_bytes) = served.linear_weight_bytes();
    println!(
        "\n{} saved as FP8: {} layers, {bytes} bytes of linear weights ({:.3} of f32), reloaded logits differ by {relative:.1e} of the largest\n",
        run.name,
        report.quantized.len(),
        bytes as f64 / f32_bytes as f64,
    );
    if run.config.attention == Some(Operands::Fp8) {
        println!("Its attention has operands of bf16: in FP8 it needs a guard.\n");
    }
    let vocabulary = &data.vocabulary;
    save_vocabulary(vocabulary, dir)?;
    let prompt = &prompt[..32.min(prompt.len())];
    write_text(&served, vocabulary, prompt, settings.seed)?;
    println!();
    tell_where(dir);
    Ok(())
}

fn write_text(model: &Gpt, vocabulary: &Vocabulary, prompt: &[u32], seed: u64) -> Result<()> {
    let mut text = prompt.to_vec();
    text.extend(model.generate(prompt, 200, 0.8, seed, |_| ())?);
    print!("{}", String::from_utf8_lossy(&vocabulary.decode(&text)));
    Ok(std::io::stdout().flush()?)
}

/// Saves a high-precision model in the same folder.
pub fn save_plain(run: &Run, data: &Data, dir: &Path) -> Result<()> {
    save_vocabulary(&data.vocabulary, dir)?;
    write_json(&dir.join("config.json"), &run.config)?;
    let tensors = run.weights.tensors()?;
    atomic::write_safetensors_atomic(dir.join("model.safetensors"), &tensors, None)?;
    tell_where(dir);
    Ok(())
}

/// Saves the vocabulary for the example `generate`, unless tokens are bytes.
fn save_vocabulary(vocabulary: &Vocabulary, dir: &Path) -> Result<()> {
    match vocabulary.is_bytes() {
        true => Ok(()),
        false => write_json(&dir.join(vocabulary::FILE), vocabulary),
    }
}

fn tell_where(dir: &Path) {
    println!(
        "\nwritten: {0}; to let it write: cargo run --release --example generate -- --model {0}",
        dir.display()
    );
}
