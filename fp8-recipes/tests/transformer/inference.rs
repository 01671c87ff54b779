//! FP8 checkpoints: what calibrated layers write, and what loaded ones compute.

use crate::support::*;
use candle_core::{DType, Tensor, Var};
use candle_nn::VarBuilder;
use fp8_recipes::config::Recipe;
use fp8_recipes::load::var_builder;
use fp8_recipes::nn::{
    LayerInputs, Linear, MultiheadAttention, Projections, TransformerConfig, TransformerLayer,
    transformer_layer,
};
use fp8_recipes::{Autocast, RecipeName, fp8_autocast, save_calibrated};
use fp8_test_support::rounding::two_orders;
use fp8_test_support::{assert_differ, assert_same, device, largest, tensor, var};
use std::path::Path;

/// The files that a calibrated model writes.
fn export(config: &TransformerConfig, single: bool, dir: &Path) -> Vec<Vec<u8>> {
    let model = Model::prepared(config, single, DType::F32);
    let recipe = Recipe::from(RecipeName::Delayed);
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true)).unwrap();
    model
        .layer
        .forward(&input(DType::F32), &Default::default())
        .unwrap();
    guard.close().unwrap();
    let report = save_calibrated(&model, dir).unwrap();
    let read = |path| std::fs::read(path).unwrap();
    vec![read(report.model), read(report.config)]
}

fn load(config: &TransformerConfig, dir: &Path, single: bool) -> TransformerLayer {
    let path = dir.join("model.safetensors");
    let vb: VarBuilder<'_> = var_builder(&[path], DType::F32, &device()).unwrap();
    transformer_layer(config, vb.pp("layer"))
        .unwrap()
        .with_single_node(single)
}

/// The result, the gradient of x, and how many tensors were cast.
fn run(
    layer: &TransformerLayer,
    guard: Option<Autocast>,
    inside: bool,
    collected: bool,
) -> (Tensor, Tensor, Option<u64>) {
    let x = Var::from_tensor(&input(DType::F32)).unwrap();
    let guard = guard.map(|guard| fp8_autocast(guard).unwrap());
    let y = layer.forward(&x, &LayerInputs::default()).unwrap();
    let grad = |y: &Tensor| {
        let loss = y.sqr().unwrap().sum_all().unwrap();
        let grads = match collected {
            true => fp8_recipes::backward(&loss).unwrap(),
            false => loss.backward().unwrap(),
        };
        grads.get(&x).unwrap().clone()
    };
    let (dx, casts) = match inside {
        true => {
            let dx = grad(&y);
            (dx, guard.map(|guard| guard.close().unwrap().casts()))
        }
        false => {
            let casts = guard.map(|guard| guard.close().unwrap().casts());
            (grad(&y), casts)
        }
    };
    (y, dx, casts)
}

#[test]
fn both_forms_write_the_same_files_and_compute_the_same_from_them() {
    for fused in [false, true] {
        let config = config().with_fused_qkv(fused);
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let files = export(&config, true, dirs[0].path());
        assert!(
            files == export(&config, false, dirs[1].path()),
            "the files differ"
        );
        let (one, apart) = (
            load(&config, dirs[0].path(), true),
            load(&config, dirs[0].path(), false),
        );
        let guards = [
            ("no guard", None),
            ("training", Some(Autocast::new(RecipeName::Delayed))),
            (
                "evaluation",
                Some(Autocast::new(RecipeName::Rowwise).training(false)),
            ),
            ("disabled", Some(Autocast::disabled())),
        ];
        let mut results = vec![];
        for (case, guard) in guards {
            for (inside, collected) in [(false, false), (true, false), (false, true)] {
                let case = format!(
                    "{case}, backward inside {inside}, collected {collected}, fused {fused}"
                );
                let (y, dx, casts) = run(&one, guard.clone(), inside, collected);
                let (want, want_dx, want_casts) = run(&apart, guard.clone(), inside, collected);
                assert_same(&case, &y, &want);
                let bound = two_orders(2) * largest(&want_dx);
                match fused {
                    true => assert_same(&format!("{case}: dx"), &dx, &want_dx),
                    // Three gradients meet at the input of q, k and v, in two additions.
                    false => fp8_test_support::assert_within(&case, &dx, &want_dx, |_, _| bound),
                }
                assert_eq!(casts, want_casts, "{case}");
                results.push((y, dx));
            }
        }
        let (fp8, disabled) = (&results[0], results.last().unwrap());
        assert_differ(
            "the disabled guard multiplies in high precision",
            &fp8.0,
            &disabled.0,
        );
    }
}

/// A model that trains one of three projections and has the others from a checkpoint in FP8.
#[test]
fn a_layer_that_trains_beside_layers_of_an_fp8_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    export(&config(), true, dir.path());
    let loaded = load(&config(), dir.path(), true);
    let Projections::Separate { query, key, .. } = loaded.attention().projections() else {
        unreachable!("the projections are separate")
    };
    let (weight, bias) = (var(9, &[HIDDEN, HIDDEN]), tensor(3, &[HIDDEN]));
    let run = |single| {
        let value = Linear::new(weight.as_tensor().clone(), Some(bias.clone())).with_path("v");
        fp8_recipes::prepare_fp8(&value, &Default::default()).unwrap();
        let (query, key) = (query.clone(), key.clone());
        // The layer that trains is neither the first nor the last.
        let projections = Projections::Separate {
            query,
            key: value,
            value: key,
        };
        let out = loaded.attention().out().clone();
        let attention = MultiheadAttention::new(None, projections, out, config().attention)
            .with_single_node(single);
        let guard = fp8_autocast(RecipeName::Delayed).unwrap();
        let y = attention
            .forward(&input(DType::F32), &Default::default())
            .unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let summary = guard.close().unwrap();
        let dw = grads
            .get(&weight)
            .expect("a gradient of the layer that trains")
            .clone();
        (y, dw, summary.casts())
    };
    let (one, apart) = (run(true), run(false));
    assert_same("y", &one.0, &apart.0);
    assert_same("dw", &one.1, &apart.1);
    assert_eq!(one.2, apart.2);
}
