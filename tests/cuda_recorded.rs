//! Steps that are recorded as a CUDA graph give the bits of steps as usual, and what cannot be recorded is refused.
//!
//! Streams are ordered by events on the device that tests share, so these use one of their own, in a program of their own.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use fp8::fp8_candle::ops::cross_entropy;
use fp8::fp8_candle::{Error, RecordedStep};
use fp8::nn::{LayerNorm, Linear, layer_norm, linear};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{Fp8Module, fp8_autocast, prepare_fp8};
use fp8_test_support::{bits, skipped};
use std::cell::RefCell;

const ROWS: usize = 48;
const INPUTS: usize = 32;
const CLASSES: usize = 16;

#[derive(Fp8Module)]
struct Net {
    up: Linear,
    norm: LayerNorm,
    down: Linear,
}

impl Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.norm.forward(&self.up.forward(x)?)?;
        self.down.forward(&fp8::fp8_candle::ops::gelu(&x)?)
    }
}

/// A model, its optimizer and the memory of its inputs.
struct Training {
    net: Net,
    vars: VarMap,
    optimizer: RefCell<AdamW>,
    x: Var,
    targets: Tensor,
    recipe: &'static str,
}

impl Training {
    fn new(recipe: &'static str, dtype: DType, device: &Device) -> Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, dtype, device);
        let net = Net {
            up: linear(INPUTS, 64, vb.pp("up"))?,
            norm: layer_norm(64, 1e-5, vb.pp("norm"))?,
            down: linear(64, CLASSES, vb.pp("down"))?,
        };
        // The same values in every model.
        for (seed, name) in names(&vars).iter().enumerate() {
            let data = lock(&vars);
            let var = &data[name];
            let values = (0..var.elem_count()).map(|i| ((i * 7 + seed) as f32).sin() * 0.2);
            let values = Tensor::from_vec(values.collect(), var.shape(), device)?;
            var.set(&values.to_dtype(dtype)?)?;
        }
        prepare_fp8(&net, &Default::default())?;
        let config = AdamWConfig {
            lr: 0.01,
            max_grad_norm: Some(1.),
            ..Default::default()
        };
        let targets: Vec<u32> = (0..ROWS as u32).map(|i| i % CLASSES as u32).collect();
        Ok(Self {
            optimizer: AdamW::from_varmap(&vars, config)?.into(),
            x: Var::from_tensor(&batch(0, dtype, device)?)?,
            targets: Tensor::from_vec(targets, ROWS, device)?,
            net,
            vars,
            recipe,
        })
    }

    fn step(&self) -> Result<Tensor> {
        let recipe = self.recipe.parse::<fp8::Recipe>().expect("a recipe");
        let _guard = fp8_autocast(recipe)?;
        let y = self.net.forward(&self.x.as_detached_tensor())?;
        let loss = cross_entropy(&y, &self.targets)?;
        self.optimizer.borrow_mut().step(&loss.backward()?)?;
        Ok(loss.detach())
    }

    /// Bits of the variables and the number of steps.
    fn state(&self) -> Result<(Vec<Vec<u32>>, u64)> {
        let names = names(&self.vars);
        let data = lock(&self.vars);
        let values = names.iter().map(|name| bits(data[name].as_tensor()));
        Ok((values.collect(), self.optimizer.borrow().steps()?))
    }
}

fn lock(vars: &VarMap) -> std::sync::MutexGuard<'_, std::collections::HashMap<String, Var>> {
    vars.data().lock().expect("no test panics with it")
}

fn names(vars: &VarMap) -> Vec<String> {
    let mut names: Vec<String> = lock(vars).keys().cloned().collect();
    names.sort();
    names
}

