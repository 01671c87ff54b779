//! Runs on the device of the tests, which on the CPU repeat those beside them.

use crate::support::*;
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use fp8::models::{AdapterConfig, Model, ModelOptions, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme, WriteOptions};
use fp8::training::{Learner, TrainableModel, Trained, Trainer, initialize_adapter};
use fp8_test_support::{device, on_cuda};
use std::path::Path;

const STEPS: u64 = 6;

fn run_on(dir: &Path, recipe: &str, operands: Option<DType>, device: &Device) -> Outcome<Run> {
    let TrainableModel {
        mut model, vars, ..
    } = TrainableModel::open(dir, DType::F32, device)?;
    model.set_operands(operands);
    let run = Trainer::new("run", model, vars, objective(dir), settings(recipe, 2))?;
    Ok(run)
}

/// Losses of the steps, then the validation with and without the recipe.
fn curve(run: &mut Run) -> Outcome<Vec<f64>> {
    let mut losses: Vec<f64> = steps(run, STEPS)?.iter().map(|step| step.loss).collect();
    losses.extend(run.validate()?);
    run.model_mut().set_operands(None);
    losses.extend(run.validate_high_precision()?);
    Ok(losses)
}

fn assert_alike(what: &str, on_device: &[f64], on_cpu: &[f64]) {
    assert_eq!(on_device.len(), on_cpu.len(), "{what}");
    for (step, (a, b)) in on_device.iter().zip(on_cpu).enumerate() {
        // Another order of sums turns roundings of FP8, whose traces grow from step to step.
        let bound = if on_cuda() { 0.01 * b.abs() } else { 0. };
        assert!((a - b).abs() <= bound, "{what}, {step}: {a} against {b}");
    }
}

/// Losses are those of the CPU but for roundings, and what is written computes what was trained.
#[test]
fn a_language_model_trains_on_the_device() -> Outcome {
    let folder = folder();
    let dir = folder.path();
    let bf16 = Some(DType::BF16);
    for (recipe, operands) in [
        ("f32", None),
        ("f32", bf16),
        ("delayed", bf16),
        ("rowwise", bf16),
        ("rowwise_with_gw_hp", None),
        ("mxfp8", bf16),
        ("blockwise", None),
    ] {
        let what = format!("{recipe} {operands:?}");
        let mut run = run_on(dir, recipe, operands, &device())?;
        let losses = curve(&mut run)?;
        let expected = curve(&mut run_on(dir, recipe, operands, &Device::Cpu)?)?;
        assert_alike(&what, &losses, &expected);

        let source = TrainableModel::open(dir, DType::F32, &Device::Cpu)?.source;
        let trained = Trained::new(&*source, run.vars())?;
        let out = dir.join("trained");
        let options = WriteOptions::new().with_overwrite(true);
        rewrite::dequantize(&trained, &out, None, &options, &mut rewrite::quiet)?;
        let again = TrainableModel::open(&out, DType::F32, &device())?;
        let mut again = Trainer::new(
            "run",
            again.model,
            again.vars,
            objective(dir),
            settings("f32", 2),
        )?;
        assert_eq!(again.validate()?, losses.last().copied(), "{what}");
    }
    Ok(())
}

/// A run that goes on from its checkpoint repeats every loss.
#[test]
fn a_run_resumes_on_the_device() -> Outcome {
    let folder = folder();
    let dir = folder.path();
    let begin = || -> Outcome<Run> {
        let run = run_on(dir, "delayed", Some(DType::BF16), &device())?;
        Ok(run.with_checkpoint(dir.join("checkpoint.safetensors")))
    };
    let mut whole = begin()?;
    steps(&mut whole, 3)?;
    whole.save()?;
    let expected = losses(&steps(&mut whole, STEPS)?);
    let mut resumed = begin()?;
    assert!(resumed.resume()?);
    assert_eq!(losses(&steps(&mut resumed, STEPS)?), expected);
    Ok(())
}

/// Adapters on a base of FP8 codes, which is opened on the device.
#[test]
fn adapters_train_on_the_device() -> Outcome {
    let folder = folder();
    let dir = folder.path();
    let base = dir.join("fp8");
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let source = TrainableModel::open(dir, DType::F32, &Device::Cpu)?.source;
    rewrite::quantize(&*source, &base, &options, &mut rewrite::quiet)?;
    let run_on = |device: &Device| -> Outcome<(Run, Vec<f64>)> {
        let options = ModelOptions::new().with_device(device);
        let mut model: Model = open(&base, &options)?;
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
        model.add_adapter("own", &AdapterConfig::new(4), vb)?;
        initialize_adapter(&vars, 1)?;
        model.set_operands(Some(DType::BF16));
        let mut run = Trainer::new("run", model, vars, objective(dir), settings("f32", 1))?;
        let losses = curve(&mut run)?;
        Ok((run, losses))
    };
    let (run, losses) = run_on(&device())?;
    assert_alike("adapters", &losses, &run_on(&Device::Cpu)?.1);

    let out = dir.join("adapter");
    run.model().save_adapter("own", &out)?;
    let mut again: Model = open(&base, &ModelOptions::new().with_device(&device()))?;
    again.load_adapter("own", &out)?;
    let vars = VarMap::new();
    let config = settings("f32", 1);
    let again = Trainer::new("run", again, vars, objective(dir), config);
    assert_eq!(again?.validate()?, losses.last().copied());
    Ok(())
}
