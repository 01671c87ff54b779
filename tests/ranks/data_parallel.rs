//! Ranks that share a batch: N of them give what one process gives with N micro-batches, to the bit.

use crate::training::{State, Training, numbers_of_ranks, on_ranks, recipes};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, VarBuilder, VarMap};
use fp8::fp8_candle::wide::node;
use fp8::optim::{
    AdamW, AdamWConfig, DataParallel, DataParallelOptions, GradientTravel, OptimError,
};
use fp8::ranks::threads;
use fp8::{PrepareOptions, RecipeName, fp8_autocast, prepare_fp8};
use fp8_test_support::tensor;

/// Scales that depend on earlier steps take more of them to be tested.
fn steps(recipe: Option<&str>) -> usize {
    if recipe == Some("delayed") { 8 } else { 4 }
}

/// The losses by rank, and the state.
fn alone(recipe: Option<&str>, ranks: usize) -> (Vec<Vec<f32>>, State) {
    let mut training = Training::new(recipe).unwrap();
    let mut losses = vec![vec![]; ranks];
    for step in 0..steps(recipe) {
        let all = training.step_of_one(step, ranks).unwrap();
        for (losses, loss) in losses.iter_mut().zip(all) {
            losses.push(loss);
        }
    }
    (losses, training.state().unwrap())
}

