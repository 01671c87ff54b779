//! Longer runs that end in the right state of delayed scaling and calibration: changed recipes, evaluation before training,
//! several threads, several ranks.

use crate::helpers::{amax, backward};
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::{DelayedFormat, DelayedScaling, InitialScale};
use fp8::fp8_core::Format;
use fp8::{Autocast, Error, ExportError, ReductionGroup, end_step, fp8_autocast, save_calibrated};
use fp8_test_support::rounding::least_sqnr;
use fp8_test_support::{
    Layer, Mlp, assert_text, delayed, device, fill, flat, of, prepare, recipes, slots, sqnr,
    tensor, var,
};
use std::sync::{Arc, Barrier, Mutex};

#[test]
fn a_format_changed_between_steps_has_its_own_scales() {
    let formats = [
        DelayedFormat::Hybrid,
        DelayedFormat::E4m3,
        DelayedFormat::E5m2,
    ];
    for from in formats {
        for to in formats {
            for weight_changes in [true, false] {
                let case = format!("{from} to {to}, weight changes: {weight_changes}");
                let layer = Layer::prepared("fc", 1, 24, 32);
                let (x, go) = (var(2, &[16, 32]), tensor(3, &[16, 24]));
                let mut got = None;
                for step in 0..6 {
                    let format = if step < 3 { from } else { to };
                    let guard = fp8_autocast(delayed(4).with_format(format)).unwrap();
                    let y = layer.linear.forward(&x).unwrap();
                    guard.close().unwrap();
                    let grads = backward(&y, &go);
                    if step == 3 || step == 5 {
                        let exact = layer.stock().forward(&x).unwrap();
                        let exact_grad = backward(&exact, &go);
                        let grad = grads.get(&x).unwrap();
                        let (weight, grad_output) = match to {
                            DelayedFormat::E4m3 => (Format::E4M3, Format::E4M3),
                            DelayedFormat::E5m2 => (Format::E5M2, Format::E5M2),
                            _ => (Format::E4M3, Format::E5M2),
                        };
                        let (y, g) = (sqnr(&exact, &y), sqnr(exact_grad.get(&x).unwrap(), grad));
                        // Inputs have the format of weights.
                        let (least_y, least_g) = (
                            least_sqnr([weight, weight], 16 * 24),
                            least_sqnr([weight, grad_output], 16 * 32),
                        );
                        assert!(
                            y > least_y && g > least_g,
                            "{case}, step {step}: {y:.1}, {g:.1} dB"
                        );
                        got = Some(g);
                    }
                    if weight_changes {
                        let scaled = (layer.weight.as_tensor() * 1.01).unwrap();
                        layer.weight.set(&scaled).unwrap();
                    }
                }
                assert!(got.is_some());
            }
        }
    }
}

#[test]
fn a_model_that_was_never_trained_evaluates_accurately() {
    for recipe in [
        delayed(4),
        delayed(4).with_initial(InitialScale::FirstBatch),
    ] {
        let layer = Layer::prepared("fc", 1, 24, 32);
        // Small values: with a scale of 1 most of them are subnormal or 0.
        let x = (tensor(2, &[16, 32]) * 1e-3).unwrap();
        let before = slots(&layer.linear);
        let guard = fp8_autocast(Autocast::new(recipe).training(false)).unwrap();
        let y = layer.linear.forward(&x).unwrap();
        guard.close().unwrap();
        let exact = layer.linear.forward(&x).unwrap();
        let bias = layer.bias.as_tensor();
        let without = |y: &Tensor| y.broadcast_sub(bias).unwrap();
        let db = sqnr(&without(&exact), &without(&y));
        assert!(db > least_sqnr([Format::E4M3; 2], 16 * 24), "{db:.1} dB");
        assert_eq!(slots(&layer.linear), before, "evaluation changes nothing");
    }
}

fn mlp(seed: u64) -> (VarMap, Mlp) {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let mut mlp = Mlp::new(vb).unwrap();
    fill(&vars, seed);
    prepare(&mut mlp);
    (vars, mlp)
}

