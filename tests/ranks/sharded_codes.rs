//! Weights in parts that travel as FP8 codes: the same bits as in f32, in a quarter of the bytes.

use crate::sharding::{Sharded, on_parts};
use crate::training::numbers_of_ranks;
use candle_core::{DType, Device, Tensor};
use fp8::config::Fp8LinearConfig;
use fp8::nn::{self, Embedding, Linear};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::ranks::{
    Operation, ProcessGroup, ShardedVarMap, precompute_float8_dynamic_scale_for_fsdp, threads,
};
use fp8::{Autocast, LayerError, PrepareOptions, Recipe, RecipeName, fp8_autocast, prepare_fp8};
use std::sync::Arc;

const STEPS: usize = 8;

/// A named recipe, whose weights in parts travel as codes.
fn with_codes(name: &str, on: bool) -> Recipe {
    let name: RecipeName = name.parse().unwrap();
    let config = Fp8LinearConfig::from_recipe_name(name);
    config.with_enable_fp8_all_gather(on).into()
}

#[test]
fn codes_equal_values_to_the_bit() {
    let powers_of_two = |on| {
        let config = Fp8LinearConfig::default().with_round_scales_to_power_of_two(true);
        Recipe::from(config.with_enable_fp8_all_gather(on))
    };
    let recipes: [(&str, &(dyn Fn(bool) -> Recipe + Sync)); 4] = [
        ("delayed", &|on| with_codes("delayed", on)),
        ("tensorwise", &|on| with_codes("tensorwise", on)),
        ("current", &|on| with_codes("current", on)),
        ("powers of two", &powers_of_two),
    ];
    for (name, recipe) in recipes {
        for &ranks in numbers_of_ranks(Some(name)) {
            let run = |codes| {
                threads::run(ranks, |group| {
                    on_parts(&group, Some(recipe(codes)), STEPS).unwrap()
                })
            };
            for (rank, (values, codes)) in run(false).into_iter().zip(run(true)).enumerate() {
                let case = format!("{name}, rank {rank} of {ranks}");
                assert_eq!(values.0, codes.0, "{case}: losses");
                assert_eq!(values.1.len(), codes.1.len(), "{case}");
                for (name, got) in &codes.1 {
                    assert!(values.1.get(name) == Some(got), "{case}: {name}");
                }
            }
        }
    }
}

/// Scales for rows, blocks or stochastic rounding are of no use for parts: these weights travel in f32.
#[test]
fn weights_with_several_scales_travel_in_f32() {
    for name in ["rowwise", "blockwise", "mxfp8"] {
        let run = |codes| {
            threads::run(2, |group| {
                let (losses, _) = on_parts(&group, Some(with_codes(name, codes)), 3).unwrap();
                (losses, group.traffic().of(Operation::AllGather).bytes)
            })
        };
        assert_eq!(run(false), run(true), "{name}");
    }
}

/// The bytes of a step of each rank: (gathered, in all), after some steps.
fn bytes(ranks: usize, recipe: &str, codes: bool) -> (u64, u64) {
    let sent = threads::run(ranks, |group| {
        let mut training = Sharded::new(&group, Some(with_codes(recipe, codes))).unwrap();
        for step in 0..2 {
            training.step(step).unwrap();
            precompute_float8_dynamic_scale_for_fsdp(&training.map).unwrap();
        }
        group.reset_traffic();
        training.step(2).unwrap();
        precompute_float8_dynamic_scale_for_fsdp(&training.map).unwrap();
        let traffic = group.traffic();
        let gathered = traffic.of(Operation::AllGather).bytes;
        (gathered, traffic.total().bytes)
    });
    let sum = |all: &dyn Fn(&(u64, u64)) -> u64| sent.iter().map(all).sum();
    (sum(&|sent| sent.0), sum(&|sent| sent.1))
}

#[test]
fn codes_are_a_quarter_of_the_bytes() {
    let elements = |group: &ProcessGroup, of: &dyn Fn(&[usize]) -> bool| -> u64 {
        let training = Sharded::new(group, Some(with_codes("tensorwise", true))).unwrap();
        let vars = training.map.vars().into_iter();
        let vars = vars.filter(|var| of(var.dims()) && var.name() != "embed.weight");
        vars.map(|var| var.dims().iter().product::<usize>() as u64)
            .sum()
    };
    for ranks in [2, 4] {
        let weights = threads::run(ranks, |group| elements(&group, &|dims| dims.len() == 2))[0];
        for recipe in ["delayed", "tensorwise", "current"] {
            let (values, values_step) = bytes(ranks, recipe, false);
            let (codes, codes_step) = bytes(ranks, recipe, true);
            // Forward and backward; everything but these weights costs the same.
            let others = ranks as u64 - 1;
            assert_eq!(
                values - codes,
                others * 2 * 3 * weights,
                "{recipe} on {ranks}"
            );
            let share = codes_step as f64 / values_step as f64;
            println!("{recipe} on {ranks}: gathers {codes} of {values}, step {share:.4}");
            assert!(share <= 0.52, "{recipe} on {ranks}: {share}");
        }
    }
}

