//! Moments in FP8: what they hold, their bytes, resuming, and changes between f32 and FP8.

use crate::helpers::*;
use candle_core::{DType, Device, Tensor, Var};
use fp8_optim::*;
use fp8_test_support::device;
use std::collections::HashMap;

const CHOICES: [(bool, bool); 4] = [(true, true), (true, false), (false, true), (false, false)];

fn storage((expansion, stochastic): (bool, bool)) -> MomentStorage {
    let fp8 = Fp8Moments::default();
    MomentStorage::Fp8(fp8.with_expansion(expansion).with_stochastic(stochastic))
}

fn adamw(moments: MomentStorage) -> AdamWConfig {
    AdamWConfig {
        moments,
        max_grad_norm: Some(1.0),
        seed: 11,
        ..AdamWConfig::default()
    }
}

fn steps(optimizer: &mut AdamW, all: &[(String, Var)], steps: std::ops::Range<u64>) {
    for step in steps {
        let _ = optimizer.apply(&grads(all, step, 1.0)).unwrap();
    }
}

#[test]
fn a_resumed_run_continues_bit_for_bit() {
    for choice in CHOICES {
        for dtype in [DType::F32, DType::BF16] {
            let config = adamw(storage(choice));
            let straight = vars(dtype);
            let mut optimizer = AdamW::from_named(straight.clone(), config.clone()).unwrap();
            steps(&mut optimizer, &straight, 0..4);
            let saved = optimizer.optimizer_state().unwrap();
            let resumed = copies(&straight);
            let mut other = AdamW::from_named(resumed.clone(), config).unwrap();
            other.load_optimizer_state(&saved).unwrap();
            steps(&mut optimizer, &straight, 4..8);
            steps(&mut other, &resumed, 4..8);
            assert_eq!(all_bits(&straight), all_bits(&resumed), "{choice:?}");
            assert_eq!(state_bits(&optimizer), state_bits(&other), "{choice:?}");
        }
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().unwrap().install(|| {
            let all = vars(DType::F32);
            let mut optimizer =
                AdamW::from_named(all.clone(), adamw(storage((true, true)))).unwrap();
            steps(&mut optimizer, &all, 0..4);
            (all_bits(&all), state_bits(&optimizer))
        })
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
}

#[test]
fn a_moment_has_a_code_for_each_element_and_five_bytes_for_each_block() {
    let all = vars(DType::F32);
    let mut optimizer = AdamW::from_named(all.clone(), adamw(storage((true, true)))).unwrap();
    steps(&mut optimizer, &all, 0..1);
    let bytes = |n: usize| 2 * (n + 5 * n.div_ceil(128)) as u64;
    let elements = all.iter().map(|(_, var)| var.elem_count());
    let expected: u64 = elements.map(bytes).sum();
    assert_eq!(optimizer.state_bytes(), expected);
    let state = optimizer.state().unwrap();
    let sizes = state.iter().filter(|(name, _)| *name != STEP_NAME);
    let sizes = sizes.map(|(_, t)| (t.elem_count() * t.dtype().size_in_bytes()) as u64);
    assert_eq!(sizes.sum::<u64>(), expected);
    assert_eq!(state["w.exp_avg"].dims(), [200, 257]);
    assert_eq!(state["w.exp_avg_sq.amax"].dims(), [402]);
    // Together with bf16 parameters: what a run keeps.
    let half = vars(DType::BF16);
    let config = AdamWConfig {
        master_weights: true,
        master_dtype: MasterDType::Bf16,
        ..adamw(storage((true, true)))
    };
    let mut optimizer = AdamW::from_named(half.clone(), config).unwrap();
    steps(&mut optimizer, &half, 0..1);
    let count: usize = half.iter().map(|(_, var)| var.elem_count()).sum();
    let each = (optimizer.state_bytes() + 2 * count as u64) as f64 / count as f64;
    assert!(each < 4.2, "{each} bytes of each parameter");
}

/// Two moments differ by what rounding may have done.
fn near(a: &HashMap<String, Tensor>, b: &HashMap<String, Tensor>, name: &str, relative: f64) {
    let (a, b) = (flat64(&a[name]), flat64(&b[name]));
    let largest = b.iter().fold(0f64, |max, x| max.max(x.abs()));
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        let bound = relative * b.abs() + 2e-3 * largest;
        assert!((a - b).abs() <= bound, "{name} {i}: {a} {b}");
    }
}

