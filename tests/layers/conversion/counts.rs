//! The counter of casts, and `check_gradients`.

use super::*;
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::quantized_tensors;
use fp8::nn::{self};
use fp8::{Autocast, check_gradients, fp8_autocast};
use fp8_test_support::{
    Layer, Mlp, delayed, device, prepare, recipes, skipped_on_cuda, tensor, var,
};

#[test]
fn the_counter_tells_how_many_tensors_were_cast() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    // Casts per step: with a gradient for x, without one as in a first layer, and forward only.
    for (name, counts) in [
        ("tensorwise", [3, 3, 2]),
        ("rowwise", [6, 4, 2]),
        ("rowwise_with_gw_hp", [4, 2, 2]),
        ("delayed", [3, 3, 2]),
    ] {
        let recipe: fp8::Recipe = name.parse().unwrap();
        let with_grad = var(30, &[5, 8]);
        let without = tensor(30, &[5, 8]);
        for (case, x, backward, count) in [
            ("x tracked", with_grad.as_tensor(), true, counts[0]),
            ("x not tracked", &without, true, counts[1]),
            ("forward only", &without, false, counts[2]),
        ] {
            let case = format!("{name}, {case}");
            let layer = Layer::prepared("fc", 31, 4, 8);
            let counted = || quantized_tensors(&layer.linear);
            let step = |autocast: Option<Autocast>| {
                let guard = autocast.map(|autocast| fp8_autocast(autocast).unwrap());
                let y = layer.linear.forward(x).unwrap();
                drop(guard);
                if backward {
                    y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                }
            };
            for plain in [
                None,
                Some(Autocast::disabled()),
                Some(Autocast::new(recipe.clone()).calibrating(true)),
            ] {
                step(plain.clone());
                assert_eq!(counted(), 0, "{case}: high precision {plain:?}");
            }
            for steps in 1..=4 {
                step(Some(recipe.clone().into()));
                assert_eq!(counted(), steps * count, "{case}: after {steps} steps");
                // The weight changes as an optimizer would change it.
                layer
                    .weight
                    .set(&(layer.weight.as_tensor() * 0.9).unwrap())
                    .unwrap();
            }
            let before = counted();
            step(Some(recipe.clone().into()));
            step(Some(recipe.clone().into()));
            let expected = 2 * count - 1;
            // The weight did not change in between, so its forward cast is counted once.
            assert_eq!(counted() - before, expected, "{case}: two micro-batches");
        }
    }
}

#[test]
fn the_counter_of_a_model_sums_its_layers_and_counts_a_shared_one_once() {
    let (_vars, mut mlp) = new_mlp(32);
    prepare(&mut mlp);
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        mlp.forward(&tensor(33, &[3, Mlp::IN])).unwrap();
    }
    assert_eq!(quantized_tensors(&mlp), 4);
    let shared = vec![mlp.up.clone(), mlp.up.clone()];
    assert_eq!(quantized_tensors(&shared), 2, "one layer in two places");
    assert_eq!(mlp.up.fp8_state().unwrap().quantized_tensors(), 2);
}

#[test]
fn check_gradients_names_what_candles_norm_cuts_off_and_our_norm_does_not() {
    if skipped_on_cuda("candle-nn has no such operation there without its own cuda feature") {
        return;
    }
    let x = tensor(40, &[3, Mlp::IN]);
    for ours in [false, true] {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
        let up = nn::linear(Mlp::IN, 8, vb.pp("up")).unwrap();
        let down = nn::linear(8, 4, vb.pp("down")).unwrap();
        let norm: Box<dyn Module> = if ours {
            Box::new(nn::rms_norm(8, 1e-6, vb.pp("norm")).unwrap())
        } else {
            Box::new(candle_nn::rms_norm(8, 1e-6, vb.pp("norm")).unwrap())
        };
        let mut layers = (up, down);
        prepare(&mut layers);
        for fp8 in [false, true] {
            let _guard = fp8_autocast(Autocast::new(delayed(4)).enabled(fp8)).unwrap();
            let y = layers
                .1
                .forward(&norm.forward(&layers.0.forward(&x).unwrap()).unwrap());
            let grads = y
                .unwrap()
                .sqr()
                .unwrap()
                .sum_all()
                .unwrap()
                .backward()
                .unwrap();
            let expected: &[&str] = if ours {
                &[]
            } else {
                &["norm.weight", "up.bias", "up.weight"]
            };
            assert_eq!(
                check_gradients(&vars, &grads),
                expected,
                "ours: {ours}, FP8: {fp8}"
            );
        }
    }
}

#[test]
fn check_gradients_is_empty_for_a_model_of_our_layers() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let embed = nn::embedding(10, 8, vb.pp("embed")).unwrap();
    let layer_norm = nn::layer_norm(8, 1e-5, vb.pp("layer_norm")).unwrap();
    let no_bias = nn::layer_norm_no_bias(8, 1e-5, vb.pp("no_bias")).unwrap();
    let rms_norm = nn::rms_norm(8, 1e-6, vb.pp("rms_norm")).unwrap();
    let mut fc = nn::linear(8, 8, vb.pp("fc")).unwrap();
    prepare(&mut fc);
    vb.get_with_hints_dtype(3, "counts", candle_nn::Init::Const(0.), DType::U32)
        .unwrap();
    let ids = Tensor::new(&[1u32, 7], &device()).unwrap();
    for (name, recipe) in recipes() {
        let _guard = fp8_autocast(recipe).unwrap();
        let h = layer_norm.forward(&embed.forward(&ids).unwrap()).unwrap();
        let h = rms_norm
            .forward(&no_bias.forward(&fc.forward(&h).unwrap()).unwrap())
            .unwrap();
        let grads = h
            .sqr()
            .unwrap()
            .mul(&h)
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .unwrap();
        assert_eq!(
            check_gradients(&vars, &grads),
            Vec::<String>::new(),
            "{name}"
        );
    }
}