/// Weights whose scales are made from themselves: one reduction for all, instead of one for each.
#[test]
fn amaxes_of_all_weights_are_reduced_at_once() {
    let weights = 2 * 6 + 1;
    for (recipe, precomputes, expected) in [
        ("tensorwise", true, 1),
        ("tensorwise", false, weights),
        ("current", true, 1),
        // The guard's for the table.
        ("delayed", true, 2),
    ] {
        let calls = threads::run(2, |group| {
            let mut training = Sharded::new(&group, Some(with_codes(recipe, true))).unwrap();
            let mut calls = 0;
            for step in 0..3 {
                group.reset_traffic();
                training.step(step).unwrap();
                if precomputes {
                    precompute_float8_dynamic_scale_for_fsdp(&training.map).unwrap();
                }
                calls = group.traffic().of(Operation::AllReduceMax).calls;
            }
            calls
        });
        assert_eq!(calls, [expected; 2], "{recipe}, {precomputes}");
    }
}

#[test]
fn scales_of_changed_weights_are_refused() {
    let errors = threads::Threads::new(2).run(|group| {
        let mut training = Sharded::new(&group, Some(with_codes("tensorwise", true))).unwrap();
        training.step(0).unwrap();
        assert_eq!(
            precompute_float8_dynamic_scale_for_fsdp(&training.map).unwrap(),
            13
        );
        for (_, var) in training.map.shards() {
            var.set(&var.as_detached_tensor().affine(2., 0.).unwrap())
                .unwrap();
        }
        training.step(1).unwrap_err().to_string()
    });
    for error in errors {
        let error = error.unwrap();
        assert!(
            error.contains("has changed since precompute_float8_dynamic_scale_for_fsdp"),
            "{error}"
        );
    }
}

#[test]
fn the_option_without_weights_in_parts_is_an_error() {
    let weight = Tensor::ones((8, 16), DType::F32, &Device::Cpu).unwrap();
    let layer = Linear::new(weight, None).with_path("fc");
    prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
    let x = Tensor::ones((4, 16), DType::F32, &Device::Cpu).unwrap();
    let recipe = with_codes("tensorwise", true);
    let run = |training| {
        let guard = fp8_autocast(Autocast::new(recipe.clone()).training(training)).unwrap();
        let y = layer.try_forward(&x);
        guard.abort();
        y
    };
    let error = run(true).unwrap_err().to_string();
    assert!(
        error.contains("`fc`") && error.contains("enable_fp8_all_gather"),
        "{error}"
    );
    assert!(error.contains("enable_fsdp_float8_all_gather"), "{error}");
    // A checkpoint of such a run is evaluated anywhere.
    run(false).unwrap();
}

/// Table and head are one parameter.
struct Tied {
    map: ShardedVarMap,
    table: Embedding,
    head: Linear,
}

fn tied(group: &ProcessGroup) -> Tied {
    let map = ShardedVarMap::new(group, &Device::Cpu);
    let init = candle_nn::Init::Const(0.5);
    let table = map.var_builder().get_with_hints((16, 32), "wte", init);
    let table = table.unwrap();
    let head = Linear::new(table.clone(), None).with_path("head");
    let table = Embedding::new(table, 32).with_path("wte");
    Tied { map, table, head }
}

fn tied_loss(model: &Tied) -> fp8::Result<Tensor> {
    let tokens = Tensor::new(&[1u32, 3, 3], &Device::Cpu)?;
    let x: Tensor = model.table.lookup(&tokens)?;
    Ok(model.head.try_forward(&x)?.sum_all()?)
}

#[test]
fn tied_weights_travel_in_f32_only() {
    let results = threads::run(2, |group| {
        let model = tied(&group);
        let mut optimizer = AdamW::from_sharded(&model.map, AdamWConfig::default()).unwrap();
        let grads = fp8::backward(&tied_loss(&model).unwrap()).unwrap();
        let wte = model.map.get("wte").unwrap();
        let own = grads.get(wte.shard()).cloned().unwrap_or_else(|| {
            Tensor::zeros(wte.shard().dims(), DType::F32, &Device::Cpu).unwrap()
        });
        let whole = wte.gather_like(&own).unwrap().to_vec2::<f32>().unwrap();
        optimizer.apply(&grads).unwrap();
        prepare_fp8(&model.head, &PrepareOptions::default()).unwrap();
        let recipe = Autocast::new(with_codes("tensorwise", true));
        let guard = fp8_autocast(recipe.reduction_group(Arc::new(group))).unwrap();
        let error = tied_loss(&model).unwrap_err().to_string();
        guard.abort();
        (whole, error)
    });
    for (whole, error) in results {
        // As head: the sum of three rows of 0.5; as table: 16 outputs of 0.5, once or twice.
        assert_eq!([whole[0][0], whole[1][5], whole[3][31]], [1.5, 9.5, 17.5]);
        assert!(error.contains("`wte` belongs to 2 layers"), "{error}");
    }
}

