//! Inf and NaN of one step veto that step, not those after it that cast nothing of the model.

use super::non_finite::{Mlp, slots, step};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use fp8::fp8_candle::weight_version::announce_change;
use fp8::optim::{
    AdamW, AdamWConfig, DataParallel, DataParallelOptions, DynamicLossScaler, NamedOptimizer, Sgd,
    SgdConfig,
};
use fp8::ranks::threads;
use fp8::{Autocast, GradAccumulator, Recipe, fp8_autocast, with_fp8};
use fp8_test_support::{delayed, named, skipped_on_cuda};

fn recipe() -> Recipe {
    delayed(4).into()
}

/// A step in FP8 that overflows.
fn bad(model: &Mlp) -> GradStore {
    step(model, &recipe(), 1, f64::INFINITY).0
}

/// The loss of a retry in high precision, in a disabled guard or without one.
fn retry(model: &Mlp, guarded: bool) -> Tensor {
    let guard = guarded.then(|| fp8_autocast(Autocast::disabled()).unwrap());
    let loss = model.loss(2, 1.).unwrap();
    if let Some(guard) = guard {
        guard.close().unwrap();
    }
    loss
}

fn skips(optimizer: &mut impl NamedOptimizer, grads: &GradStore) -> bool {
    optimizer.apply_gradients(grads).unwrap().skipped().unwrap()
}

#[test]
fn a_retry_in_high_precision_is_taken() {
    for guarded in [true, false] {
        let model = Mlp::new(DType::F32);
        let mut adamw = model.adamw();
        let mut sgd = Sgd::from_varmap(&model.vars, SgdConfig::default()).unwrap();
        let grads = bad(&model);
        // Each optimizer judges for itself.
        assert!(skips(&mut adamw, &grads) && skips(&mut sgd, &grads));
        for _ in 0..3 {
            let grads = retry(&model, guarded).backward().unwrap();
            let report = adamw.apply(&grads).unwrap();
            assert!(!report.skipped().unwrap(), "guarded: {guarded}");
            assert_eq!(report.non_finite().unwrap(), []);
            assert!(!skips(&mut sgd, &grads), "guarded: {guarded}");
        }
        // The next step in FP8 counts again.
        assert!(skips(&mut adamw, &bad(&model)));
    }
}

#[test]
fn a_retry_through_an_accumulator_is_taken() {
    for guarded in [true, false] {
        let model = Mlp::new(DType::F32);
        let mut adamw = model.adamw();
        let mut sums = GradAccumulator::new(&model.vars);
        sums.add(bad(&model)).unwrap();
        assert!(skips(&mut adamw, &sums.finish_mean().unwrap()));
        let grads = retry(&model, guarded).backward().unwrap();
        sums.add(grads).unwrap();
        assert!(!skips(&mut adamw, &sums.finish_mean().unwrap()));
    }
}

/// A micro-batch that reaches no variable of the accumulator has casts all the same.
#[test]
fn casts_of_a_micro_batch_without_gradients_veto_the_step() {
    let unreached = || Tensor::ones(1, DType::F32, &Device::Cpu).and_then(|x| x.backward());
    for first in [true, false] {
        let model = Mlp::new(DType::F32);
        let mut adamw = model.adamw();
        let mut sums = GradAccumulator::new(&model.vars);
        let clean = || step(&model, &recipe(), 1, 1.).0;
        if !first {
            sums.add(clean()).unwrap();
        }
        // The casts of this pass see Inf; its gradients are dropped.
        drop(bad(&model));
        sums.add(unreached().unwrap()).unwrap();
        if first {
            sums.add(clean()).unwrap();
        }
        assert!(
            skips(&mut adamw, &sums.finish_mean().unwrap()),
            "first: {first}"
        );
        sums.add(clean()).unwrap();
        assert!(
            !skips(&mut adamw, &sums.finish_mean().unwrap()),
            "first: {first}"
        );
    }
}

#[test]
fn a_retry_with_a_scaled_loss_is_taken() {
    let model = Mlp::new(DType::F32);
    let (mut adamw, mut scaler) = (model.adamw(), DynamicLossScaler::default());
    let loss = with_fp8(recipe(), || model.loss(1, f64::INFINITY)).unwrap();
    let left_out = scaler.backward_step(&loss, &mut adamw).unwrap();
    assert!(left_out.skipped());
    let taken = scaler
        .backward_step(&retry(&model, true), &mut adamw)
        .unwrap();
    let report = taken.report().expect("the scaler takes the step");
    assert!(!report.skipped().unwrap(), "and so does the optimizer");
}