fn calibrate(mlp: &Mlp, x: &Tensor, group: Option<Arc<dyn ReductionGroup>>) -> fp8::Result<()> {
    let mut autocast = Autocast::new(delayed(4)).calibrating(true);
    autocast.reduction_group = group;
    let guard = fp8_autocast(autocast)?;
    mlp.forward(x)?;
    guard.close()?;
    Ok(())
}

/// A calibration describes the weights at that time. Training under any recipe makes it out of date.
#[test]
fn after_training_under_any_recipe_a_new_calibration_is_needed() {
    let mut all: Vec<(String, Option<Autocast>)> = recipes()
        .into_iter()
        .map(|(name, recipe)| (name.to_string(), Some(recipe.into())))
        .collect();
    all.push(("no guard".into(), None));
    all.push(("a disabled guard".into(), Some(Autocast::disabled())));
    for (name, autocast) in all {
        let (vars, mlp) = mlp(5);
        let x = tensor(2, &[6, Mlp::IN]);
        let dir = tempfile::tempdir().unwrap();
        calibrate(&mlp, &x, None).unwrap();
        save_calibrated(&mlp, dir.path().join("model.safetensors")).unwrap();
        {
            let _guard = autocast.map(|autocast| fp8_autocast(autocast).unwrap());
            let loss = mlp.forward(&x).unwrap().sqr().unwrap().sum_all().unwrap();
            let grads = loss.backward().unwrap();
            for var in vars.all_vars() {
                let step = (grads.get(&var).unwrap() * 0.1).unwrap();
                var.set(&(var.as_tensor() - step).unwrap()).unwrap();
            }
        }
        let error = save_calibrated(&mlp, dir.path().join("model.safetensors")).unwrap_err();
        assert_text(&name, error, &["`up`", "calibrat"]);
        calibrate(&mlp, &x, None).unwrap();
        save_calibrated(&mlp, dir.path().join("model.safetensors")).unwrap();
    }
}

#[test]
fn a_calibration_of_zeros_is_refused_and_names_the_layer() {
    let (_, mlp) = mlp(5);
    let zeros = of(&[0.; 24], &[2, Mlp::IN]);
    let error = calibrate(&mlp, &zeros, None).unwrap_err();
    assert_text("zeros", error, &["`up.input`", "zero"]);
    let dir = tempfile::tempdir().unwrap();
    let error = save_calibrated(&mlp, dir.path().join("model.safetensors")).unwrap_err();
    assert_text("save", error, &["`up`", "not calibrated"]);
    // One more batch, with other values, is enough.
    calibrate(&mlp, &tensor(2, &[6, Mlp::IN]), None).unwrap();
    save_calibrated(&mlp, dir.path().join("model.safetensors")).unwrap();
}

/// The ranks of a job, each on a thread. All of them must send vectors of the same length, at the same time.
#[derive(Debug)]
struct Job {
    barrier: Barrier,
    sent: Mutex<Vec<Vec<f32>>>,
}

impl Job {
    fn new(ranks: usize) -> Arc<Self> {
        Arc::new(Self {
            barrier: Barrier::new(ranks),
            sent: Mutex::new(vec![]),
        })
    }
}

impl ReductionGroup for Job {
    fn ranks(&self) -> usize {
        2
    }

    fn all_reduce_max(&self, amaxes: &Tensor) -> fp8::fp8_candle::Result<Tensor> {
        self.sent.lock().unwrap().push(flat(amaxes));
        self.barrier.wait();
        let sent = self.sent.lock().unwrap().clone();
        assert!(
            sent.iter().all(|other| other.len() == sent[0].len()),
            "{sent:?}"
        );
        let max = |i: usize| sent.iter().fold(0f32, |max, other| max.max(other[i]));
        let reduced: Vec<f32> = (0..sent[0].len()).map(max).collect();
        if self.barrier.wait().is_leader() {
            self.sent.lock().unwrap().clear();
        }
        self.barrier.wait();
        Ok(Tensor::from_vec(reduced, amaxes.dims(), amaxes.device())?)
    }
}