fn batch(number: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    // Each batch has larger values than the last, so that delayed scales move.
    let values =
        (0..ROWS * INPUTS).map(|i| (i as f32 * 0.7 + number as f32).sin() * (1. + number as f32));
    Tensor::from_vec(values.collect(), (ROWS, INPUTS), &Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(device)
}

/// A device without events; `None` without a GPU, or if tests are to run on the CPU.
fn device() -> Option<Device> {
    let wanted = std::env::var("FP8_TEST_DEVICE");
    if wanted.as_deref() == Ok("cpu") || !candle_core::utils::cuda_is_available() {
        skipped("no CUDA device");
        return None;
    }
    // SAFETY: all work of this test is on this device, whose stream it does not touch.
    let opened = unsafe { fp8::fp8_candle::device::open_cuda_untracked(0) };
    Some(opened.expect("a CUDA device"))
}

/// What the steps of [`RecordedStep::new`] read, and then the runs.
const STEPS: [usize; 8] = [0, 0, 0, 1, 2, 3, 4, 5];

#[test]
fn recorded_steps_give_the_bits_of_usual_ones() -> Result<()> {
    let Some(device) = device() else {
        return Ok(());
    };
    for recipe in ["delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp"] {
        for dtype in [DType::F32, DType::BF16] {
            let usual = Training::new(recipe, dtype, &device)?;
            let mut losses = vec![];
            for number in STEPS {
                usual.x.set(&batch(number, dtype, &device)?)?;
                losses.push(bits(&usual.step()?));
            }

            let recorded = Training::new(recipe, dtype, &device)?;
            let step = RecordedStep::new(&device, || Ok::<_, Error>(vec![recorded.step()?]))
                .unwrap_or_else(|error| panic!("{recipe} {dtype:?}: {error}"));
            assert_eq!(bits(&step.results()[0]), losses[2], "{recipe} {dtype:?}");
            for (run, number) in STEPS.into_iter().enumerate().skip(3) {
                recorded.x.set(&batch(number, dtype, &device)?)?;
                step.run()?;
                let loss = bits(&step.results()[0]);
                assert_eq!(loss, losses[run], "{recipe} {dtype:?}, step {run}");
            }
            drop(step);
            assert_eq!(recorded.state()?, usual.state()?, "{recipe} {dtype:?}");

            // Both go on as usual, from the scales of the recorded steps.
            for training in [&usual, &recorded] {
                training.x.set(&batch(6, dtype, &device)?)?;
                training.step()?;
            }
            assert_eq!(
                recorded.state()?,
                usual.state()?,
                "{recipe} {dtype:?} after"
            );
            let distinct: std::collections::HashSet<_> = losses.iter().collect();
            assert!(distinct.len() > 5, "the steps differ: {losses:?}");
        }
    }
    Ok(())
}

#[test]
fn what_cannot_run_again_is_refused() -> Result<()> {
    let Some(device) = device() else {
        return Ok(());
    };
    let refused =
        |reasons: &[&str], step: &mut dyn FnMut() -> Result<Vec<Tensor>>| match RecordedStep::new(
            &device,
            || step().map_err(Error::from),
        ) {
            Err(error) => {
                let text = error.to_string();
                assert!(reasons.iter().any(|why| text.contains(why)), "{text}");
            }
            Ok(_) => panic!("{reasons:?}: it was recorded"),
        };
    let x = Tensor::ones((4, 4), DType::F32, &device)?;
    refused(&["during CUDA graph capture"], &mut || {
        Ok(vec![(&x + f64::from(x.to_vec2::<f32>()?[0][0]))?])
    });
    let mut number = 0f32;
    refused(&["missing cached host data"], &mut || {
        number += 1.;
        Ok(vec![(&x + Tensor::new(&[[number; 4]; 4], &device)?)?])
    });
    let mut kept = vec![];
    refused(&["1 tensors that it makes are still in use"], &mut || {
        kept.push((&x + 1.)?);
        Ok(vec![x.sqr()?])
    });
    let mut rows = 0;
    refused(&["[3] of F32 where it made [2] of F32"], &mut || {
        rows += 1;
        Ok(vec![
            x.narrow(0, 0, 1)?
                .flatten_all()?
                .narrow(0, 0, rows)?
                .sqr()?,
        ])
    });

    // The device is as usable as before.
    // Sizes of strided tensors are among what may be copied to it.
    let step = RecordedStep::new(&device, || Ok::<_, Error>(vec![x.t()?.sqr()?]))?;
    step.run()?;
    assert_eq!(step.results()[0].to_vec2::<f32>()?, vec![vec![1.; 4]; 4]);
    Ok(())
}
