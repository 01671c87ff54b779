//! Frozen and tied weights.

use super::*;
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::nn::Linear;
use fp8::{check_gradients, fp8_autocast};
use fp8_test_support::calibrated::Tied;
use fp8_test_support::{
    Layer, assert_close, assert_differ, assert_same, delayed, device, flat, of, prepare, recipes,
    skipped_on_cuda, slot, tensor, var,
};

#[test]
fn a_frozen_weight_computes_in_fp8_and_gets_no_gradient() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    let x = var(20, &[2, 4]);
    for (name, recipe) in recipes() {
        let mut frozen = Linear::new(tensor(21, &[3, 4]), None).with_path("fc");
        assert_eq!(prepare(&mut frozen).converted(), 1);
        let mut trained = Layer::prepared("fc", 21, 3, 4).linear;
        trained = Linear::new(trained.weight().unwrap(), None).with_path("fc");
        prepare(&mut trained);
        let results = [&frozen, &trained].map(|layer| {
            let mut last = None;
            for _ in 0..3 {
                let guard = fp8_autocast(recipe.clone()).unwrap();
                let y = layer.forward(&x).unwrap();
                guard.close().unwrap();
                let grads = (&y * 3.).unwrap().sum_all().unwrap().backward().unwrap();
                let grad_weight = grads.get(&layer.weight().unwrap()).is_some();
                last = Some((y, grads.get(&x).unwrap().clone(), grad_weight));
            }
            last.unwrap()
        });
        let [
            (y, grad_x, grad_weight),
            (expected_y, expected_grad_x, trained_grad),
        ] = results;
        assert_same(&format!("{name}: y"), &y, &expected_y);
        assert_same(&format!("{name}: grad_x"), &grad_x, &expected_grad_x);
        assert_eq!(
            (grad_weight, trained_grad),
            (false, true),
            "{name}: grad_weight"
        );
        let plain = candle_nn::Linear::new(frozen.weight().unwrap(), None);
        assert_differ(name, &y, &plain.forward(&x).unwrap());
        // The scale of a frozen weight leaves its initial value, and its history rolls once.
        if name.starts_with("delayed") {
            let weight = slot(&frozen, "weight");
            let amax = flat(&frozen.weight().unwrap())
                .into_iter()
                .fold(0f32, |a, x| a.max(x.abs()));
            assert_eq!(weight.quant_scale, 448. / amax, "{name}");
            assert_eq!(weight.history[1], 0., "{name}: one amax");
            assert_close(name, &y, &plain.forward(&x).unwrap(), 0.1);
        }
    }
}

/// A variable without an optimizer behaves like a frozen one.
#[test]
fn a_variable_without_an_optimizer_behaves_as_a_frozen_weight() {
    if skipped_on_cuda("a GPU casts the weight in each forward pass: its change is not known there")
    {
        return;
    }
    use fp8::optim::{AdamW, AdamWConfig};
    let (frozen, trained) = (
        Layer::prepared("a", 22, 4, 4),
        Layer::prepared("b", 24, 3, 4),
    );
    let named = vec![("b.weight".to_string(), trained.weight.clone())];
    let mut optimizer = AdamW::from_named(named, AdamWConfig::default()).unwrap();
    let before = frozen.weight.as_tensor().copy().unwrap();
    for _ in 0..3 {
        let guard = fp8_autocast(delayed(4)).unwrap();
        let h = frozen.linear.forward(&tensor(26, &[2, 4])).unwrap();
        let y = trained.linear.forward(&h).unwrap();
        guard.close().unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(!optimizer.apply(&grads).unwrap().skipped().unwrap());
    }
    assert_same("frozen", frozen.weight.as_tensor(), &before);
    let [frozen, trained] = [frozen, trained].map(|layer| {
        layer
            .slot("weight")
            .history
            .iter()
            .filter(|a| **a > 0.)
            .count()
    });
    assert_eq!(
        (frozen, trained),
        (1, 3),
        "amaxes of the frozen and of the trained weight"
    );
}

#[test]
fn tied_weights_are_named_and_each_layer_has_its_own_state() {
    let weight = var(27, &[5, 4]);
    let layer = |path: &str| Linear::new(weight.as_tensor().clone(), None).with_path(path);
    let mut model = (layer("encoder.out"), layer("decoder.out"));
    let report = prepare(&mut model);
    let expected = [
        ("encoder.out", "fp8: weight tied with decoder.out.weight"),
        ("decoder.out", "fp8: weight tied with encoder.out.weight"),
    ];
    assert_outcomes("two linears", &report, &expected);
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        model.0.forward(&of(&[2.; 4], &[1, 4])).unwrap();
        model.1.forward(&of(&[4.; 4], &[1, 4])).unwrap();
    }
    let inputs = [&model.0, &model.1].map(|layer| slot(layer, "input").history[0]);
    assert_eq!(inputs, [2., 4.], "inputs differ");
    let weights = [&model.0, &model.1].map(|layer| slot(layer, "weight"));
    assert_eq!(weights[0], weights[1], "the weight is one");
    // One gradient, the sum over both uses.
    let _guard = fp8_autocast(delayed(4)).unwrap();
    let x = tensor(28, &[2, 4]);
    let y = (model.0.forward(&x).unwrap() + model.1.forward(&x).unwrap()).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    let single = model
        .0
        .forward(&x)
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    let twice = (single.get(&weight).unwrap() * 2.).unwrap();
    assert_close("grad_weight", grads.get(&weight).unwrap(), &twice, 0.1);
}

#[test]
fn a_linear_tied_to_an_embedding_is_skipped_with_that_reason() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let mut model = Tied::new(vb, true);
    let report = prepare(&mut model);
    let expected = [
        ("fc", "fp8"),
        (
            "head",
            "its weight is shared with `embed.weight`, which stays in high precision",
        ),
    ];
    assert_outcomes("tied", &report, &expected);
    let _guard = fp8_autocast(delayed(4)).unwrap();
    let ids = Tensor::new(&[1u32, 7], &device()).unwrap();
    let y = model.forward(&ids).unwrap();
    let loss = y.sqr().unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();
    assert_eq!(check_gradients(&vars, &grads), Vec::<String>::new());
}
