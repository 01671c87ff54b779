//! The GPT of the examples in scaled arithmetic.

#[path = "../../examples/gpt/mod.rs"]
#[allow(dead_code, reason = "the examples generate as well")]
mod model;

use crate::parameters::set_scaled;
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::optim::AdamWConfig;
use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
use fp8::scaled::{
    Array, MatmulPrecision, ScaleStorage, Scaled, ScaledOptions, ScaledVar, ScaledVarMap,
    TrainingState, resume_training, save, save_training, scaled_scope,
};
use fp8::{Error, FilesError, checkpoint};
use fp8_test_support::apart;
use model::{Gpt, GptConfig, initial};

fn config() -> GptConfig {
    GptConfig {
        vocab_size: 32,
        hidden_size: 32,
        num_layers: 2,
        num_heads: 2,
        context: 16,
        ..GptConfig::default()
    }
}

fn build() -> anyhow::Result<(Gpt, ScaledVarMap)> {
    let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
    let gpt = Gpt::new(&config(), vars.var_builder())?;
    set_scaled(&vars, initial(&config(), 1))?;
    Ok((gpt, vars))
}

/// Tokens that follow a rule that one layer can learn.
fn batch() -> candle_core::Result<(Tensor, Tensor)> {
    let tokens = |offset: u32| {
        let values: Vec<u32> = (0..4 * 16)
            .map(|i| (i / 16 * 3 + (i % 16 + offset) * 5) % 32)
            .collect();
        Tensor::from_vec(values, (4, 16), &Device::Cpu)
    };
    Ok((tokens(0)?, tokens(1)?))
}

#[test]
fn it_learns_and_every_parameter_moves() -> anyhow::Result<()> {
    let (inputs, targets) = batch()?;
    for matmul in [MatmulPrecision::Data, MatmulPrecision::FP8] {
        let (gpt, vars) = build()?;
        let before = vars.to_tree()?.to_tensors(DType::F32)?;
        let config = AdamWConfig {
            lr: 3e-3,
            max_grad_norm: Some(1.),
            ..AdamWConfig::default()
        };
        let mut optimizer = ScaledAdamW::new(&vars, config)?;
        let options = ScaledOptions::default().with_matmul(matmul);
        let mut losses = vec![];
        for _ in 0..30 {
            let scope = scaled_scope(options.clone());
            let logits: Scaled = gpt.forward(&inputs)?;
            let loss = Array::cross_entropy(&logits, &targets)?;
            drop(scope);
            let grads = loss.backward()?;
            assert_eq!(grads.len(), vars.len());
            assert!(!optimizer.apply(&grads)?.skipped()?);
            losses.push(loss.to_scalar()?);
        }
        assert!(losses[29] < 0.5 * losses[0], "{matmul:?}: {losses:?}");
        for (name, after) in vars.to_tree()?.to_tensors(DType::F32)? {
            let moved = (after - &before[&name])?.abs()?.flatten_all()?.max(0)?;
            assert!(moved.to_scalar::<f32>()? > 0., "{name} has not moved");
        }
    }
    Ok(())
}

/// The scaled pass equals the plain one up to the rounding of f16.
#[test]
fn scaled_logits_are_the_plain_ones() -> anyhow::Result<()> {
    let (gpt, _vars) = build()?;
    let (inputs, _) = batch()?;
    let scaled = gpt.forward::<Scaled>(&inputs)?.value()?;
    let plain = gpt.forward::<Tensor>(&inputs)?.value()?;
    let largest = plain.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    // A few dozen roundings of 2^-11 along the way.
    let error = apart(&scaled, &plain);
    assert!(error < 0.02 * f64::from(largest), "{error} of {largest}");
    Ok(())
}

fn step(
    gpt: &Gpt,
    optimizer: &mut ScaledAdamW,
    options: &ScaledOptions,
    offset: u32,
) -> anyhow::Result<u32> {
    let (inputs, targets) = batch()?;
    let inputs = inputs.to_dtype(DType::F32)?;
    let inputs = (inputs + f64::from(offset))?
        .clamp(0., 31.)?
        .to_dtype(DType::U32)?;
    let loss = {
        let _scope = scaled_scope(options.clone());
        Array::cross_entropy(&gpt.forward::<Scaled>(&inputs)?, &targets)?
    };
    optimizer.set_lr(3e-3 / f64::from(offset + 1))?;
    assert!(!optimizer.apply(&loss.backward()?)?.skipped()?);
    Ok(loss.to_scalar()?.to_bits())
}

