//! What makes no difference, or only the one it should.

use crate::helpers::*;
use candle_core::DType;
use fp8_recipes::optim::scaled::*;
use fp8_recipes::optim::*;
use fp8_scaled::ScaledGrads;

#[test]
fn the_number_of_threads_changes_nothing() {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let vars = vars(DType::F16);
            let config = AdamWConfig {
                max_grad_norm: Some(0.5),
                ..AdamWConfig::default()
            };
            let mut adam = ScaledAdamW::from_vars(vars.clone(), config).unwrap();
            let norm = |step| {
                let report = adam.apply(&grads(&vars, step, 0.25)).unwrap();
                report.grad_norm().unwrap().to_bits()
            };
            let norms: Vec<u64> = (0..3).map(norm).collect();
            (norms, bits(&vars))
        })
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
}

#[test]
fn a_factor_on_all_gradients_changes_scales_only() {
    // lr and decay in the units of the gradients; parameters then are the same.
    for round in [RoundTo::Nearest, RoundTo::Stochastic { seed: 5 }] {
        let run = |exponent: i32| {
            let factor = 2f64.powi(exponent);
            let config = SgdConfig::default()
                .with_lr(0.1 / factor)
                .with_momentum(0.9)
                .with_weight_decay(0.01 * factor);
            let vars = vars(DType::F16);
            let sgd = ScaledSgd::from_vars(vars.clone(), config).unwrap();
            let mut sgd = sgd.with_rounding(round);
            for step in 0..5 {
                let scale = 2f32.powi(exponent - 2 * step as i32);
                let _ = sgd.apply(&grads(&vars, step, scale)).unwrap();
            }
            let state = sgd.optimizer_state().unwrap();
            let buffer = state.tensors()["w.momentum_buffer"]
                .to_dtype(DType::F32)
                .unwrap();
            let scale = state.tensors()["w.momentum_buffer.data_scale"]
                .to_vec1::<f32>()
                .unwrap();
            let buffer = buffer.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            (bits(&vars), buffer, f64::from(scale[0]) / factor)
        };
        let plain = run(0);
        assert_eq!(run(20), plain);
        assert_eq!(run(-20), plain);
    }
}

#[test]
fn gradients_that_are_not_finite_change_nothing() {
    for bad in [f32::NAN, f32::INFINITY] {
        let (var, _) = single(&[1., 2.]);
        let mut adam = ScaledAdamW::from_vars(vec![var.clone()], AdamWConfig::default()).unwrap();
        let _ = adam.apply(&one_grad(&var, &[1., 1.])).unwrap();
        let (before, version) = (bits(std::slice::from_ref(&var)), var.version());
        let report = adam.apply(&one_grad(&var, &[1., bad])).unwrap();
        assert!(report.skipped().unwrap());
        assert_eq!((adam.steps(), var.version()), (1, version));
        assert_eq!(bits(&[var]), before);
    }
}

#[test]
fn a_parameter_without_a_gradient_is_left_alone() {
    let vars = vars(DType::F16);
    let mut sgd =
        ScaledSgd::from_vars(vars.clone(), SgdConfig::default().with_weight_decay(0.5)).unwrap();
    let mut some = ScaledGrads::default();
    some.insert(&vars[0], grad(&vars[0], 0, 1.));
    let before = bits(&vars);
    let report = sgd.apply(&some).unwrap();
    assert_eq!(report.updated, 1);
    let after = bits(&vars);
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1..], before[1..]);
}

#[test]
fn a_parameter_that_leaves_the_window_is_rescaled_and_keeps_its_value() {
    let (var, _) = single(&[1., 2., -3.]);
    var.set(&var.value().detach().rebalance(1. / 4096.).unwrap())
        .unwrap();
    assert_eq!(var.scale().to_f32(), 0.5f32.powi(11));
    let mut sgd = ScaledSgd::from_vars(vec![var.clone()], SgdConfig::default()).unwrap();
    let _ = sgd.apply(&one_grad(&var, &[0., 0., 0.])).unwrap();
    assert_eq!(values(&var.value()), [1., 2., -3.]);
    assert_eq!((var.scale().to_f32(), sgd.counts().rescaled), (0.25, 1));
    // Inside the window nothing moves.
    let _ = sgd.apply(&one_grad(&var, &[0., 0., 0.])).unwrap();
    assert_eq!(sgd.counts().rescaled, 1);
}
