//! The optimizer: equal to candle's, clipping, saving and loading, skipped steps, thread counts,
//! master weights. On the device of `FP8_TEST_DEVICE`.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use fp8_recipes::optim::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

#[path = "../../fp8-candle/tests/common/device.rs"]
mod device;
use device::device;

fn random(rng: &mut StdRng, shape: &[usize]) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Tensor::from_vec(values, shape, &device()).unwrap()
}

/// Variables of several sizes: smaller than a block, not a multiple of a vector, several blocks.
fn vars(dtype: DType) -> Vec<(String, Var)> {
    let mut rng = StdRng::seed_from_u64(7);
    [
        ("w", vec![200, 257]),
        ("bias", vec![13]),
        ("one", vec![]),
        ("big", vec![40_000]),
    ]
    .into_iter()
    .map(|(name, shape)| {
        let tensor = random(&mut rng, &shape).to_dtype(dtype).unwrap();
        (name.to_string(), Var::from_tensor(&tensor).unwrap())
    })
    .collect()
}

fn copies(vars: &[(String, Var)]) -> Vec<(String, Var)> {
    let copy = |var: &Var| Var::from_tensor(&var.as_tensor().copy().unwrap()).unwrap();
    vars.iter()
        .map(|(name, var)| (name.clone(), copy(var)))
        .collect()
}

/// Gradients that depend on the step and the variable's position only. candle has no public way to
/// make an empty store, so one comes from a backward pass over the variables.
fn grads(vars: &[(String, Var)], step: u64, gain: f64) -> GradStore {
    let mut rng = StdRng::seed_from_u64(100 + step);
    let mut loss = Tensor::zeros((), DType::F64, &device()).unwrap();
    for (_, var) in vars {
        let target = (random(&mut rng, var.dims()) * gain).unwrap();
        let product = (var.to_dtype(DType::F32).unwrap() * target).unwrap();
        loss = (loss + product.sum_all().unwrap().to_dtype(DType::F64).unwrap()).unwrap();
    }
    loss.backward().unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.to_device(&Device::Cpu).unwrap().flatten_all();
    let wide = flat.unwrap().to_dtype(DType::F64).unwrap();
    wide.to_vec1().unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor).into_iter().map(f64::to_bits).collect()
}

fn all_bits(vars: &[(String, Var)]) -> Vec<Vec<u64>> {
    vars.iter().map(|(_, var)| bits(var)).collect()
}

fn state_bits(optimizer: &AdamW) -> Vec<(String, Vec<u64>)> {
    let mut state: Vec<_> = optimizer.state().unwrap().into_iter().collect();
    state.sort_by(|a, b| a.0.cmp(&b.0));
    state
        .into_iter()
        .map(|(name, tensor)| (name, bits(&tensor)))
        .collect()
}

fn close(a: &Tensor, b: &Tensor, tolerance: f64) {
    // candle's kernels fuse products and sums, which shows where a variable comes close to 0.
    let floor = if device().is_cpu() { 1e-6 } else { 0.1 };
    for (i, (a, b)) in values(a).into_iter().zip(values(b)).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * b.abs().max(floor),
            "element {i}: {a} {b}"
        );
    }
}