/// A run that stops and is resumed in another process, as in `train_gpt`.
#[test]
fn a_resumed_run_repeats_every_loss() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.safetensors");
    for matmul in [MatmulPrecision::Data, MatmulPrecision::FP8] {
        let options = ScaledOptions::default().with_matmul(matmul).with_seed(3);
        let config = AdamWConfig {
            max_grad_norm: Some(1.),
            ..AdamWConfig::default()
        };
        let (gpt, vars) = build()?;
        let mut optimizer = ScaledAdamW::new(&vars, config.clone())?;
        let mut losses = vec![];
        for i in 0..10 {
            if i == 4 {
                save_training(&path, &vars, &optimizer, &TrainingState::new(4))?;
            }
            losses.push(step(&gpt, &mut optimizer, &options, i)?);
        }
        // It has other weights and moments until the file is read.
        let (gpt, again) = build()?;
        let mut optimizer = ScaledAdamW::new(&again, config)?;
        step(&gpt, &mut optimizer, &options, 7)?;
        let from = resume_training(&path, &again, &mut optimizer)?.step;
        let options = options.clone();
        let rest = (from as u32..10).map(|i| step(&gpt, &mut optimizer, &options, i));
        assert_eq!(
            rest.collect::<anyhow::Result<Vec<_>>>()?,
            losses[4..],
            "{matmul:?}"
        );
        for (a, b) in vars.vars().iter().zip(again.vars()) {
            let data = |var: &ScaledVar| {
                let data = var.data_var().to_dtype(DType::F32)?;
                data.flatten_all()?.to_vec1::<f32>()
            };
            assert_eq!(a.scale(), b.scale(), "{}", a.name());
            assert_eq!(data(a)?, data(&b)?, "{}", a.name());
        }
    }
    Ok(())
}

/// A checkpoint of one kind of run given to the other.
#[test]
fn checkpoints_of_the_other_kind_are_refused_by_name() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (scaled, plain) = (dir.path().join("scaled"), dir.path().join("plain"));
    let (gpt, vars) = build()?;
    let mut optimizer = ScaledAdamW::new(&vars, AdamWConfig::default())?;
    save_training(&scaled, &vars, &optimizer, &TrainingState::new(1))?;
    let plain_vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&plain_vars, DType::F32, &Device::Cpu);
    let plain_gpt = Gpt::new(&config(), vb)?;
    let mut adam = fp8::optim::AdamW::from_varmap(&plain_vars, AdamWConfig::default())?;
    let meta = checkpoint::TrainingMeta {
        step: 1,
        recipe: None,
        random: Default::default(),
        extra: Default::default(),
    };
    checkpoint::save_training(&plain, &plain_gpt, &plain_vars, &adam, &meta)?;

    let error = resume_training(&plain, &vars, &mut optimizer).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("not a checkpoint of scaled training"),
        "{message}"
    );
    let error = checkpoint::resume_training(&scaled, &plain_gpt, &plain_vars, &mut adam, None);
    let message = error.unwrap_err().to_string();
    assert!(message.contains("not a training checkpoint"), "{message}");
    // The given map has none of the model's variables.
    let errors = [
        checkpoint::save_training(&plain, &gpt, &plain_vars, &adam, &meta).unwrap_err(),
        checkpoint::resume_training(&plain, &gpt, &plain_vars, &mut adam, None).unwrap_err(),
        checkpoint::save_fp8_state(&plain, &gpt).unwrap_err(),
        checkpoint::load_fp8_state(&plain, &gpt).unwrap_err(),
        fp8::nn::fold_batch_norms(&gpt, &[("embed", "norm")]).unwrap_err(),
    ];
    for error in errors {
        assert!(
            matches!(&error, Error::ScaledParameter { tensor, .. } if tensor == "embed.weight"),
            "{error}"
        );
    }
    Ok(())
}

/// Scaled data must not be read as values.
#[test]
fn a_file_of_scaled_tensors_is_no_plain_checkpoint() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("scaled.safetensors");
    let (_gpt, vars) = build()?;
    save(&path, &vars.to_tree()?, ScaleStorage::F32)?;
    let plain = VarMap::new();
    let vb = VarBuilder::from_varmap(&plain, DType::F32, &Device::Cpu);
    let _gpt = Gpt::new(&config(), vb)?;
    let errors = [
        fp8::load::Checkpoint::open(&[&path]).unwrap_err(),
        fp8::load::dequantize_into(&plain, &[&path]).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, FilesError::ForeignFormat { .. }), "{error}");
    }
    Ok(())
}
