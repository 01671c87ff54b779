//! SGD: against a reference in f64, sequences worked out by hand, and candle-nn's.

use crate::helpers::*;
use candle_core::{DType, Tensor, Var};
use candle_nn::Optimizer;
use fp8_optim::*;
use fp8_test_support::device;

fn one(value: f64) -> Var {
    Var::from_tensor(&Tensor::new(value as f32, &device()).unwrap()).unwrap()
}

/// torch's formulas (`torch.optim.SGD`), per element.
fn reference(theta: &mut f64, buffer: &mut Option<f64>, grad: f64, c: &SgdConfig) {
    let mut g = grad + c.weight_decay * *theta;
    if c.momentum != 0. {
        let next = match *buffer {
            None => g,
            Some(buffer) => c.momentum * buffer + (1. - c.dampening) * g,
        };
        *buffer = Some(next);
        g = if c.nesterov {
            g + c.momentum * next
        } else {
            next
        };
    }
    *theta -= c.lr * g;
}

fn variants() -> Vec<SgdConfig> {
    let plain = SgdConfig::default().with_lr(0.1);
    let momentum = plain.clone().with_momentum(0.9);
    vec![
        plain.clone(),
        plain.with_weight_decay(0.01),
        momentum.clone(),
        momentum.clone().with_dampening(0.3),
        momentum.clone().with_nesterov(true),
        momentum.clone().with_weight_decay(0.1).with_dampening(1.),
        momentum.with_weight_decay(0.1).with_nesterov(true),
    ]
}

#[test]
fn worked_out_by_hand() {
    let plain = SgdConfig::default().with_lr(0.5);
    let momentum = plain.clone().with_momentum(0.5);
    let cases = [
        (plain.clone(), [0.5, -0.5, 0.]),
        (plain.with_weight_decay(0.5), [0.25, -0.8125, -0.109375]),
        (momentum.clone(), [0.5, -0.75, -0.875]),
        (momentum.clone().with_dampening(0.5), [0.5, -0.25, -0.375]),
        (momentum.with_nesterov(true), [0.25, -1.375, -0.9375]),
    ];
    for (config, expected) in cases {
        let var = one(1.);
        let named = vec![("x".to_string(), var.clone())];
        let mut optimizer = Sgd::from_named(named, config.clone()).unwrap();
        for (grad, expected) in [1., 2., -1.].into_iter().zip(expected) {
            let grads = (&*var * grad).unwrap().backward().unwrap();
            assert!(!optimizer.apply(&grads).unwrap().skipped().unwrap());
            assert_eq!(flat64(&var), [expected], "{config:?}");
        }
        assert_eq!(optimizer.steps().unwrap(), 3);
    }
}