/// The second layer is an expert that gets tokens on one rank only, on a different one in each step.
#[test]
fn ranks_without_tokens_keep_the_same_scales() {
    for initial in [InitialScale::One, InitialScale::FirstBatch] {
        let job = Job::new(2);
        let rank = |rank: usize| {
            let (_, mlp) = mlp(5);
            let recipe = delayed(4).with_initial(initial);
            for step in 0..5 {
                let mut autocast = Autocast::new(recipe.clone());
                autocast.reduction_group = Some(job.clone());
                let guard = fp8_autocast(autocast).unwrap();
                let x = (tensor(10 + rank as u64, &[6, Mlp::IN]) * (1. + step as f64)).unwrap();
                let hidden = mlp.up.forward(&x).unwrap();
                let y = if step % 2 == rank {
                    mlp.down.forward(&hidden).unwrap()
                } else {
                    hidden
                };
                guard.close().unwrap();
                y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            }
            end_step().unwrap();
            (slots(&mlp.up), slots(&mlp.down))
        };
        let (first, second) = std::thread::scope(|scope| {
            let other = scope.spawn(|| rank(1));
            (rank(0), other.join().unwrap())
        });
        assert_eq!(first, second, "{initial:?}");
        assert!(
            first.1.iter().all(|slot| slot.history[0] > 0.),
            "the expert was used"
        );
    }
}

#[test]
fn ranks_calibrate_to_the_same_scales() {
    let job = Job::new(2);
    let rank = |seed: u64| {
        let (_, mlp) = mlp(5);
        let group: Arc<dyn ReductionGroup> = job.clone();
        calibrate(&mlp, &tensor(seed, &[6, Mlp::IN]), Some(group)).unwrap();
        (slots(&mlp.up), slots(&mlp.down))
    };
    let (first, second) = std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(12));
        (rank(11), other.join().unwrap())
    });
    assert_eq!(first, second);
}

/// A group that fails in the first step and gives too few values in the second.
#[derive(Debug, Default)]
struct Unreliable(Mutex<u32>);

impl ReductionGroup for Unreliable {
    fn ranks(&self) -> usize {
        2
    }

    fn all_reduce_max(&self, amaxes: &Tensor) -> fp8::fp8_candle::Result<Tensor> {
        let mut call = self.0.lock().unwrap();
        *call += 1;
        match *call {
            1 => Err(fp8::fp8_candle::Error::Group("connection reset".into())),
            2 => Ok(amaxes.narrow(0, 0, 1)?),
            _ => Ok(amaxes.clone()),
        }
    }
}

#[test]
fn a_frozen_weight_recovers_from_a_reduction_that_failed() {
    let layer = Layer::prepared("fc", 1, 4, 8);
    let x = tensor(2, &[5, 8]);
    let group: Arc<dyn ReductionGroup> = Arc::new(Unreliable::default());
    let run = || -> fp8::Result<Tensor> {
        let mut autocast = Autocast::new(DelayedScaling::default());
        autocast.reduction_group = Some(group.clone());
        let guard = fp8_autocast(autocast)?;
        match layer.linear.forward(&x) {
            Ok(y) => guard.close().map(|_| y),
            Err(error) => {
                guard.abort();
                Err(error.into())
            }
        }
    };
    assert_text("first", run().unwrap_err(), &["connection reset"]);
    assert_eq!(layer.slot("weight").quant_scale, 1.);
    assert_text("second", run().unwrap_err(), &["expected f32 [6]"]);
    // The weight never changes, so its amax was recorded in the first step only.
    run().unwrap();
    let weight = flat(&layer.weight);
    let amax = weight.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert_eq!(layer.slot("weight").quant_scale, 448. / amax);
    let db = sqnr(&layer.stock().forward(&x).unwrap(), &run().unwrap());
    assert!(db > least_sqnr([Format::E4M3; 2], 5 * 4), "{db:.1} dB");
}

