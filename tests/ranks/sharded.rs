//! Parameters in parts: N ranks give what N ranks with whole parameters give, to the bit.

use crate::sharding::{Sharded, on_parts};
use crate::training::{adamw, loss_of, micro_batch, numbers_of_ranks, on_ranks, recipes};
use candle_core::{DType, Device, Module, Tensor};
use fp8::checkpoint::{TrainingMeta, save_fp8_state, save_training};
use fp8::nn;
use fp8::optim::{AdamW, DataParallelOptions, DynamicLossScaler, OptimError, Sgd, SgdConfig};
use fp8::ranks::{BLOCK, Operation, ProcessGroup, ShardedVarMap, threads};
use std::collections::BTreeMap;

/// Scales that depend on earlier steps take more of them to be tested.
fn steps(recipe: Option<&str>) -> usize {
    if recipe == Some("delayed") { 8 } else { 3 }
}

#[test]
fn parts_equal_whole_parameters_to_the_bit() {
    for recipe in recipes() {
        for &ranks in numbers_of_ranks(recipe) {
            let whole = threads::run(ranks, |group| {
                on_ranks(
                    &group,
                    recipe,
                    steps(recipe),
                    DataParallelOptions::default(),
                )
                .unwrap()
            });
            let parts = threads::run(ranks, |group| {
                let parsed = recipe.map(|name| name.parse().unwrap());
                on_parts(&group, parsed, steps(recipe)).unwrap()
            });
            for (rank, (whole, parts)) in whole.into_iter().zip(parts).enumerate() {
                let case = format!("{recipe:?}, rank {rank} of {ranks}");
                assert_eq!(whole.0, parts.0, "{case}: losses");
                if rank > 0 {
                    continue;
                }
                // Draws of all ranks are counted in both.
                let names = |state: &BTreeMap<String, Vec<u8>>| state.keys().cloned().collect();
                let [expected, got]: [Vec<String>; 2] = [names(&whole.1), names(&parts.1)];
                assert_eq!(expected, got, "{case}");
                for (name, got) in &parts.1 {
                    assert!(whole.1.get(name) == Some(got), "{case}: {name}");
                }
            }
        }
    }
}

/// Clipping, weight decay of matrices and momentum of another optimizer, for a parameter that lies on all ranks.
#[test]
fn steps_of_sgd_equal_those_of_one_process() {
    let config = || {
        SgdConfig::default()
            .with_lr(0.1)
            .with_momentum(0.9)
            .with_max_grad_norm(0.5)
    };
    let shapes = [
        ("a", vec![7, 3 * BLOCK]),
        ("b", vec![3]),
        ("c", vec![2, BLOCK / 2]),
    ];
    let value = |shape: &[usize], seed: usize| -> Tensor {
        let count: usize = shape.iter().product();
        let values = (0..count).map(|i| ((i * 31 + seed * 17) as f32 * 0.37).sin());
        Tensor::from_iter(values, &Device::Cpu)
            .unwrap()
            .reshape(shape)
            .unwrap()
    };
    let run = |group: &ProcessGroup| {
        let map = ShardedVarMap::new(group, &Device::Cpu);
        for (seed, (name, shape)) in shapes.iter().enumerate() {
            let init = candle_nn::Init::Const(0.);
            let vb = map.var_builder();
            vb.get_with_hints(shape.as_slice(), name, init).unwrap();
            let var = map.get(name).unwrap();
            var.claim();
            var.set(&value(shape, seed)).unwrap();
        }
        let mut optimizer = Sgd::from_sharded(&map, config()).unwrap();
        let mut norms = vec![];
        for step in 0..3 {
            let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap();
            for (seed, var) in map.vars().iter().enumerate() {
                let x = value(var.dims(), seed + 3 * step + 5);
                let term = (var.value().unwrap() * x).unwrap().sum_all().unwrap();
                loss = (loss + term).unwrap();
            }
            let report = optimizer.apply(&fp8::backward(&loss).unwrap()).unwrap();
            norms.push(report.grad_norm().unwrap().to_bits());
        }
        let vars = map.vars().into_iter();
        let values = vars.map(|var| {
            let whole = var.gather().unwrap().flatten_all().unwrap();
            whole.to_vec1::<f32>().unwrap()
        });
        (norms, values.collect::<Vec<_>>())
    };
    let alone = run(&ProcessGroup::single());
    for ranks in [2, 4] {
        // The mean of equal gradients is the gradient.
        for (rank, got) in threads::run(ranks, |group| run(&group))
            .into_iter()
            .enumerate()
        {
            assert!(got == alone, "rank {rank} of {ranks}");
        }
    }
}