#[test]
fn moments_change_between_f32_and_fp8() {
    for choice in CHOICES {
        let all = vars(DType::F32);
        let mut wide = AdamW::from_named(all.clone(), adamw(MomentStorage::F32)).unwrap();
        steps(&mut wide, &all, 0..3);
        let saved = wide.optimizer_state().unwrap();

        // By loading a state, which keeps the storage of the optimizer.
        let mut narrow = AdamW::from_named(copies(&all), adamw(storage(choice))).unwrap();
        narrow.load_optimizer_state(&saved).unwrap();
        assert_eq!(narrow.config().moments, storage(choice));
        let codes = narrow.state().unwrap();
        assert_eq!(codes["w.exp_avg"].dtype(), DType::U8);
        let mut back = AdamW::from_named(copies(&all), adamw(MomentStorage::F32)).unwrap();
        back.load_state(&codes).unwrap();
        for name in ["w.exp_avg", "w.exp_avg_sq", "bias.exp_avg", "big.exp_avg"] {
            near(&back.state().unwrap(), saved.tensors(), name, 1. / 16.);
        }

        // By a change of the configuration.
        let mut changed = AdamW::from_named(copies(&all), adamw(MomentStorage::F32)).unwrap();
        changed.load_state(saved.tensors()).unwrap();
        changed.set_config(adamw(storage(choice))).unwrap();
        assert_eq!(state_bits(&changed), state_bits(&narrow));
        changed.set_config(adamw(MomentStorage::F32)).unwrap();
        assert_eq!(state_bits(&changed), state_bits(&back));
    }
}

#[test]
fn moments_of_f64_variables_stay_f64() {
    let run = |moments| {
        let all = vars(DType::F64);
        let mut optimizer = AdamW::from_named(all.clone(), adamw(moments)).unwrap();
        steps(&mut optimizer, &all, 0..3);
        (all_bits(&all), state_bits(&optimizer))
    };
    assert_eq!(run(MomentStorage::F32), run(storage((true, true))));
}

#[test]
fn loading_names_what_does_not_fit() {
    let all = vars(DType::F32);
    let mut optimizer = AdamW::from_named(all.clone(), adamw(storage((true, true)))).unwrap();
    steps(&mut optimizer, &all, 0..1);
    let good = optimizer.state().unwrap();
    let before = state_bits(&optimizer);
    let mut refused = |name: &str, new: Option<Tensor>| {
        let mut state = good.clone();
        match new {
            Some(tensor) => state.insert(name.into(), tensor),
            None => state.remove(name),
        };
        let error = optimizer.load_state(&state).unwrap_err().to_string();
        assert_eq!(state_bits(&optimizer), before);
        assert!(error.contains(name), "{error}");
        error
    };
    let bytes = |byte: u8, len: usize| Tensor::full(byte, len, &device()).unwrap();
    assert!(refused("bias.exp_avg", Some(bytes(0xFF, 13))).contains("other than NaN"));
    assert!(refused("bias.exp_avg", Some(bytes(0x7F, 13))).contains("other than NaN"));
    assert!(refused("bias.exp_avg_sq", Some(bytes(0x81, 13))).contains("from 0 to 448"));
    assert!(refused("bias.exp_avg.curve", Some(bytes(4, 1))).contains("at most 3"));
    let amax = |x: f32| Some(Tensor::new(&[x], &device()).unwrap());
    refused("bias.exp_avg.amax", amax(-1.));
    refused("bias.exp_avg.amax", amax(f32::NAN));
    refused("bias.exp_avg.amax", None);
    refused("bias.exp_avg.curve", None);
    refused("bias.exp_avg", None);
}

