//! The first tensor with Inf or NaN is remembered, and an optimizer gives up after many skipped steps.

use super::non_finite::{Mlp, slots, step};
use candle_core::{DType, Tensor};
use fp8::optim::{
    AdamW, AdamWConfig, DynamicLossScaler, LossScalerConfig, OptimError, Sgd, SgdConfig,
};
use fp8::{Recipe, RecipeName, with_fp8};
use fp8_test_support::device;

#[test]
fn the_first_culprit_is_remembered() {
    for name in RecipeName::ALL {
        let model = Mlp::new(DType::F32);
        let config = AdamWConfig {
            max_skipped_steps: Some(4),
            ..AdamWConfig::default()
        };
        let mut adamw = AdamW::from_varmap(&model.vars, config).unwrap();
        let recipe = Recipe::from(name);
        let (grads, _) = step(&model, &recipe, 1, 1.);
        assert!(!adamw.apply(&grads).unwrap().skipped().unwrap());
        let weight = model.var("fc1.weight");
        let healthy = weight.as_tensor().copy().unwrap();
        let mut bad = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        bad[5] = f32::NAN;
        weight
            .set(&Tensor::from_vec(bad, (64, 64), &device()).unwrap())
            .unwrap();
        for i in 1..=3 {
            let (grads, summary) = step(&model, &recipe, 1, 1.);
            let report = adamw.apply(&grads).unwrap();
            assert!(report.skipped().unwrap(), "{name} step {i}");
            // The weight is cast in the first of these steps only, and is the cause in all of them.
            assert_eq!(
                slots(&summary.non_finite().unwrap())[0],
                "fc1.weight",
                "{name} step {i}"
            );
            let first = summary.first_non_finite().unwrap();
            assert_eq!(first.as_deref(), Some("fc1.weight"), "{name} step {i}");
        }
        let (grads, _) = step(&model, &recipe, 1, 1.);
        let error = adamw.apply(&grads).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("4 steps in a row"), "{text}");
        assert!(
            text.contains("first seen in a cast of `fc1.weight`"),
            "{text}"
        );
        assert!(text.contains("max_skipped_steps = 4"), "{text}");
        assert!(matches!(error, OptimError::TooManySkipped { .. }));
        // After the repair training continues.
        weight.set(&healthy).unwrap();
        let (grads, summary) = step(&model, &recipe, 1, 1.);
        assert!(!adamw.apply(&grads).unwrap().skipped().unwrap(), "{name}");
        assert_eq!(summary.first_non_finite().unwrap(), None, "{name}");
    }
}

/// Weights that another optimizer made NaN are a consequence: the gradient came first.
#[test]
fn consequences_of_later_steps_are_not_taken_for_the_cause() {
    let model = Mlp::new(DType::F32);
    let recipe: Recipe = "delayed".parse().unwrap();
    step(&model, &recipe, 1, f64::NAN);
    for var in model.vars.all_vars() {
        var.set(&(var.as_tensor() * f64::NAN).unwrap()).unwrap();
    }
    let (_, summary) = step(&model, &recipe, 1, 1.);
    assert_eq!(slots(&summary.non_finite().unwrap())[0], "fc1.weight");
    let first = summary.first_non_finite().unwrap();
    assert_eq!(first.as_deref(), Some("fc2.grad_output"));
}

#[test]
fn every_optimizer_gives_up_after_so_many_steps() {
    let model = Mlp::new(DType::F32);
    let grads = || model.loss(1, f64::NAN).unwrap().backward().unwrap();
    let mut sgd =
        Sgd::from_varmap(&model.vars, SgdConfig::default().with_max_skipped_steps(2)).unwrap();
    assert!(sgd.apply(&grads()).unwrap().skipped().unwrap());
    let error = sgd.apply(&grads()).unwrap_err().to_string();
    assert!(error.contains("2 steps in a row"), "{error}");

    let config = LossScalerConfig::default().with_max_skipped_steps(2);
    let mut scaler = DynamicLossScaler::new(config).unwrap();
    let mut adamw = model.adamw();
    let mut step = |factor| {
        let loss = with_fp8("delayed", || model.loss(1, factor)).unwrap();
        scaler.backward_step(&loss, &mut adamw)
    };
    assert!(step(f64::NAN).unwrap().skipped());
    assert!(!step(1e-6).unwrap().skipped());
    assert!(step(f64::NAN).unwrap().skipped());
    let error = step(f64::NAN).unwrap_err().to_string();
    assert!(error.contains("`fc2.grad_output`"), "{error}");

    let never = SgdConfig::default().with_max_skipped_steps(None);
    let mut sgd = Sgd::from_varmap(&model.vars, never).unwrap();
    for _ in 0..150 {
        assert!(sgd.apply(&grads()).unwrap().skipped().unwrap());
    }
    let none = SgdConfig::default().with_max_skipped_steps(0);
    let error = none.validate().unwrap_err().to_string();
    assert!(error.starts_with("max_skipped_steps = 0"), "{error}");
}

#[test]
fn a_hundred_skipped_steps_are_too_many_by_default() {
    fn ends<E: std::fmt::Debug + std::fmt::Display>(mut step: impl FnMut() -> Result<bool, E>) {
        for i in 1..100 {
            assert!(step().unwrap(), "step {i}");
        }
        let error = step().unwrap_err().to_string();
        assert!(error.contains("100 steps in a row"), "{error}");
        assert!(error.contains("max_skipped_steps = 100"), "{error}");
    }
    let model = Mlp::new(DType::F32);
    let loss = || model.loss(1, f64::NAN).unwrap();
    let grads = || loss().backward().unwrap();
    let mut adamw = model.adamw();
    ends(|| adamw.apply(&grads())?.skipped());
    let mut sgd = Sgd::from_varmap(&model.vars, SgdConfig::default()).unwrap();
    ends(|| sgd.apply(&grads())?.skipped());
    let (mut scaler, mut adamw) = (DynamicLossScaler::default(), model.adamw());
    ends(|| {
        let step = scaler.backward_step(&loss(), &mut adamw);
        step.map(|step| step.skipped())
    });
}