#[test]
fn ranks_equal_micro_batches_to_the_bit() {
    for recipe in recipes() {
        for &ranks in numbers_of_ranks(recipe) {
            let (losses, state) = alone(recipe, ranks);
            let options = DataParallelOptions::default();
            let all = threads::run(ranks, |group| {
                on_ranks(&group, recipe, steps(recipe), options.clone()).unwrap()
            });
            for (rank, (own, own_state)) in all.into_iter().enumerate() {
                let case = format!("{recipe:?}, rank {rank} of {ranks}");
                assert_eq!(own, losses[rank], "{case}: losses");
                for ((name, expected), (own_name, got)) in state.iter().zip(&own_state) {
                    assert_eq!(name, own_name, "{case}");
                    // A rank draws for its own micro-batch only.
                    if !name.contains("non_finite") {
                        assert!(got == expected, "{case}: {name}");
                    }
                }
                assert_eq!(own_state.len(), state.len(), "{case}");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_buckets_and_overlap() {
    let run = |options: DataParallelOptions| {
        threads::run(3, |group| {
            on_ranks(&group, Some("delayed"), 5, options.clone()).unwrap()
        })
    };
    let options = DataParallelOptions::default();
    let expected = run(options.clone());
    for bucket_bytes in [1, 10_000, usize::MAX] {
        for overlap in [true, false] {
            let options = (options.clone())
                .with_bucket_bytes(bucket_bytes)
                .with_overlap(overlap);
            assert!(run(options.clone()) == expected, "{options:?}");
        }
    }
}

/// A variable that a rank does not reach counts as zeros there; one that no rank reaches has no gradient.
#[test]
fn variables_without_gradient() {
    let grads = threads::run(2, |group| {
        let vars = VarMap::new();
        let get = |name| {
            vars.get(
                2,
                name,
                candle_nn::Init::Const(3.),
                DType::F32,
                &Device::Cpu,
            )
        };
        let [a, b, c] = ["a", "b", "c"].map(|name| get(name).unwrap());
        let mut parallel =
            DataParallel::new(&group, &vars, DataParallelOptions::default()).unwrap();
        let mut all = vec![];
        for _ in 0..2 {
            let loss = match group.rank() {
                0 => a.sum_all().unwrap(),
                _ => (&a * 3.).unwrap().add(&b).unwrap().sum_all().unwrap(),
            };
            let grads = parallel.backward(&loss).unwrap();
            let of = |x: &Tensor| grads.get(x).map(|grad| grad.to_vec1::<f32>().unwrap());
            all.push([of(&a), of(&b), of(&c)]);
        }
        all
    });
    let expected = [Some(vec![2., 2.]), Some(vec![0.5, 0.5]), None];
    for all in grads {
        assert_eq!(all, [expected.clone(), expected.clone()]);
    }
}

#[test]
fn all_ranks_begin_with_the_values_of_the_first() {
    let values = threads::run(3, |group| {
        let vars = VarMap::new();
        let var = Var::new(&[group.rank() as f32, 1.], &Device::Cpu).unwrap();
        vars.data().lock().unwrap().insert("w".into(), var.clone());
        DataParallel::new(&group, &vars, DataParallelOptions::default()).unwrap();
        var.to_vec1::<f32>().unwrap()
    });
    assert_eq!(values, [[0., 1.], [0., 1.], [0., 1.]]);
}

#[test]
fn ranks_may_begin_with_values_of_their_own() {
    let values = threads::run(2, |group| {
        let vars = VarMap::new();
        let var = Var::new(&[group.rank() as f32, 1.], &Device::Cpu).unwrap();
        vars.data().lock().unwrap().insert("w".into(), var.clone());
        let options = DataParallelOptions::default().with_broadcast_values(false);
        DataParallel::new(&group, &vars, options).unwrap();
        var.to_vec1::<f32>().unwrap()
    });
    assert_eq!(values, [[0., 1.], [1., 1.]]);
}

/// `x` times 3, in one node that tells of gradients while the backward pass runs.
fn tripled(x: &Tensor) -> Tensor {
    let result = (x.detach() * 3.).unwrap();
    node("tripled", x, &result, |grad| Ok((grad * 3.)?)).unwrap()
}

/// In the second step another node uses the parameter too, or an operation of candle, of whose gradient only the end of the pass tells.
#[test]
fn late_gradients_are_errors_only_where_gradients_leave_early() {
    let run = |overlap: bool, by_node: bool| {
        threads::run(2, |group| {
            let vars = VarMap::new();
            let init = candle_nn::Init::Const(1.);
            let w = vars.get(2, "w", init, DType::F32, &Device::Cpu).unwrap();
            let options = DataParallelOptions::default().with_overlap(overlap);
            let mut parallel = DataParallel::new(&group, &vars, options).unwrap();
            let factor = group.rank() as f64 + 1.;
            let once = (tripled(&w) * factor).unwrap().sum_all().unwrap();
            parallel.backward(&once).unwrap();
            let more = match by_node {
                true => tripled(&w),
                false => (&w * 2.).unwrap(),
            };
            let both = (tripled(&w) + more).unwrap();
            let both = (both * factor).unwrap().sum_all().unwrap();
            let grads = parallel.backward(&both)?;
            Ok::<_, OptimError>(grads.get(&w).unwrap().to_vec1::<f32>().unwrap())
        })
    };
    for by_node in [true, false] {
        for result in run(true, by_node) {
            assert!(
                matches!(&result, Err(OptimError::LateGradient { name }) if name == "w"),
                "{by_node}: {result:?}"
            );
        }
        let mean = if by_node { 9. } else { 7.5 };
        for result in run(false, by_node) {
            assert_eq!(result.unwrap(), [mean; 2]);
        }
    }
}

#[test]
fn ranks_with_other_variables_get_an_error() {
    let errors = threads::run(3, |group| {
        let vars = VarMap::new();
        let name = ["w", "w", "v"][group.rank()];
        let shape = [2, 2, 3][group.rank()];
        let init = candle_nn::Init::Const(1.);
        vars.get(shape, name, init, DType::F32, &Device::Cpu)
            .unwrap();
        DataParallel::new(&group, &vars, DataParallelOptions::default()).unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(
            matches!(error, OptimError::OtherVariables { .. }),
            "{rank}: {error}"
        );
    }
    assert!(
        errors[2].to_string().contains("v: F32 [3]"),
        "{}",
        errors[2]
    );
    assert!(
        errors[2].to_string().contains("w: F32 [2]"),
        "{}",
        errors[2]
    );
}

/// A gradient that is not finite on one rank makes all ranks skip the step.
#[test]
fn all_ranks_skip_the_step_of_one() {
    let skipped = threads::run(2, |group| {
        let vars = VarMap::new();
        let init = candle_nn::Init::Const(1.);
        let w = vars.get(2, "w", init, DType::F32, &Device::Cpu).unwrap();
        let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
        let mut parallel =
            DataParallel::new(&group, &vars, DataParallelOptions::default()).unwrap();
        let mut skipped = vec![];
        for factor in [1., if group.rank() == 0 { f64::INFINITY } else { 1. }, 1.] {
            let loss = (&w * factor).unwrap().sum_all().unwrap();
            let grads = parallel.backward(&loss).unwrap();
            skipped.push(optimizer.apply(&grads).unwrap().skipped().unwrap());
        }
        (skipped, w.to_vec1::<f32>().unwrap())
    });
    assert_eq!(skipped[0].0, [false, true, false]);
    assert_eq!(skipped[0], skipped[1]);
}

/// So does a cast that saturated on one rank, which leaves gradients finite.
#[test]
fn all_ranks_skip_the_step_of_a_cast_of_one() {
    let skipped = threads::run(2, |group| {
        let vars = VarMap::new();
        let init = candle_nn::Init::Const(0.01);
        let w = vars.get((64, 64), "fc.weight", init, DType::F32, &Device::Cpu);
        let w = w.unwrap();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let layer = fp8::nn::linear_no_bias(64, 64, vb.pp("fc")).unwrap();
        prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
        let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
        let mut parallel =
            DataParallel::new(&group, &vars, DataParallelOptions::default()).unwrap();
        let mut skipped = vec![];
        for first in [0.5, f32::INFINITY, 0.5] {
            let mut x = vec![0.5; 128];
            if group.rank() == 0 {
                x[0] = first;
            }
            let x = Tensor::from_vec(x, (2, 64), &Device::Cpu).unwrap();
            let guard = fp8_autocast(RecipeName::Delayed).unwrap();
            let loss = layer.forward(&x).unwrap().mean_all().unwrap();
            guard.close().unwrap();
            let own = loss.to_scalar::<f32>().unwrap();
            assert!(own.is_finite(), "the cast saturates");
            let grads = parallel.backward(&loss).unwrap();
            skipped.push(optimizer.apply(&grads).unwrap().skipped().unwrap());
        }
        (skipped, fp8_test_support::bits(&w))
    });
    assert_eq!(skipped[0].0, [false, true, false]);
    assert_eq!(skipped[0], skipped[1]);
}

/// As codes: each rank's gradient within half a unit of E4M3 of the largest in its 128 values, Inf and NaN not hidden, and about 5/8 of
/// the bytes.
#[test]
fn gradients_that_travel_as_codes() {
    const LEN: usize = 3 * 128 * 40 + 5;
    for ranks in [2, 3] {
        let all = threads::run(ranks, |group| {
            let vars = VarMap::new();
            let init = candle_nn::Init::Const(0.);
            let w = vars.get(LEN, "w", init, DType::F32, &Device::Cpu).unwrap();
            let run = |travel, factor: f64| {
                let options = DataParallelOptions::default().with_travel(travel);
                let mut parallel = DataParallel::new(&group, &vars, options).unwrap();
                let own = tensor(group.rank() as u64, &[1, LEN])
                    .flatten_all()
                    .unwrap();
                let own = (own * factor).unwrap();
                let loss = (&w * &own).unwrap().sum_all().unwrap();
                parallel.backward(&loss).unwrap();
                group.reset_traffic();
                let grads = parallel.backward(&loss).unwrap();
                let grad = grads.get(&w).unwrap().to_vec1::<f32>().unwrap();
                (grad, group.traffic().total().bytes, own)
            };
            let exact = run(GradientTravel::Unchanged, 1.);
            let bad = if group.rank() == 1 { f64::INFINITY } else { 1. };
            (
                exact,
                run(GradientTravel::Fp8, 1.),
                run(GradientTravel::Fp8, bad).0,
            )
        });
        let amax = |i: usize, x: &Tensor| {
            let x = x.to_vec1::<f32>().unwrap();
            let begin = i / 128 * 128;
            x[begin..(begin + 128).min(LEN)]
                .iter()
                .fold(0f32, |amax, x| amax.max(x.abs()))
        };
        for (exact, codes, bad) in &all {
            assert_eq!(codes.0, all[0].1.0, "all ranks get the same");
            for (i, (got, expected)) in codes.0.iter().zip(&exact.0).enumerate() {
                // Half a unit of three mantissa bits below the largest value of each rank, in the mean.
                let bound: f32 = all.iter().map(|(exact, ..)| amax(i, &exact.2)).sum::<f32>();
                let bound = bound / 16. / ranks as f32 * 1.001;
                assert!((got - expected).abs() <= bound, "{i}: {got} for {expected}");
            }
            assert!(bad.iter().any(|x| !x.is_finite()));
            let share = codes.1 as f64 / exact.1 as f64;
            assert!((0.6..0.66).contains(&share), "{share}");
        }
    }
}