#[test]
fn two_optimizers_of_one_loss_scaler_skip_the_same_step() {
    let model = Mlp::new(DType::F32);
    let half = |name: &str| {
        let named = vec![(name.to_string(), model.var(name))];
        AdamW::from_named(named, AdamWConfig::default()).unwrap()
    };
    let (mut first, mut second) = (half("fc1.weight"), half("fc2.weight"));
    let mut scaler = DynamicLossScaler::default();
    // Gradients that look clean although a cast of the input has seen Inf.
    let x = Tensor::full(f32::INFINITY, (2, 64), &fp8_test_support::device()).unwrap();
    let overflows = || with_fp8(recipe(), || model.forward(&x)).unwrap();
    let mut grads = overflows().mean_all().unwrap().backward().unwrap();
    for optimizer in [&mut first, &mut second] {
        let step = scaler.apply(&mut grads, optimizer).unwrap();
        assert!(step.skipped());
    }
    let mut grads = retry(&model, false).backward().unwrap();
    for optimizer in [&mut first, &mut second] {
        let step = scaler.apply(&mut grads, optimizer).unwrap();
        assert!(!step.report().unwrap().skipped().unwrap());
    }
}

#[test]
fn what_casts_see_after_the_judgement_counts() {
    let model = Mlp::new(DType::F32);
    let mut adamw = model.adamw();
    // One step of the guard, which nobody ends.
    let guard = fp8_autocast(recipe()).unwrap();
    for factor in [f64::INFINITY, 1., f64::INFINITY, f64::INFINITY, 1.] {
        let grads = model.loss(1, factor).unwrap().backward().unwrap();
        assert_eq!(skips(&mut adamw, &grads), factor.is_infinite());
    }
    guard.close().unwrap();
}

/// Cached codes hide the Inf of a weight, which each retry meets again.
#[test]
fn a_weight_with_inf_vetoes_every_retry_of_a_step() {
    let model = Mlp::new(DType::F32);
    let mut adamw = model.adamw();
    let weight = model.var("fc1.weight");
    let finite = weight.as_tensor().copy().unwrap();
    let mut values = finite.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values[3] = f32::INFINITY;
    let set = |values: &Tensor| {
        weight.set(values).unwrap();
        announce_change(&weight);
    };
    set(&Tensor::from_vec(values, finite.shape(), finite.device()).unwrap());
    let guard = fp8_autocast(recipe()).unwrap();
    for attempt in 0..4 {
        let grads = model.loss(1, 1.).unwrap().backward().unwrap();
        let report = adamw.apply(&grads).unwrap();
        assert!(report.skipped().unwrap(), "attempt {attempt}");
        let found = report.non_finite().unwrap();
        assert_eq!(slots(&found), ["fc1.weight"], "attempt {attempt}");
    }
    set(&finite);
    let grads = model.loss(1, 1.).unwrap().backward().unwrap();
    assert!(!skips(&mut adamw, &grads));
    guard.close().unwrap();
}

#[test]
fn steps_of_another_model_are_taken() {
    let models =
        ["a", "b"].map(|name| Mlp::named(&format!("{name}1"), &format!("{name}2"), DType::F32));
    let both: Vec<(String, Var)> = models.iter().flat_map(|model| named(&model.vars)).collect();
    let mut adamw = AdamW::from_named(both, AdamWConfig::default()).unwrap();
    assert!(skips(&mut adamw, &bad(&models[0])));
    for seed in 0..3 {
        let (grads, _) = step(&models[1], &recipe(), seed, 1.);
        assert!(!skips(&mut adamw, &grads), "step {seed}");
    }
    assert!(skips(&mut adamw, &bad(&models[1])));
}

#[test]
fn a_retry_of_several_ranks_is_taken() {
    if skipped_on_cuda("the ranks are threads with tensors on the CPU") {
        return;
    }
    let skipped = threads::run(2, |group| {
        let model = Mlp::new(DType::F32);
        let mut adamw = model.adamw();
        let options = DataParallelOptions::default();
        let mut parallel = DataParallel::new(&group, &model.vars, options).unwrap();
        // One rank overflows, and all skip.
        let factor = [f64::INFINITY, 1.][group.rank()];
        let loss = with_fp8(recipe(), || model.loss(1, factor)).unwrap();
        let first = skips(&mut adamw, &parallel.backward(&loss).unwrap());
        let loss = retry(&model, false);
        let second = skips(&mut adamw, &parallel.backward(&loss).unwrap());
        [first, second]
    });
    assert_eq!(skipped, [[true, false]; 2]);
}
