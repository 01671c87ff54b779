//! Construction and learning rate schedules.

use candle_core::{DType, Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use fp8_optim::*;
use fp8_test_support::device;

#[test]
fn construction() {
    let var = |dtype| Var::from_tensor(&Tensor::zeros(2, dtype, &device()).unwrap()).unwrap();
    let twice = vec![
        ("a".to_string(), var(DType::F32)),
        ("a".to_string(), var(DType::F32)),
    ];
    let error = AdamW::from_named(twice, AdamWConfig::default()).unwrap_err();
    assert!(matches!(error, OptimError::DuplicateName { name } if name == "a"));

    // A tied weight is updated once; integers are left out.
    let shared = var(DType::F32);
    let named = [("b", &shared), ("a", &shared), ("c", &var(DType::U32))]
        .map(|(name, var)| (name.to_string(), var.clone()));
    let optimizer = AdamW::from_named(named.to_vec(), AdamWConfig::default()).unwrap();
    assert_eq!(
        optimizer.vars().map(|(name, _)| name).collect::<Vec<_>>(),
        ["a"]
    );

    let bad = [
        (
            "lr",
            AdamWConfig {
                lr: f64::NAN,
                ..AdamWConfig::default()
            },
        ),
        (
            "beta1",
            AdamWConfig {
                beta1: 1.0,
                ..AdamWConfig::default()
            },
        ),
        (
            "beta2",
            AdamWConfig {
                beta2: -0.1,
                ..AdamWConfig::default()
            },
        ),
        (
            "eps",
            AdamWConfig {
                eps: -1.0,
                ..AdamWConfig::default()
            },
        ),
        (
            "weight_decay",
            AdamWConfig {
                weight_decay: f64::INFINITY,
                ..AdamWConfig::default()
            },
        ),
        (
            "max_grad_norm",
            AdamWConfig {
                max_grad_norm: Some(0.0),
                ..AdamWConfig::default()
            },
        ),
    ];
    for (field, config) in bad {
        let error = AdamW::from_named(Vec::new(), config)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(field), "{error}");
    }

    let varmap = VarMap::new();
    let builder = candle_nn::VarBuilder::from_varmap(&varmap, DType::F32, &device());
    let w = builder
        .pp("layer")
        .get_with_hints(4, "w", candle_nn::Init::Const(2.0))
        .unwrap();
    let mut optimizer = AdamW::from_varmap(&varmap, AdamWConfig::default()).unwrap();
    optimizer
        .backward_step(&w.sqr().unwrap().sum_all().unwrap())
        .unwrap();
    assert!(optimizer.state().unwrap().contains_key("layer.w.exp_avg"));
    optimizer.set_learning_rate(0.5);
    assert_eq!((optimizer.learning_rate(), optimizer.lr()), (0.5, 0.5));
    let json = serde_json::to_string(optimizer.config()).unwrap();
    assert_eq!(
        &serde_json::from_str::<AdamWConfig>(&json).unwrap(),
        optimizer.config()
    );
    let error = serde_json::from_str::<AdamWConfig>(r#"{"beta3": 1}"#).unwrap_err();
    assert!(error.to_string().contains("`beta3`"), "{error}");
}

#[test]
fn schedules() {
    let cosine = LrSchedule::cosine(1.0, 10, 110).with_min_ratio(0.2);
    let expect = |step, lr: f64| {
        let got = cosine.lr(step);
        assert!(
            (got - lr).abs() < 1e-12,
            "step {step}: {got}, expected {lr}"
        );
    };
    expect(0, 0.1);
    expect(4, 0.5);
    expect(9, 1.0);
    expect(10, 1.0);
    expect(60, 0.6);
    expect(110, 0.2);
    expect(u64::MAX, 0.2);
    assert!((10..110).all(|step| cosine.lr(step) > cosine.lr(step + 1)));

    let constant = LrSchedule::Constant {
        lr: 2.0,
        warmup_steps: 4,
    };
    assert_eq!(
        [0, 3, 4, 1000].map(|step| constant.lr(step)),
        [0.5, 2.0, 2.0, 2.0]
    );
    assert_eq!(LrSchedule::constant(2.0).lr(0), 2.0);

    for (warmup, total) in [(0, 0), (0, 1), (5, 0), (5, 5), (5, 3)] {
        let schedule = LrSchedule::cosine(1.0, warmup, total);
        for step in [0, 1, 4, 5, 6, u64::MAX] {
            let lr = schedule.lr(step);
            assert!((0.1..=1.0).contains(&lr), "{schedule:?} step {step}: {lr}");
        }
    }

    for schedule in [cosine, constant] {
        let json = serde_json::to_string(&schedule).unwrap();
        assert_eq!(serde_json::from_str::<LrSchedule>(&json).unwrap(), schedule);
    }
    let json = r#"{"kind": "cosine", "peak_lr": 1, "total_steps": 5, "cycles": 2}"#;
    let error = serde_json::from_str::<LrSchedule>(json)
        .unwrap_err()
        .to_string();
    assert!(error.contains("cycles"), "{error}");
    assert!(
        LrSchedule::constant(-1.0)
            .validate()
            .unwrap_err()
            .to_string()
            .starts_with("lr = -1")
    );
    assert!(
        LrSchedule::cosine(1.0, 0, 0)
            .with_min_ratio(1.5)
            .validate()
            .unwrap_err()
            .to_string()
            .starts_with("min_ratio = 1.5")
    );
}

/// candle-nn's for AdamW, torch's for SGD, the FP8 Emulation Toolkit's for the loss scaler.
#[test]
fn options_have_the_documented_defaults() {
    let config = AdamWConfig::default();
    let candle = candle_nn::ParamsAdamW::default();
    assert_eq!(
        (config.lr, config.beta1, config.beta2, config.eps),
        (candle.lr, candle.beta1, candle.beta2, candle.eps)
    );
    assert_eq!(config.weight_decay, candle.weight_decay);
    assert_eq!(
        (config.lr, config.beta1, config.beta2, config.eps),
        (1e-3, 0.9, 0.999, 1e-8)
    );
    assert_eq!(config.weight_decay, 0.01);
    assert_eq!(config.decay_scope, DecayScope::All);
    assert_eq!(config.max_grad_norm, None);
    assert!(!config.master_weights);
    assert_eq!(config.master_dtype, MasterDType::F32);
    assert_eq!((config.moments, config.seed), (MomentStorage::F32, 0));
    assert_eq!(config.max_skipped_steps, Some(100));
    // What JSON leaves out.
    assert_eq!(serde_json::from_str::<AdamWConfig>("{}").unwrap(), config);

    let config = SgdConfig::default();
    assert_eq!(
        (config.lr, config.momentum, config.dampening),
        (1e-3, 0., 0.)
    );
    assert!(!config.nesterov);
    assert_eq!(config.weight_decay, 0.);
    assert_eq!(config.decay_scope, DecayScope::All);
    assert_eq!((config.max_grad_norm, config.masters), (None, None));
    assert_eq!((config.moments, config.seed), (MomentStorage::F32, 0));
    assert_eq!(config.max_skipped_steps, Some(100));

    let config = LossScalerConfig::default();
    assert_eq!(config.initial_loss_scale, 65536.);
    assert_eq!((config.growth_factor, config.growth_interval), (2., 2000));
    assert_eq!(config.backoff_factor, 0.5);
    assert_eq!(
        (config.max_loss_scale, config.min_loss_scale),
        (16_777_216., None)
    );
    assert!(config.f32_gradients);
    assert_eq!(config.max_skipped_steps, Some(100));

    let moments = Fp8Moments::default();
    assert!(moments.expansion && moments.stochastic);
    let options = DataParallelOptions::default();
    assert_eq!(options.bucket_bytes, 1 << 20);
    assert_eq!(options.travel, GradientTravel::Unchanged);
    assert!(options.overlap && options.broadcast_values);
}
