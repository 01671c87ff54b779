//! Steps of several micro-batches.

use crate::support::*;
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_nn::{Optimizer, VarMap};
use fp8_recipes::optim::{AdamW, AdamWConfig};
use fp8_recipes::{GradAccumulator, Recipe, check_gradients, fp8_autocast, prepare_fp8};

/// How the gradients of micro-batches are combined.
#[derive(Debug, Clone, Copy)]
enum Style {
    /// Losses are means over their own samples, and the gradients' mean is taken.
    Mean,
    /// Losses are sums over their own samples by the size of the whole batch, and the gradients' sum is taken.
    Sum,
}

/// Variables and gradients of the whole batch, and those of micro-batches with these numbers of samples.
fn both(
    recipe: Option<Recipe>,
    x: &Tensor,
    parts: &[usize],
    style: Style,
) -> [(VarMap, GradStore); 2] {
    let samples = x.dims()[0];
    let run = |parts: &[usize]| {
        let (vars, net) = fresh(1, DType::F32);
        let guard = recipe.clone().map(|recipe| {
            prepare_fp8(&net, &Default::default()).unwrap();
            fp8_autocast(recipe).unwrap()
        });
        let mut all = GradAccumulator::new(&vars);
        let mut first = 0;
        for &len in parts {
            let y = forward(&net, &x.narrow(0, first, len).unwrap());
            let sum = y.sqr().unwrap().sum_all().unwrap();
            let (by, weight) = match style {
                Style::Mean => (len, len as f64),
                Style::Sum => (samples, 1.),
            };
            let grads = (sum / by as f64).unwrap().backward().unwrap();
            all.add_weighted(grads, weight).unwrap();
            first += len;
        }
        assert_eq!((first, all.micro_batches()), (samples, parts.len()));
        drop(guard);
        let grads = match style {
            Style::Mean => all.finish_mean(),
            Style::Sum => all.finish_sum(),
        };
        (vars, grads.unwrap())
    };
    [run(&[samples]), run(parts)]
}

#[track_caller]
fn assert_same_gradients(case: &str, [whole, parts]: &[(VarMap, GradStore); 2], tolerance: f64) {
    assert!(check_gradients(&parts.0, &parts.1).is_empty(), "{case}");
    assert_eq!(named(&whole.0).len(), named(&parts.0).len(), "{case}");
    for ((name, var), (_, own)) in named(&whole.0).iter().zip(named(&parts.0)) {
        let (expected, got) = (whole.1.get(var).unwrap(), parts.1.get(&own).unwrap());
        assert_close(&format!("{case}, {name}"), got, expected, tolerance);
    }
}

/// What the order of sums can do: over both layers, back through one of them, and over 48 samples.
fn sums() -> f64 {
    two_products(&[IN, HIDDEN, IN, 48])
}

#[test]
fn micro_batches_give_the_gradient_of_the_whole_batch() {
    let x = tensor(30, &[48, IN]);
    for style in [Style::Mean, Style::Sum] {
        for parts in [&[24, 24][..], &[12; 4], &[20, 20, 8], &[1; 48]] {
            let case = format!("{style:?}, {parts:?}");
            assert_same_gradients(&case, &both(None, &x, parts, style), sums());
        }
    }
}

/// Micro-batches under one guard share their scales, so they are cast as the whole batch is; only sums are rounded differently.
#[test]
fn micro_batches_under_one_guard_give_the_gradient_of_the_whole_batch_in_fp8() {
    let x = tensor(30, &[48, IN]);
    for parts in [&[24, 24][..], &[12; 4], &[20, 20, 8], &[1; 48]] {
        let case = format!("{parts:?}");
        let all = both(Some(delayed()), &x, parts, Style::Sum);
        assert_same_gradients(&case, &all, sums());
    }
    // Means over fewer samples give larger gradients. If the factor is a power of two the codes are the same, except for
    // subnormal ones.
    let all = both(Some(delayed()), &x, &[12; 4], Style::Mean);
    assert_same_gradients("means", &all, 2e-2);
}

#[test]
fn every_optimizer_takes_accumulated_gradients() -> Outcome {
    let x = tensor(30, &[48, IN]);
    let [(whole_vars, whole), (vars, grads)] = both(None, &x, &[16; 3], Style::Mean);
    fn step<O: Optimizer>(vars: &VarMap, grads: &GradStore, config: O::Config) -> VarMap {
        let own = named(vars).into_iter().map(|(_, var)| var).collect();
        O::new(own, config).unwrap().step(grads).unwrap();
        vars.clone()
    }
    // SGD last: it shows the gradient itself.
    for (name, got, expected) in [
        (
            "ours",
            step::<AdamW>(&vars, &grads, AdamWConfig::default()),
            step::<AdamW>(&whole_vars, &whole, AdamWConfig::default()),
        ),
        (
            "candle_nn::AdamW",
            step::<candle_nn::AdamW>(&vars, &grads, Default::default()),
            step::<candle_nn::AdamW>(&whole_vars, &whole, Default::default()),
        ),
        (
            "candle_nn::SGD",
            step::<candle_nn::SGD>(&vars, &grads, 0.1),
            step::<candle_nn::SGD>(&whole_vars, &whole, 0.1),
        ),
    ] {
        for ((var, got), (_, expected)) in named(&got).iter().zip(named(&expected)) {
            // AdamW's first step has the size of the learning rate, whatever the gradient.
            assert_close(&format!("{name}, {var}"), got, &expected, 1e-3);
        }
    }
    Ok(())
}
