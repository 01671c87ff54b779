//! Results do not depend on the number of threads or the order of variables. Gradients that are missing or not finite.

use crate::helpers::*;
use candle_core::{DType, Tensor, Var};
use fp8_optim::*;
use fp8_test_support::device;

#[test]
fn the_number_of_threads_changes_nothing() {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let all = vars(DType::F32);
            let config = AdamWConfig {
                max_grad_norm: Some(0.5),
                ..AdamWConfig::default()
            };
            let mut optimizer = AdamW::from_named(all.clone(), config).unwrap();
            let norms: Vec<u64> = (0..4)
                .map(|step| {
                    optimizer
                        .apply(&grads(&all, step, 1.0))
                        .unwrap()
                        .grad_norm()
                        .unwrap()
                        .to_bits()
                })
                .collect();
            (norms, all_bits(&all), state_bits(&optimizer))
        })
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
}

#[test]
fn the_order_of_the_variables_changes_nothing() {
    let run = |reverse: bool| {
        let all = vars(DType::F32);
        let mut given = all.clone();
        if reverse {
            given.reverse();
        }
        let config = AdamWConfig {
            max_grad_norm: Some(0.5),
            ..AdamWConfig::default()
        };
        let mut optimizer = AdamW::from_named(given, config).unwrap();
        let names: Vec<String> = optimizer.vars().map(|(name, _)| name.to_string()).collect();
        assert_eq!(names, ["bias", "big", "one", "w"]);
        let report = optimizer.apply(&grads(&all, 0, 1.0)).unwrap();
        (report.grad_norm().unwrap().to_bits(), all_bits(&all))
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn gradients_that_are_not_finite_skip_the_step() {
    for dtype in [DType::F32, DType::BF16] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let all = vars(dtype);
            let mut optimizer = AdamW::from_named(all.clone(), AdamWConfig::default()).unwrap();
            let _ = optimizer.apply(&grads(&all, 0, 1.0)).unwrap();
            let before = (all_bits(&all), state_bits(&optimizer));
            let mut step = grads(&all, 1, 1.0);
            let mut poison = vec![0f32; 40_000];
            poison[39_999] = bad;
            let poison = Tensor::from_vec(poison, 40_000, &device())
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            step.insert(&all[3].1, poison);
            let report = optimizer.apply(&step).unwrap();
            assert!(report.skipped().unwrap() && !report.grad_norm().unwrap().is_finite());
            // Every variable had a gradient.
            let outcome = (report.updated, report.clip_coefficient().unwrap());
            assert_eq!(outcome, (all.len(), 0.0));
            assert_eq!((all_bits(&all), state_bits(&optimizer)), before);
        }
    }
    // The largest finite gradients do not skip the step.
    let var = Var::from_tensor(&Tensor::zeros(3, DType::F32, &device()).unwrap()).unwrap();
    let all = vec![("v".to_string(), var.clone())];
    let mut optimizer = AdamW::from_named(all.clone(), AdamWConfig::default()).unwrap();
    let mut step = grads(&all, 0, 1.0);
    step.insert(&var, Tensor::full(f32::MAX, 3, &device()).unwrap());
    assert!(!optimizer.apply(&step).unwrap().skipped().unwrap());
}

#[test]
fn variables_without_a_gradient_are_left_alone() {
    let all = vars(DType::F32);
    let before = all_bits(&all);
    let mut optimizer = AdamW::from_named(all.clone(), AdamWConfig::default()).unwrap();
    let report = optimizer.apply(&grads(&all[1..2], 0, 1.0)).unwrap();
    assert_eq!(report.updated, 1);
    let after = all_bits(&all);
    assert_ne!(before[1], after[1]);
    for i in [0, 2, 3] {
        assert_eq!(before[i], after[i]);
    }
}

#[test]
fn gradients_of_other_shapes_and_strides() {
    let all = vars(DType::F32);
    let mut optimizer = AdamW::from_named(all.clone(), AdamWConfig::default()).unwrap();
    let before = all_bits(&all);
    // A gradient of another shape is refused with its name, before anything is changed.
    let mut step = grads(&all, 0, 1.0);
    step.insert(&all[1].1, Tensor::zeros(12, DType::F32, &device()).unwrap());
    let error = optimizer.apply(&step).unwrap_err().to_string();
    assert!(
        error.contains("`bias`") && error.contains("[13]") && error.contains("[12]"),
        "{error}"
    );
    assert_eq!(all_bits(&all), before);
    // A strided gradient, and one that shares the memory of the variable.
    let plain = copies(&all);
    let mut reference = AdamW::from_named(plain.clone(), AdamWConfig::default()).unwrap();
    let (mut step, mut same) = (grads(&all, 0, 1.0), grads(&plain, 0, 1.0));
    let strided = Tensor::ones((257, 200), DType::F32, &device())
        .unwrap()
        .t()
        .unwrap();
    step.insert(&all[0].1, strided.clone());
    same.insert(&plain[0].1, strided.contiguous().unwrap());
    step.insert(&all[3].1, all[3].1.as_detached_tensor());
    same.insert(&plain[3].1, plain[3].1.as_tensor().copy().unwrap());
    let _ = optimizer.apply(&step).unwrap();
    let _ = reference.apply(&same).unwrap();
    assert_eq!(all_bits(&all), all_bits(&plain));
}