/// Two gathers and one scatter of a weight in a step, also where the forward pass is computed again.
#[test]
fn weights_are_gathered_twice() {
    let x = Tensor::from_iter((0..4 * 128).map(|i| (i as f32).cos()), &Device::Cpu);
    let x = x.unwrap().reshape((4, 128)).unwrap();
    for recipe in [None, Some("delayed"), Some("rowwise"), Some("direct")] {
        let run = |again: bool| {
            threads::run(2, |group| {
                let map = ShardedVarMap::new(&group, &Device::Cpu);
                let vb = map.var_builder();
                let first = nn::linear_no_bias(128, 256, vb.pp("a")).unwrap();
                let second = nn::linear_no_bias(256, 128, vb.pp("b")).unwrap();
                for (seed, var) in map.vars().iter().enumerate() {
                    let count = var.dims().iter().product::<usize>();
                    let values = (0..count).map(|i| ((i + seed) as f32 * 0.7).sin() * 0.1);
                    let values = Tensor::from_iter(values, &Device::Cpu).unwrap();
                    var.set(&values.reshape(var.dims()).unwrap()).unwrap();
                }
                fp8::prepare_fp8(&first, &Default::default()).unwrap();
                fp8::prepare_fp8(&second, &Default::default()).unwrap();
                group.reset_traffic();
                let x = candle_core::Var::from_tensor(&x).unwrap();
                let guard = recipe.map(|recipe: &str| {
                    let recipe: fp8::Recipe = recipe.parse().unwrap();
                    let autocast = fp8::Autocast::new(recipe);
                    let group = std::sync::Arc::new(group.clone());
                    fp8::fp8_autocast(autocast.reduction_group(group)).unwrap()
                });
                let y = match again {
                    false => second.forward(&first.forward(&x).unwrap()).unwrap(),
                    true => {
                        let both = move |x: &Tensor| second.forward(&first.forward(x)?);
                        nn::checkpoint(both, &x).unwrap()
                    }
                };
                let grads = fp8::backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap();
                if let Some(guard) = guard {
                    guard.close().unwrap();
                }
                let traffic = group.traffic();
                let calls = [Operation::AllGather, Operation::ReduceScatter];
                let calls = calls.map(|operation| traffic.of(operation).calls);
                let grads = map.vars().into_iter().map(|var| {
                    let grad = grads.get(var.shard()).unwrap();
                    grad.to_vec1::<f32>().unwrap()
                });
                (calls, grads.collect::<Vec<_>>())
            })
        };
        let (once, again) = (run(false), run(true));
        assert_eq!((once[0].0, again[0].0), ([4, 2], [4, 2]), "{recipe:?}");
        assert!(once == again, "{recipe:?}");
    }
}