#[test]
fn momentum_of_sgd_is_kept_in_fp8_too() {
    let all = vars(DType::F32);
    let config = SgdConfig::default().with_lr(0.1).with_momentum(0.9);
    let config = config.with_moments(storage((true, true)));
    let mut optimizer = Sgd::from_named(all.clone(), config.clone()).unwrap();
    for step in 0..3 {
        let _ = optimizer.apply(&grads(&all, step, 1.0)).unwrap();
    }
    let saved = optimizer.optimizer_state().unwrap();
    let resumed = copies(&all);
    let mut other = Sgd::from_named(resumed.clone(), config).unwrap();
    other.load_optimizer_state(&saved).unwrap();
    for step in 3..6 {
        let _ = optimizer.apply(&grads(&all, step, 1.0)).unwrap();
        let _ = other.apply(&grads(&resumed, step, 1.0)).unwrap();
    }
    assert_eq!(all_bits(&all), all_bits(&resumed));
}

#[test]
fn optimizers_of_parts_refuse_them() {
    let group = fp8_ranks::ProcessGroup::single();
    let map = fp8_ranks::ShardedVarMap::new(&group, &Device::Cpu);
    let error = AdamW::from_sharded(&map, adamw(storage((true, true)))).err();
    assert!(
        matches!(error, Some(OptimError::ShardedMoments)),
        "{error:?}"
    );
    // Nor later, where there is a part.
    let init = candle_nn::Init::Const(1.);
    let vb = map.var_builder();
    vb.get_with_hints((4, 8), "w", init).unwrap();
    map.get("w").unwrap().claim();
    let mut optimizer = AdamW::from_sharded(&map, adamw(MomentStorage::F32)).unwrap();
    let error = optimizer.set_config(adamw(storage((true, true)))).err();
    assert!(
        matches!(error, Some(OptimError::ShardedMoments)),
        "{error:?}"
    );
    assert_eq!(optimizer.config().moments, MomentStorage::F32);
}

/// Least squares: the loss of each storage after the same steps, and the loss with moments in f32.
fn losses(moments: &[MomentStorage]) -> Vec<f64> {
    let values = |seed: u64, len: usize| -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..len).map(|_| next()).collect()
    };
    let tensor = |seed, (a, b): (usize, usize)| {
        Tensor::from_vec(values(seed, a * b), (a, b), &Device::Cpu).unwrap()
    };
    let target = tensor(1, (64, 256));
    let run = |moments: &MomentStorage| {
        let w = Var::from_tensor(&tensor(2, (64, 256))).unwrap();
        let config = AdamWConfig {
            lr: 1e-2,
            weight_decay: 0.,
            moments: *moments,
            ..AdamWConfig::default()
        };
        let mut optimizer = AdamW::from_named(vec![("w".into(), w.clone())], config).unwrap();
        let mut last = 0.;
        for step in 0..300 {
            let x = tensor(10 + step, (256, 32));
            let wrong = w.sub(&target).unwrap().matmul(&x).unwrap();
            let loss = wrong.sqr().unwrap().mean_all().unwrap();
            last = f64::from(loss.to_scalar::<f32>().unwrap());
            let _ = optimizer.apply(&loss.backward().unwrap()).unwrap();
        }
        last
    };
    moments.iter().map(run).collect()
}

#[test]
fn training_comes_as_far_as_with_f32() {
    let all = [MomentStorage::F32].into_iter().chain(CHOICES.map(storage));
    let found = losses(&all.collect::<Vec<_>>());
    // With a curve for each block the codes are closer to the values.
    for (loss, bound) in found[1..].iter().zip([1.05, 1.05, 1.3, 1.5]) {
        assert!(*loss < bound * found[0], "{found:?}");
    }
}