/// Without the group each rank makes scales from its own batches: ranks would read each other's codes wrongly.
#[test]
fn guards_without_the_group_are_refused() {
    let errors = threads::run(2, |group| {
        let map = ShardedVarMap::new(&group, &Device::Cpu);
        let fc = nn::linear(16, 8, map.var_builder().pp("fc")).unwrap();
        prepare_fp8(&fc, &PrepareOptions::default()).unwrap();
        let x = Tensor::ones((4, 16), DType::F32, &Device::Cpu).unwrap();
        let alone = |training| {
            let autocast = Autocast::new(with_codes("delayed", true));
            let guard = fp8_autocast(autocast.training(training)).unwrap();
            let y = fc.try_forward(&x);
            guard.abort();
            y
        };
        let error = alone(true).unwrap_err();
        // Evaluation makes no scales.
        alone(false).unwrap();
        error
    });
    for error in errors {
        let fp8::Error::Layer(LayerError::UnreducedCodes {
            path,
            ranks,
            reducing,
        }) = &error
        else {
            panic!("{error}");
        };
        assert_eq!((path.as_str(), *ranks, *reducing), ("fc", 2, 1));
    }
}

/// Codes with scales of their own need no group of the guard.
#[test]
fn guards_without_the_group_are_enough_for_other_scales() {
    let losses = threads::run(2, |group| {
        let mut training = Sharded::new(&group, Some(with_codes("tensorwise", true))).unwrap();
        training.in_group = false;
        training.step(0).unwrap()
    });
    assert!(losses.iter().all(|loss| loss.is_finite()));
}

/// As many ranks are not the same ranks.
#[test]
fn guards_with_another_group_of_the_same_size_are_refused() {
    let results = threads::run(4, |group| {
        let (rank, x) = (
            group.rank(),
            Tensor::ones((4, 16), DType::F32, &Device::Cpu).unwrap(),
        );
        let split = |color, name| group.split(Some(color), rank, name).unwrap().unwrap();
        let (rows, cols) = (split(rank / 2, "rows"), split(rank % 2, "cols"));
        let map = ShardedVarMap::new(&rows, &Device::Cpu);
        let fc = nn::linear(16, 8, map.var_builder().pp("fc")).unwrap();
        prepare_fp8(&fc, &PrepareOptions::default()).unwrap();
        // Refused before anything is exchanged.
        let autocast = Autocast::new(with_codes("delayed", true));
        let guard = fp8_autocast(autocast.reduction_group(Arc::new(cols.clone()))).unwrap();
        let refused = fc.try_forward(&x).unwrap_err();
        guard.abort();
        let contained = |other: &ProcessGroup| rows.is_within(other);
        (refused, [&rows, &group, &cols].map(contained))
    });
    for (error, contained) in results {
        let fp8::Error::Layer(LayerError::UnreducedCodes {
            ranks, reducing, ..
        }) = &error
        else {
            panic!("{error}");
        };
        assert_eq!((*ranks, *reducing), (2, 2));
        assert_eq!(contained, [true, true, false]);
    }
}

/// The guard's group may have more ranks than hold a weight.
#[test]
fn guards_of_the_whole_job_are_enough() {
    let finite = threads::run(4, |group| {
        let half = group.split(Some(group.rank() / 2), group.rank(), "half");
        let map = ShardedVarMap::new(&half.unwrap().unwrap(), &Device::Cpu);
        let fc = nn::linear(16, 8, map.var_builder().pp("fc")).unwrap();
        prepare_fp8(&fc, &PrepareOptions::default()).unwrap();
        let x = Tensor::ones((4, 16), DType::F32, &Device::Cpu).unwrap();
        let autocast = Autocast::new(with_codes("delayed", true));
        let guard = fp8_autocast(autocast.reduction_group(Arc::new(group))).unwrap();
        let y = fc.try_forward(&x).unwrap().sum_all().unwrap();
        guard.close().unwrap();
        y.to_scalar::<f32>().unwrap().is_finite()
    });
    assert_eq!(finite, [true; 4]);
}
