//! What a step computes: equal to candle's, 16-bit variables, clipping, weight decay.

use crate::helpers::*;
use candle_core::{DType, Var};
use candle_nn::Optimizer;
use fp8_optim::*;
use fp8_test_support::{apart, device};

#[test]
fn equal_to_candles_adamw() {
    let config = AdamWConfig {
        lr: 3e-3,
        weight_decay: 0.1,
        ..AdamWConfig::default()
    };
    let params = candle_nn::ParamsAdamW {
        lr: config.lr,
        beta1: config.beta1,
        beta2: config.beta2,
        eps: config.eps,
        weight_decay: config.weight_decay,
    };
    let defaults = (AdamWConfig::default(), candle_nn::ParamsAdamW::default());
    for (config, params) in [(config, params), defaults] {
        for dtype in [DType::F32, DType::F64] {
            let ours = vars(dtype);
            let theirs = copies(&ours);
            let mut optimizer = AdamW::from_named(ours.clone(), config.clone()).unwrap();
            let candle_vars = theirs.iter().map(|(_, var)| var.clone()).collect();
            let mut reference = candle_nn::AdamW::new(candle_vars, params.clone()).unwrap();
            for step in 0..20 {
                let report = optimizer.apply(&grads(&ours, step, 1.0)).unwrap();
                assert_eq!(
                    (report.clip_coefficient().unwrap(), report.updated),
                    (1.0, ours.len())
                );
                reference.step(&grads(&theirs, step, 1.0)).unwrap();
                if device().is_cpu() {
                    let equal = all_bits(&ours) == all_bits(&theirs);
                    assert!(equal, "{dtype:?}, {params:?}: step {step}");
                }
            }
            for ((_, a), (_, b)) in ours.iter().zip(&theirs) {
                close(a, b, 1e-6);
            }
            assert_eq!(optimizer.steps().unwrap(), 20);
        }
    }
}

#[test]
fn sixteen_bit_variables_follow_f32_moments() {
    for (dtype, tolerance) in [(DType::BF16, 1.0 / 128.0), (DType::F16, 1.0 / 1024.0)] {
        let halves = vars(dtype);
        let floats: Vec<_> = halves
            .iter()
            .map(|(name, var)| {
                let wide = var.to_dtype(DType::F32).unwrap();
                (name.clone(), Var::from_tensor(&wide).unwrap())
            })
            .collect();
        let config = AdamWConfig {
            lr: 1e-2,
            ..AdamWConfig::default()
        };
        let mut a = AdamW::from_named(halves.clone(), config.clone()).unwrap();
        let mut b = AdamW::from_named(floats.clone(), config).unwrap();
        for (name, tensor) in a.state().unwrap() {
            assert_eq!(
                tensor.dtype(),
                if name == STEP_NAME {
                    DType::I64
                } else {
                    DType::F32
                }
            );
        }
        for step in 0..3 {
            let _ = a.apply(&grads(&halves, step, 1.0)).unwrap();
            let _ = b.apply(&grads(&floats, step, 1.0)).unwrap();
        }
        for ((_, half), (_, float)) in halves.iter().zip(&floats) {
            assert_eq!(half.dtype(), dtype);
            let worst = apart(half, float);
            assert!(worst < 3.0 * tolerance, "{dtype:?}: {worst}");
        }
    }
}

#[test]
fn clips_by_the_global_norm() {
    let all = vars(DType::F32);
    let step = grads(&all, 0, 5.0);
    let square = |var: &Var| {
        let grad = step.get(var).unwrap().to_dtype(DType::F64).unwrap();
        grad.sqr()
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f64>()
            .unwrap()
    };
    let norm = all.iter().map(|(_, var)| square(var)).sum::<f64>().sqrt();
    assert!(norm > 100.0);

    let clipped = copies(&all);
    let config = AdamWConfig {
        max_grad_norm: Some(1.0),
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::from_named(clipped.clone(), config.clone()).unwrap();
    let report = optimizer.apply(&grads(&clipped, 0, 5.0)).unwrap();
    assert!((report.grad_norm().unwrap() / norm - 1.0).abs() < 1e-12);
    assert!((report.clip_coefficient().unwrap() - 1.0 / (norm + 1e-6)).abs() < 1e-15);

    // Equal to a step without clipping on gradients scaled by hand. This is checked on the first moment, because the update
    // itself hardly depends on the size of a gradient.
    let scaled = copies(&all);
    let mut plain = AdamW::from_named(scaled.clone(), AdamWConfig::default()).unwrap();
    let mut by_hand = grads(&scaled, 0, 5.0);
    for (_, var) in &scaled {
        let grad = (by_hand.get(var).unwrap() * report.clip_coefficient().unwrap()).unwrap();
        by_hand.insert(var, grad);
    }
    assert_eq!(
        plain.apply(&by_hand).unwrap().clip_coefficient().unwrap(),
        1.0
    );
    assert_eq!(state_bits(&optimizer), state_bits(&plain));
    assert_eq!(all_bits(&clipped), all_bits(&scaled));

    // Below the limit clipping changes no bit.
    let free = copies(&all);
    let config = AdamWConfig {
        max_grad_norm: Some(1e9),
        ..config
    };
    let mut optimizer = AdamW::from_named(free.clone(), config).unwrap();
    assert_eq!(
        optimizer
            .apply(&grads(&free, 0, 5.0))
            .unwrap()
            .clip_coefficient()
            .unwrap(),
        1.0
    );
}

#[test]
fn weight_decay_follows_the_scope_and_the_filter() {
    let decayed = |config: AdamWConfig, predicate: bool| {
        let all = vars(DType::F32);
        let before = all_bits(&all);
        let mut optimizer = AdamW::from_named(all.clone(), config).unwrap();
        if predicate {
            optimizer = optimizer.with_no_decay(|name, tensor| name == "w" || tensor.rank() == 0);
        }
        // With zero gradients only decay moves a variable.
        let _ = optimizer.apply(&grads(&all, 0, 0.0)).unwrap();
        let after = all_bits(&all);
        (0..4).map(|i| before[i] != after[i]).collect::<Vec<_>>()
    };
    let all = AdamWConfig {
        lr: 0.1,
        ..AdamWConfig::default()
    };
    assert_eq!(decayed(all.clone(), false), [true, true, true, true]);
    let matrices = AdamWConfig {
        decay_scope: DecayScope::Matrices,
        ..all.clone()
    };
    assert_eq!(decayed(matrices, false), [true, false, false, false]);
    assert_eq!(decayed(all, true), [false, true, false, true]);
}