#[test]
fn equal_to_candles_adamw() {
    for dtype in [DType::F32, DType::F64] {
        let ours = vars(dtype);
        let theirs = copies(&ours);
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
        let mut optimizer = AdamW::from_named(ours.clone(), config).unwrap();
        let candle_vars = theirs.iter().map(|(_, var)| var.clone()).collect();
        let mut reference = candle_nn::AdamW::new(candle_vars, params).unwrap();
        for step in 0..20 {
            let report = optimizer.apply(&grads(&ours, step, 1.0)).unwrap();
            assert_eq!(
                (report.clip_coefficient().unwrap(), report.updated),
                (1.0, ours.len())
            );
            reference.step(&grads(&theirs, step, 1.0)).unwrap();
        }
        for ((_, a), (_, b)) in ours.iter().zip(&theirs) {
            close(a, b, 1e-6);
        }
        assert_eq!(optimizer.steps().unwrap(), 20);
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
            let difference = (half.to_dtype(DType::F32).unwrap() - float.as_tensor()).unwrap();
            let worst = difference
                .abs()
                .unwrap()
                .flatten_all()
                .unwrap()
                .max(0)
                .unwrap();
            assert!(f64::from(worst.to_scalar::<f32>().unwrap()) < 3.0 * tolerance);
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

    // The same as a step without clipping on gradients scaled by hand. The first moment shows it:
    // the update itself hardly depends on the size of a gradient.
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

    // Below the limit nothing changes, to the bit.
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
fn a_loaded_state_continues_bit_for_bit() {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let config = AdamWConfig {
            max_grad_norm: Some(1.0),
            ..AdamWConfig::default()
        };
        let straight = vars(dtype);
        let mut optimizer = AdamW::from_named(straight.clone(), config.clone()).unwrap();
        for step in 0..5 {
            let _ = optimizer.apply(&grads(&straight, step, 1.0)).unwrap();
        }
        let saved = optimizer.state().unwrap();
        let resumed = copies(&straight);
        let expected_snapshot = state_bits(&optimizer);
        for step in 5..9 {
            let _ = optimizer.apply(&grads(&straight, step, 1.0)).unwrap();
        }
        // Later steps did not touch the snapshot.
        let mut other = AdamW::from_named(resumed.clone(), config).unwrap();
        other.load_state(&saved).unwrap();
        assert_eq!(state_bits(&other), expected_snapshot);
        assert_eq!(other.steps().unwrap(), 5);
        for step in 5..9 {
            let _ = other.apply(&grads(&resumed, step, 1.0)).unwrap();
        }
        assert_eq!(all_bits(&straight), all_bits(&resumed));
        assert_eq!(state_bits(&optimizer), state_bits(&other));
    }
}

#[test]
fn loading_names_what_does_not_fit_and_changes_nothing() {
    let all = vars(DType::F32);
    let mut optimizer = AdamW::from_named(all.clone(), AdamWConfig::default()).unwrap();
    let _ = optimizer.apply(&grads(&all, 0, 1.0)).unwrap();
    let good = optimizer.state().unwrap();
    let before = state_bits(&optimizer);
    let mut refused = |change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let mut state = good.clone();
        change(&mut state);
        let error = optimizer.load_state(&state).unwrap_err();
        assert_eq!(state_bits(&optimizer), before);
        error
    };
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device()).unwrap();

    let missing = refused(&|state| drop(state.remove("w.exp_avg_sq")));
    assert!(matches!(&missing, OptimError::MissingState { name } if name == "w.exp_avg_sq"));
    let shape =
        refused(&|state| drop(state.insert("bias.exp_avg".into(), zeros(&[12], DType::F32))));
    assert!(matches!(shape, OptimError::StateShape { .. }));
    let message = shape.to_string();
    assert!(
        message.contains("bias.exp_avg") && message.contains("[13]") && message.contains("[12]")
    );
    let dtype =
        refused(&|state| drop(state.insert("bias.exp_avg".into(), zeros(&[13], DType::F16))));
    let message = dtype.to_string();
    assert!(
        message.contains("F32") && message.contains("F16"),
        "{message}"
    );
    let extra = refused(&|state| drop(state.insert("v.exp_avg".into(), zeros(&[1], DType::F32))));
    assert!(matches!(&extra, OptimError::UnexpectedState { name } if name == "v.exp_avg"));
    let no_step = refused(&|state| drop(state.remove(STEP_NAME)));
    assert!(matches!(&no_step, OptimError::MissingState { name } if name == STEP_NAME));
    let minus = Tensor::new(-3i64, &device()).unwrap();
    let negative = refused(&|state| drop(state.insert(STEP_NAME.into(), minus.clone())));
    assert!(matches!(negative, OptimError::NegativeStep { got: -3, .. }));
    let empty = refused(&|state| drop(state.insert(STEP_NAME.into(), zeros(&[0], DType::I64))));
    assert!(matches!(empty, OptimError::StateShape { .. }));
}

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
            // All had a gradient.
            let outcome = (report.updated, report.clip_coefficient().unwrap());
            assert_eq!(outcome, (all.len(), 0.0));
            assert_eq!((all_bits(&all), state_bits(&optimizer)), before);
        }
    }
    // The largest finite gradients are no reason to skip.
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
fn weight_decay_reaches_what_it_should() {
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

/// Steps below half a unit in the last place of bf16 and f16 are lost without a copy and add up with one.
#[test]
fn master_weights_keep_what_rounding_drops() {
    for dtype in [DType::BF16, DType::F16] {
        let start = Tensor::ones(1000, dtype, &device()).unwrap();
        let run = |dtype: DType, master_weights| {
            let var = Var::from_tensor(&start.to_dtype(dtype).unwrap().copy().unwrap()).unwrap();
            let config = AdamWConfig {
                lr: 1e-4,
                weight_decay: 0.0,
                master_weights,
                ..AdamWConfig::default()
            };
            let named = vec![("v".to_string(), var.clone())];
            let mut optimizer = AdamW::from_named(named.clone(), config).unwrap();
            for _ in 0..100 {
                let mut step = grads(&named, 0, 0.0);
                step.insert(&var, Tensor::ones(1000, dtype, &device()).unwrap());
                let _ = optimizer.apply(&step).unwrap();
            }
            (var, optimizer.state().unwrap())
        };
        let (lost, state) = run(dtype, false);
        assert_eq!(bits(&lost), bits(&start), "{dtype:?}");
        assert!(!state.contains_key("v.master_param"));
        let (kept, state) = run(dtype, true);
        let (wide, wide_state) = run(DType::F32, true);
        assert!(!wide_state.contains_key("v.master_param"));
        // The copy is what an f32 variable would be, and the variable is the copy rounded.
        let master = &state["v.master_param"];
        assert_eq!(master.dtype(), DType::F32);
        assert_eq!(bits(master), bits(&wide));
        assert_eq!(bits(&master.to_dtype(dtype).unwrap()), bits(&kept));
        assert!((values(&kept)[0] - 0.99).abs() < 0.004);
    }
}

#[test]
fn master_weights_resume_follow_their_variables_and_can_be_turned_on_and_off() {
    for dtype in [DType::BF16, DType::F16] {
        let config = AdamWConfig {
            max_grad_norm: Some(1.0),
            master_weights: true,
            ..AdamWConfig::default()
        };
        let straight = vars(dtype);
        let mut optimizer = AdamW::from_named(straight.clone(), config.clone()).unwrap();
        for step in 0..4 {
            let _ = optimizer.apply(&grads(&straight, step, 1.0)).unwrap();
        }
        let saved = optimizer.state().unwrap();
        let resumed = copies(&straight);
        for step in 4..7 {
            let _ = optimizer.apply(&grads(&straight, step, 1.0)).unwrap();
        }
        let mut other = AdamW::from_named(resumed.clone(), config.clone()).unwrap();
        other.load_state(&saved).unwrap();
        for step in 4..7 {
            let _ = other.apply(&grads(&resumed, step, 1.0)).unwrap();
        }
        assert_eq!(all_bits(&straight), all_bits(&resumed));
        assert_eq!(state_bits(&optimizer), state_bits(&other));

        // With and without copies do not fit each other.
        let plain = AdamWConfig {
            master_weights: false,
            ..config.clone()
        };
        let mut without = AdamW::from_named(copies(&straight), plain.clone()).unwrap();
        let error = without.load_state(&saved).unwrap_err();
        assert!(
            matches!(&error, OptimError::UnexpectedState { name } if name.ends_with(".master_param"))
        );
        let error = other.load_state(&without.state().unwrap()).unwrap_err();
        assert!(
            matches!(&error, OptimError::MissingState { name } if name == "bias.master_param"),
            "{error}"
        );

        // A variable that somebody has set: its value counts, as in an optimizer made then. In part: the rest
        // keeps its copy.
        let big = &straight[3].1;
        let half = big.narrow(0, 0, 20_000).unwrap().copy().unwrap();
        let ones = Tensor::ones(20_000, dtype, &device()).unwrap();
        big.set(&Tensor::cat(&[&ones, &half], 0).unwrap()).unwrap();
        let _ = optimizer.apply(&grads(&straight, 7, 0.0)).unwrap();
        let state = optimizer.state().unwrap();
        let master = values(&state["big.master_param"]);
        assert!(master[..20_000].iter().all(|x| (x - 1.0).abs() < 0.01));
        assert!(master[..20_000].iter().any(|x| *x != 1.0));

        // Turned off, dropped; turned on again, taken from the variables.
        other.set_config(plain).unwrap();
        assert!(!other.state().unwrap().contains_key("w.master_param"));
        other.set_config(config).unwrap();
        assert_eq!(
            bits(&other.state().unwrap()["w.master_param"]),
            bits(&resumed[0].1)
        );
    }
}

#[test]
fn odd_gradients() {
    let all = vars(DType::F32);
    let mut optimizer = AdamW::from_named(all.clone(), AdamWConfig::default()).unwrap();
    let before = all_bits(&all);
    // Another shape: refused by name, before anything is changed.
    let mut step = grads(&all, 0, 1.0);
    step.insert(&all[1].1, Tensor::zeros(12, DType::F32, &device()).unwrap());
    let error = optimizer.apply(&step).unwrap_err().to_string();
    assert!(
        error.contains("`bias`") && error.contains("[13]") && error.contains("[12]"),
        "{error}"
    );
    assert_eq!(all_bits(&all), before);
    // Strided, and the variable's own memory.
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

#[test]
fn construction() {
    let var = |dtype| Var::from_tensor(&Tensor::zeros(2, dtype, &device()).unwrap()).unwrap();
    let twice = vec![
        ("a".to_string(), var(DType::F32)),
        ("a".to_string(), var(DType::F32)),
    ];
    let error = AdamW::from_named(twice, AdamWConfig::default()).unwrap_err();
    assert!(matches!(error, OptimError::DuplicateName { name } if name == "a"));

    // Tied weights are stepped once; integers are left out.
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
    assert!(serde_json::from_str::<AdamWConfig>(r#"{"beta3": 1}"#).is_err());
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
            .is_err()
    );
}