#[test]
fn follows_the_formulas() {
    for config in variants() {
        // Six operations of a step round, to half a unit each, and errors add up over five steps.
        for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 5e-6)] {
            let ours = vars(dtype);
            let mut expected: Vec<Vec<(f64, Option<f64>)>> = (ours.iter())
                .map(|(_, var)| flat64(var).into_iter().map(|x| (x, None)).collect())
                .collect();
            let mut optimizer = Sgd::from_named(ours.clone(), config.clone()).unwrap();
            for step in 0..5 {
                let grads = grads(&ours, step, 1.);
                for ((_, var), expected) in ours.iter().zip(&mut expected) {
                    let grad = flat64(grads.get(var).unwrap());
                    for ((theta, buffer), grad) in expected.iter_mut().zip(grad) {
                        reference(theta, buffer, grad, &config);
                    }
                }
                let _ = optimizer.apply(&grads).unwrap();
            }
            for ((name, var), expected) in ours.iter().zip(&expected) {
                for (got, (expected, _)) in flat64(var).into_iter().zip(expected) {
                    let bound = tolerance * expected.abs().max(1.);
                    assert!(
                        (got - expected).abs() <= bound,
                        "{name} {config:?}: {got} {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn equal_to_candles_sgd() {
    for dtype in [DType::F32, DType::F64] {
        let ours = vars(dtype);
        let theirs = copies(&ours);
        let config = SgdConfig::default().with_lr(0.3);
        let mut optimizer = Sgd::from_named(ours.clone(), config).unwrap();
        let plain = theirs.iter().map(|(_, var)| var.clone()).collect();
        let mut candles = candle_nn::SGD::new(plain, 0.3).unwrap();
        for step in 0..4 {
            optimizer.step(&grads(&ours, step, 1.)).unwrap();
            candles.step(&grads(&theirs, step, 1.)).unwrap();
        }
        assert_eq!(all_bits(&ours), all_bits(&theirs), "{dtype:?}");
    }
}

/// Updates of 16-bit variables equal those of f32 variables, rounded once per step.
#[test]
fn sixteen_bit_variables_are_rounded_once() {
    for dtype in [DType::BF16, DType::F16] {
        let halves = vars(dtype);
        let config = SgdConfig::default().with_lr(0.1).with_momentum(0.5);
        let mut optimizer = Sgd::from_named(halves.clone(), config.clone()).unwrap();
        let wide: Vec<(String, Var)> = (halves.iter())
            .map(|(name, var)| {
                let var = var.to_dtype(DType::F32).unwrap();
                (name.clone(), Var::from_tensor(&var).unwrap())
            })
            .collect();
        let mut other = Sgd::from_named(wide.clone(), config).unwrap();
        for step in 0..3 {
            let grads = grads(&halves, step, 1.);
            let _ = optimizer.apply(&grads).unwrap();
            let mut wide_grads = crate::helpers::grads(&wide, step, 1.);
            for ((_, half), (_, wide)) in halves.iter().zip(&wide) {
                let grad = grads.get(half).unwrap().to_dtype(DType::F32).unwrap();
                wide_grads.insert(wide, grad);
            }
            let _ = other.apply(&wide_grads).unwrap();
            for ((_, half), (_, wide)) in halves.iter().zip(&wide) {
                let rounded = wide.to_dtype(dtype).unwrap();
                assert_eq!(bits(half), bits(&rounded));
                wide.set(&rounded.to_dtype(DType::F32).unwrap()).unwrap();
            }
        }
    }
}

#[test]
fn clips_skips_and_ignores_missing_gradients() {
    let all = vars(DType::F32);
    let config = SgdConfig::default()
        .with_momentum(0.9)
        .with_max_grad_norm(1.);
    let mut optimizer = Sgd::from_named(all.clone(), config).unwrap();
    let report = optimizer.apply(&grads(&all, 0, 1.)).unwrap();
    let (norm, clip) = (
        report.grad_norm().unwrap(),
        report.clip_coefficient().unwrap(),
    );
    assert!(norm > 1. && (clip * (norm + 1e-6) - 1.).abs() < 1e-12);

    let (state, before) = (optimizer.state().unwrap(), all_bits(&all));
    let big = &all[3].1;
    let mut bad = grads(&all, 1, 1.);
    let grad = (0..40_000).map(|i| if i == 31_234 { f32::NAN } else { 0.1 });
    bad.insert(big, Tensor::from_iter(grad, &device()).unwrap());
    assert!(optimizer.apply(&bad).unwrap().skipped().unwrap());
    assert_eq!(all_bits(&all), before);
    assert_eq!(optimizer.steps().unwrap(), 1);
    for (name, tensor) in optimizer.state().unwrap() {
        assert_eq!(bits(&tensor), bits(&state[&name]), "{name}");
    }

    // No gradient: neither the variable nor its momentum moves.
    let mut some = grads(&all, 2, 1.);
    some.remove(big);
    let _ = optimizer.apply(&some).unwrap();
    assert_eq!(bits(big), before[3]);
    let now = optimizer.state().unwrap();
    assert_eq!(
        bits(&now["big.momentum_buffer"]),
        bits(&state["big.momentum_buffer"])
    );
    assert_ne!(
        bits(&now["w.momentum_buffer"]),
        bits(&state["w.momentum_buffer"])
    );
}

#[test]
fn resumes_bit_for_bit_and_names_what_does_not_fit() {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let config = variants().pop().unwrap().with_max_grad_norm(1.);
        let straight = vars(dtype);
        let mut optimizer = Sgd::from_named(straight.clone(), config.clone()).unwrap();
        for step in 0..3 {
            let mut some = grads(&straight, step, 1.);
            // Its buffer starts after the resume.
            some.remove(&straight[1].1);
            let _ = optimizer.apply(&some).unwrap();
        }
        let saved = optimizer.optimizer_state().unwrap();
        assert!(!saved.tensors().contains_key("bias.momentum_buffer"));
        let resumed = copies(&straight);
        let mut other = Sgd::from_named(resumed.clone(), SgdConfig::default()).unwrap();
        other.load_optimizer_state(&saved).unwrap();
        assert_eq!((other.steps().unwrap(), other.config()), (3, &config));
        for step in 3..6 {
            let _ = optimizer.apply(&grads(&straight, step, 1.)).unwrap();
            let _ = other.apply(&grads(&resumed, step, 1.)).unwrap();
        }
        assert_eq!(all_bits(&straight), all_bits(&resumed), "{dtype:?}");

        let mut lost = saved.tensors().clone();
        lost.remove("w.momentum_buffer").unwrap();
        let error = other.load_state(&lost).unwrap_err();
        assert!(matches!(error, OptimError::MissingState { .. }), "{error}");
        let mut more = saved.tensors().clone();
        more.insert(
            "v.momentum_buffer".into(),
            lost["big.momentum_buffer"].clone(),
        );
        let error = other.load_state(&more).unwrap_err();
        assert!(
            matches!(&error, OptimError::UnexpectedState { name } if name == "v.momentum_buffer")
        );
        assert_eq!(other.steps().unwrap(), 6);
    }
}

#[test]
fn bad_values_are_named() {
    let config = SgdConfig::default;
    let bad = [
        ("lr = NaN", config().with_lr(f64::NAN)),
        ("momentum = 1 ", config().with_momentum(1.)),
        ("momentum = 0 ", config().with_nesterov(true)),
        ("dampening = -0.5", config().with_dampening(-0.5)),
        (
            "dampening = 0.5",
            config()
                .with_momentum(0.5)
                .with_dampening(0.5)
                .with_nesterov(true),
        ),
        (
            "weight_decay = inf",
            config().with_weight_decay(f64::INFINITY),
        ),
        ("max_grad_norm = 0", config().with_max_grad_norm(0.)),
    ];
    for (text, config) in bad {
        let error = Sgd::from_named(vec![], config).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
    let var = one(1.);
    let mut optimizer = Sgd::from_named(vec![("x".into(), var.clone())], config()).unwrap();
    optimizer.set_learning_rate(-1.);
    let error = optimizer.apply(&var.backward().unwrap()).unwrap_err();
    assert!(error.to_string().starts_with("lr = -1"), "{error}");
    assert_eq!(flat64(&var), [1.]);
}
