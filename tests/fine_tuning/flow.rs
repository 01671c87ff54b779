//! Load a file, train, export the next file.

use crate::support::*;
use candle_core::{DType, Tensor};
use candle_nn::Optimizer;
use fp8_recipes::checkpoint::{ResumeOptions, TrainingMeta, resume_training_with, save_training};
use fp8_recipes::load::dequantize_into;
use fp8_recipes::{
    Autocast, ExportOptions, GradAccumulator, Recipe, fp8_autocast, prepare_fp8,
    save_calibrated_with, with_fp8,
};
use serde_json::Value;

/// A prepared model that has already run uses weights that are loaded later.
#[test]
fn plain_weights_go_into_a_prepared_model() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("weights.safetensors");
    let (vars, mut trained) = fresh(1, DType::F32);
    vars.save(&path)?;
    let (other, mut prepared) = fresh(9, DType::F32);
    for net in [&mut trained, &mut prepared] {
        prepare_fp8(net, &Default::default())?;
    }
    let x = tensor(30, &[16, IN]);
    let tensorwise: Recipe = "tensorwise".parse()?;
    let run = |net: &Net| {
        with_fp8(tensorwise.clone(), || {
            candle_core::Result::Ok(forward(net, &x))
        })
    };
    let before = flat(&run(&prepared)?);
    let report = dequantize_into(&other, &[&path])?;
    assert!(report.dequantized.is_empty());
    assert_eq!(report.copied, ["down.weight", "up.bias", "up.weight"]);
    assert_eq!(bits(&other), bits(&vars));
    let after = flat(&run(&prepared)?);
    assert_ne!(after, before);
    assert_eq!(after, flat(&run(&trained)?));
    Ok(())
}

/// An FP8 file, trained on in FP8 by candle's optimizer in steps of micro-batches, saved, resumed, exported.
#[test]
fn from_an_fp8_file_to_the_next() -> Outcome {
    let dir = tempfile::tempdir()?;
    let file = fp8_file(dir.path(), 1);
    let x = tensor(30, &[64, IN]);
    let target = (tensor(31, &[64, IN]) * 0.3)?;
    let (vars, net) = fresh(9, DType::F32);
    let report = dequantize_into(&vars, &[&file])?;
    assert_eq!(report.dequantized, ["down.weight", "up.weight"]);
    // What the file computes, without the cast of its inputs.
    let served = with_disabled(|| forward(&load(&file), &x));
    assert_close(
        "dequantized",
        &forward(&net, &x),
        &served,
        two_products(&[IN, HIDDEN]),
    );

    prepare_fp8(&net, &Default::default())?;
    let mut optimizer = candle_nn::AdamW::new_lr(vars.all_vars(), 2e-3)?;
    let loss = |net: &Net, rows: std::ops::Range<usize>| -> candle_core::Result<Tensor> {
        let part = |t: &Tensor| t.narrow(0, rows.start, rows.len());
        (forward(net, &part(&x)?) - part(&target)?)?
            .sqr()?
            .mean_all()
    };
    let mut accumulator = GradAccumulator::new(&vars);
    let mut losses = vec![];
    for step in 0..20u64 {
        let guard = fp8_autocast(delayed())?;
        let mut sum = 0.;
        for first in [0, 32] {
            let loss = loss(&net, first..first + 32)?;
            sum += loss.to_scalar::<f32>()?;
            accumulator.add(loss.backward()?)?;
        }
        guard.close()?;
        losses.push(sum / 2.);
        optimizer.step(&accumulator.finish_mean()?)?;
        if step != 9 {
            continue;
        }
        // The process ends here, and the next goes on.
        let path = dir.path().join("run.safetensors");
        let meta = TrainingMeta {
            step: step + 1,
            recipe: Some(delayed()),
            random: Value::Null,
            extra: Value::Null,
        };
        save_training(&path, &net, &vars, &optimizer, &meta)?;
        for (_, var) in named(&vars) {
            var.set(&var.zeros_like()?)?;
        }
        optimizer = candle_nn::AdamW::new_lr(vars.all_vars(), 1.)?;
        let options = ResumeOptions::new();
        let report = resume_training_with(
            &path,
            &net,
            &vars,
            &mut optimizer,
            meta.recipe.as_ref(),
            &options,
        )?;
        assert_eq!(report.meta, meta);
        assert_eq!(optimizer.learning_rate(), 2e-3);
    }
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    assert!(
        losses[9] < losses[0] && losses[19] < losses[9],
        "{losses:?}"
    );

    let guard = fp8_autocast(Autocast::new(delayed()).calibrating(true))?;
    forward(&net, &x);
    guard.close()?;
    let path = dir.path().join("tuned.safetensors");
    save_calibrated_with(&net, &path, &ExportOptions::default())?;
    let guard = fp8_autocast(Autocast::new(delayed()).training(false))?;
    let in_memory = forward(&net, &x);
    guard.close()?;
    assert_eq!(flat(&forward(&load(&path), &x)), flat(&in_memory));
    Ok(())
}

fn with_disabled(f: impl FnOnce() -> Tensor) -> Tensor {
    let _guard = fp8_autocast(Autocast::new(delayed()).enabled(false)).unwrap();
    f()
}