/// Whether micro-batches share a guard or have one each, a weight is cast once and its amax enters the history once.
#[test]
fn micro_batches_cast_a_weight_once() {
    for one_guard in [true, false] {
        let layer = Layer::prepared("fc", 1, 4, 8);
        for _ in 0..3 {
            let guard = one_guard.then(|| fp8_autocast(delayed(4)).unwrap());
            let casts = layer.linear.fp8_state().unwrap().quantized_tensors();
            for batch in 0..4 {
                let inner = (!one_guard).then(|| fp8_autocast(delayed(4)).unwrap());
                layer.linear.forward(&tensor(batch, &[5, 8])).unwrap();
                drop(inner);
            }
            drop(guard);
            let weights = layer.linear.fp8_state().unwrap().quantized_tensors() - casts - 4;
            assert!(
                weights <= 1 + u64::from(!one_guard),
                "{weights} casts of the weight"
            );
            let scaled = (layer.weight.as_tensor() * 2.).unwrap();
            layer.weight.set(&scaled).unwrap();
        }
        let history = layer.slot("weight").history;
        assert_eq!(history[0], 2. * history[1], "one guard: {one_guard}");
        assert_eq!(history[1], 2. * history[2], "one guard: {one_guard}");
        assert_eq!(history[3], 0., "one guard: {one_guard}");
    }
}

/// Panics in its first reduction.
#[derive(Debug, Default)]
struct PanicsOnce(Mutex<bool>);

impl ReductionGroup for PanicsOnce {
    fn ranks(&self) -> usize {
        2
    }

    fn all_reduce_max(&self, amaxes: &Tensor) -> fp8::fp8_candle::Result<Tensor> {
        let first = {
            let mut called = self.0.lock().unwrap();
            !std::mem::replace(&mut *called, true)
        };
        assert!(!first, "connection lost");
        Ok(amaxes.clone())
    }
}

#[test]
fn a_reduction_that_panics_loses_nothing() {
    let layer = Layer::prepared("fc", 1, 4, 8);
    let x = tensor(2, &[5, 8]);
    let group: Arc<dyn ReductionGroup> = Arc::new(PanicsOnce::default());
    let run = || {
        let mut autocast = Autocast::new(delayed(4));
        autocast.reduction_group = Some(group.clone());
        let guard = fp8_autocast(autocast).unwrap();
        layer.linear.forward(&x).unwrap();
        guard.close().unwrap();
    };
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"connection lost"));
    run();
    // The weight did not change between the two steps, so it was recorded in the first only.
    assert_eq!(layer.slot("weight").quant_scale, 448. / amax(&layer.weight));
    assert_eq!(layer.slot("input").quant_scale, 448. / amax(&x));
}

/// A calibration survives evaluation inside a training step. Training ends it, whatever follows in the step.
#[test]
fn only_training_ends_a_calibration() {
    let x = tensor(2, &[6, Mlp::IN]);
    for trained in [false, true] {
        let (_vars, mlp) = mlp(5);
        calibrate(&mlp, &x, None).unwrap();
        let outer = fp8_autocast(delayed(4)).unwrap();
        if trained {
            mlp.forward(&x).unwrap();
        }
        let tensorwise: fp8::Recipe = "tensorwise".parse().unwrap();
        let inner = fp8_autocast(Autocast::new(tensorwise).training(false)).unwrap();
        mlp.forward(&x).unwrap();
        inner.close().unwrap();
        outer.close().unwrap();
        let dir = tempfile::tempdir().unwrap();
        match (save_calibrated(&mlp, dir.path()), trained) {
            (Ok(_), false) => {}
            (Err(Error::Export(ExportError::NotCalibrated { .. })), true) => {}
            (saved, _) => panic!("trained: {trained}, {:?}", saved.map(drop)),
        }
    }
}