#[test]
fn parameters_that_no_layer_gathers_are_named() {
    let errors = threads::run(2, |group| {
        let map = ShardedVarMap::new(&group, &Device::Cpu);
        let vb = map.var_builder();
        let known = nn::linear(8, 4, vb.pp("known")).unwrap();
        let unknown = candle_nn::linear(8, 4, vb.pp("unknown")).unwrap();
        let x = Tensor::ones((2, 8), DType::F32, &Device::Cpu).unwrap();
        let known = known.forward(&x).unwrap().sum_all().unwrap();
        assert!(known.to_scalar::<f32>().unwrap().is_finite());
        // Loudly.
        let unknown = unknown.forward(&x).unwrap().sum_all().unwrap();
        assert!(unknown.to_scalar::<f32>().unwrap().is_nan());
        AdamW::from_sharded(&map, adamw()).unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains(r#"["unknown.bias", "unknown.weight"]"#),
            "{error}"
        );
    }
}

#[test]
fn other_models_on_other_ranks_are_noticed() {
    let errors = threads::run(2, |group| {
        let map = ShardedVarMap::new(&group, &Device::Cpu);
        let path = ["left", "right"][group.rank()];
        let _layer = nn::linear(8, 4, map.var_builder().pp(path)).unwrap();
        AdamW::from_sharded(&map, adamw()).unwrap_err().to_string()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(error.contains("left"), "rank {rank}: {error}");
        assert!(error.contains("right"), "rank {rank}: {error}");
    }
}

/// Tensors of one size fit each other: only the hash of what was gathered shows it.
#[test]
fn layers_in_another_order_are_noticed() {
    let errors = threads::run(2, |group| {
        let map = ShardedVarMap::new(&group, &Device::Cpu);
        let vb = map.var_builder();
        let [a, b] = ["a", "b"].map(|path| nn::linear_no_bias(256, 256, vb.pp(path)).unwrap());
        let mut optimizer = AdamW::from_sharded(&map, adamw()).unwrap();
        let x = Tensor::ones((2, 256), DType::F32, &Device::Cpu).unwrap();
        let y = match group.rank() {
            0 => b.forward(&a.forward(&x).unwrap()),
            _ => a.forward(&b.forward(&x).unwrap()),
        };
        let grads = fp8::backward(&y.unwrap().sum_all().unwrap()).unwrap();
        optimizer.apply(&grads).unwrap_err()
    });
    for error in errors {
        assert!(
            matches!(error, OptimError::RanksDiverged { other: 1, .. }),
            "{error}"
        );
    }
}

/// A gradient that is not finite on one rank makes all ranks skip the step.
#[test]
fn all_ranks_skip_the_step_of_one() {
    let states = threads::run(2, |group| {
        let mut training = Sharded::new(&group, Some("delayed".parse().unwrap())).unwrap();
        let mut skipped = vec![];
        for step in 0..3 {
            let recipe = training.recipe.clone().unwrap();
            let autocast = fp8::Autocast::new(recipe);
            let own = std::sync::Arc::new(group.clone());
            let guard = fp8::fp8_autocast(autocast.reduction_group(own)).unwrap();
            let tokens = micro_batch(step, group.rank()).unwrap();
            let loss = loss_of(&training.gpt, &tokens).unwrap();
            let factor = match (step, group.rank()) {
                (1, 1) => f64::INFINITY,
                _ => 1.,
            };
            let grads = fp8::backward(&(loss * factor).unwrap()).unwrap();
            guard.close().unwrap();
            let report = training.optimizer.apply(&grads).unwrap();
            skipped.push(report.skipped().unwrap());
        }
        skipped
    });
    assert_eq!(states, [[false, true, false], [false, true, false]]);
}

/// So does a loss scaler, on whose rank alone all gradients are finite.
#[test]
fn loss_scales_of_all_ranks_back_off_together() {
    let scales = threads::run(2, |group| {
        let mut training = Sharded::new(&group, None).unwrap();
        let mut scaler = DynamicLossScaler::default();
        let mut seen = vec![];
        for step in 0..3 {
            let tokens = micro_batch(step, group.rank()).unwrap();
            let loss = loss_of(&training.gpt, &tokens).unwrap();
            let mut grads = fp8::backward(&scaler.scaled(&loss).unwrap()).unwrap();
            // In one parameter, which lies on one rank.
            let bias = training.map.get("norm.bias").unwrap();
            if step == 1 && bias.shard().elem_count() > 0 {
                let grad = grads.get(bias.shard()).unwrap() * f64::NAN;
                grads.insert(bias.shard(), grad.unwrap());
            }
            let step = scaler.apply(&mut grads, &mut training.optimizer).unwrap();
            seen.push((step.skipped(), scaler.loss_scale()));
        }
        seen
    });
    assert_eq!(scales[0], scales[1]);
    let skipped = scales[0].iter().map(|(skipped, _)| *skipped);
    assert_eq!(skipped.collect::<Vec<_>>(), [false, true, false]);
}

#[test]
fn functions_for_whole_parameters_refuse_parts() {
    threads::run(2, |group| {
        let training = Sharded::new(&group, None).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.safetensors");
        let error = save_fp8_state(&path, &training.gpt)
            .unwrap_err()
            .to_string();
        assert!(error.contains("save_sharded"), "{error}");
        let vars = candle_nn::VarMap::new();
        let meta: TrainingMeta = training.meta();
        let saved = save_training(&path, &training.gpt, &vars, &training.optimizer, &meta);
        let error = saved.unwrap_err().to_string();
        assert!(error.contains("`embed.weight` lies in parts"), "{error}");
        assert!(!path.exists());
    });
}
