//! Calibrates a model from the Hugging Face Hub under a recipe, writes it as FP8, opens the files and runs it.
//!
//! `cargo run --release --example calibrate -- MODEL --ids ids.safetensors --recipe rowwise --out FP8`
//!
//! `tools/check_exports.py` runs it on every kind of model and compares the outputs with those of transformers on the same files.

#[path = "../shared/end.rs"]
pub mod end;

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use clap::Parser;
use end::end;
use fp8::load::{Inputs, OpenOptions};
use fp8::models::{Model, ModelOptions, open};
use fp8::read::{MAX_CONFIG, read_text};
use fp8::rewrite::Spelling;
use fp8::{
    Autocast, ExportOptions, Ragged, Recipe, atomic, fp8_autocast, prepare_fp8,
    save_calibrated_with, with_fp8,
};
use fp8_files::python_json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Calibrate a model under a recipe, write it in FP8 and run the written files.
#[derive(Parser)]
pub struct Args {
    /// Folder with config.json and model.safetensors; without --recipe it is run as it is
    model: PathBuf,
    /// A safetensors file with `input_ids`, [batch, tokens]
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// The recipe
    #[arg(long, requires = "out")]
    recipe: Option<Recipe>,
    /// Folder for the FP8 model
    #[arg(long, value_name = "DIR", requires = "recipe")]
    out: Option<PathBuf>,
    /// Replace a model in that folder
    #[arg(long, requires = "out")]
    overwrite: bool,
    /// compressed-tensors, fp8-blocks, autofp8 or modelopt
    #[arg(long, value_name = "SPELLING", default_value_t = Spelling::CompressedTensors, requires = "recipe")]
    to: Spelling,
    /// Scale inputs of the written model by powers of two where the recipe does
    #[arg(long, requires = "recipe")]
    power_of_two_inputs: bool,
    /// Leave inputs in high precision when the written model runs
    #[arg(long)]
    weight_only: bool,
    /// A safetensors file to write: the logits, or an encoder's hidden states, of the model in the files (`served`) and in memory
    /// (`calibrated`)
    #[arg(long, value_name = "FILE")]
    outputs: Option<PathBuf>,
}

fn main() -> ExitCode {
    end(run(&Args::parse()))
}

/// Does what the arguments say.
pub fn run(args: &Args) -> Result<()> {
    let file = || args.ids.display().to_string();
    let ids = candle_core::safetensors::load(&args.ids, &Device::Cpu).with_context(file)?;
    let ids = ids
        .get("input_ids")
        .with_context(|| format!("{} has no `input_ids`", file()))?;
    let mut outputs = BTreeMap::new();
    let served = match (&args.recipe, &args.out) {
        (Some(recipe), Some(out)) => {
            check_folder(out, args.overwrite)?;
            let model = open(&args.model, &ModelOptions::new())?;
            let calibrated = export(args, recipe, out, &model, ids)?;
            outputs.insert("calibrated".to_string(), calibrated);
            out
        }
        _ => &args.model,
    };
    let inputs = match args.weight_only {
        true => Inputs::WeightOnly,
        false => Inputs::AsStored,
    };
    let checkpoint = OpenOptions::new().with_inputs(inputs);
    let model = open(served, &ModelOptions::new().with_checkpoint(checkpoint))?;
    outputs.insert("served".to_string(), model.forward(ids)?);
    if let Some(path) = &args.outputs {
        atomic::write_safetensors_atomic(path, &outputs, None)?;
    }
    Ok(())
}

/// Fails for a folder with a model that is not to be replaced, or with files that would stay beside what is written, which a reader would mix.
fn check_folder(dir: &Path, overwrite: bool) -> Result<()> {
    let files = files_of_a_model(dir);
    let is_written = |name: &&String| ["config.json", "model.safetensors"].contains(&name.as_str());
    match (files.iter().find(|name| !is_written(name)), files.first()) {
        (Some(other), _) => bail!(
            "{} holds a part of another model ({other}): remove it, or name another folder with --out",
            dir.display()
        ),
        (None, Some(found)) if !overwrite => bail!(
            "{} holds a model ({found}): replace it by --overwrite, or name another folder with --out",
            dir.display()
        ),
        _ => Ok(()),
    }
}

/// The files in a folder that are of a model, sorted.
fn files_of_a_model(dir: &Path) -> Vec<String> {
    let is_of_one = |name: &str| {
        let ends = [".safetensors", ".safetensors.index.json"];
        name == "config.json" || ends.iter().any(|end| name.ends_with(end))
    };
    // What is no folder, or cannot be read, fails when files are written.
    let names = (std::fs::read_dir(dir).into_iter().flatten())
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| is_of_one(name)).collect();
    names.sort();
    names
}

/// Calibrates and writes the model; returns the outputs of the calibrated model in memory.
fn export(args: &Args, recipe: &Recipe, out: &Path, model: &Model, ids: &Tensor) -> Result<Tensor> {
    prepare_fp8(model, &Default::default())?;
    let guard = fp8_autocast(Autocast::new(recipe.clone()).calibrating(true))?;
    model.forward(ids)?;
    guard.close()?;
    let config = read_text(args.model.join("config.json"), MAX_CONFIG)?;
    let options = ExportOptions::new()
        .with_config(serde_json::from_value(python_json::parse(&config)?)?)
        .with_spelling(args.to)
        .with_power_of_two_inputs(args.power_of_two_inputs)
        .with_ragged(Ragged::Rowwise);
    let report = save_calibrated_with(model, out, &options)?;
    println!(
        "{}: {} layers in FP8, {} in high precision: {}",
        report.model.display(),
        report.quantized.len(),
        report.ignored.len(),
        report.ignored.join(", ")
    );
    let autocast = Autocast::new(recipe.clone()).training(false);
    Ok(with_fp8(autocast, || model.forward(ids))?)
}
