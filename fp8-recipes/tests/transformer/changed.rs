//! Parameters that are changed between the forward and the backward pass: the gradients are those of the values that the forward
//! pass has used, or there are none.

use crate::support::*;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::Recipe;
use fp8_recipes::fp8_autocast;
use fp8_recipes::nn::{
    LayerInputs, LoraConfig, LoraLinear, NormKind, TransformerConfig, checkpoint, linear,
};
use fp8_test_support::{assert_same, assert_text, named, normal, skipped_on_cuda};

/// How many of the parameters the backward pass refuses.
fn refused(config: &TransformerConfig, single: bool, recipe: Option<&str>) -> usize {
    let case = format!("{recipe:?}, {:?}, single: {single}", config.norm);
    let model = Model::prepared(config, single, DType::F32);
    let guard = recipe.map(|name| fp8_autocast(name.parse::<Recipe>().unwrap()).unwrap());
    let x = Var::from_tensor(&input(DType::F32)).unwrap();
    let y = model.layer.forward(&x, &LayerInputs::default()).unwrap();
    guard.map(|guard| guard.close().unwrap());
    let first = model.backward(&x, y.clone());
    let loss = (&y * normal(77, y.dims())).unwrap().sum_all().unwrap();
    let mut refused = 0;
    for (name, var) in model.named() {
        let before = var.as_tensor().copy().unwrap();
        // As Hogwild's other threads do it.
        std::thread::scope(|scope| {
            let change = || var.set(&before.affine(1.5, 0.1).unwrap()).unwrap();
            scope.spawn(change);
        });
        match fp8_recipes::backward(&loss) {
            Err(error) => {
                let fp8_candle::Error::ChangedValues {
                    op, what, shape, ..
                } = &error
                else {
                    panic!("{case}, {name}: {error}");
                };
                assert_eq!(shape, before.dims(), "{case}, {name}");
                // A linear layer is named by its path, a norm by its operation.
                let (path, parameter) = name.rsplit_once('.').unwrap();
                let named = match path.ends_with("layernorm") {
                    false => path,
                    true if config.norm == NormKind::RmsNorm => "rms_norm",
                    true => "layer_norm",
                };
                assert_eq!((op.as_str(), *what), (named, parameter), "{case}, {name}");
                let text = loss.backward().unwrap_err().to_string();
                let which = format!("`{named}`: its {parameter} of shape {shape:?}");
                assert_text(&case, text, &[&which, "has changed since the forward"]);
                refused += 1;
            }
            Ok(grads) => {
                for (other, var) in model.named() {
                    let case = format!("{case}, {name} changed: {other}");
                    assert_same(&case, grads.get(&var).unwrap(), &first.all[&other]);
                }
            }
        }
        var.set(&before).unwrap();
        // As if nothing had been.
        let grads = fp8_recipes::backward(&loss).unwrap();
        assert_same(&case, grads.get(&x).unwrap(), &first.all["x"]);
    }
    refused
}

#[test]
fn a_changed_parameter_gives_no_other_gradients() {
    if skipped_on_cuda("a change of a weight is noticed if it is announced") {
        return;
    }
    for recipe in RECIPES {
        for (single, norm) in [
            (false, NormKind::LayerNorm),
            (true, NormKind::LayerNorm),
            (true, NormKind::RmsNorm),
        ] {
            let refused = refused(&config().with_norm(norm), single, Some(recipe));
            // Two norms, and the weights of six projections where no codes of the forward pass serve the backward pass. Where that
            // is so of inputs, a node computes the results of norms again, with their biases.
            let by_rows = ["rowwise", "rowwise_with_gw_hp", "mxfp8"].contains(&recipe);
            let again = by_rows || recipe == "blockwise";
            let biases = again && single && norm == NormKind::LayerNorm;
            let expected = 2 + 6 * usize::from(by_rows) + 2 * usize::from(biases);
            assert_eq!(refused, expected, "{recipe}, {norm:?}, single: {single}");
        }
    }
}

#[test]
fn a_changed_weight_gives_no_other_gradients_with_recomputation() {
    if skipped_on_cuda("a change of a weight is noticed if it is announced") {
        return;
    }
    for recipe in RECIPES {
        let refused = refused(&config().with_recomputation(true), true, Some(recipe));
        assert!(refused >= 2, "{recipe}: {refused}");
    }
}

#[test]
fn a_changed_weight_gives_no_other_gradients_in_high_precision() {
    if skipped_on_cuda("a change of a weight is noticed if it is announced") {
        return;
    }
    // Apart, layers are candle's products, which use what the weight is by then.
    assert_eq!(refused(&config(), true, None), 10);
}

/// Layers with independent rows and updates of low rank are no products of candle: they refuse the weight.
#[test]
fn a_changed_weight_of_an_update_gives_no_other_gradients() {
    if skipped_on_cuda("a change of a weight is noticed if it is announced") {
        return;
    }
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc");
    let base = linear(16, 8, vb.clone()).unwrap().with_independent_rows();
    let layer = LoraLinear::new(base, LoraConfig::new(4), vb).unwrap();
    let x = Var::from_tensor(&normal(1, &[5, 16])).unwrap();
    let loss = layer.forward(&x).unwrap().sum_all().unwrap();
    let mut refused = vec![];
    for (name, var) in named(&vars) {
        let before = var.as_tensor().copy().unwrap();
        var.set(&before.affine(1.5, 0.1).unwrap()).unwrap();
        if let Err(error) = fp8_recipes::backward(&loss) {
            let fp8_candle::Error::ChangedValues { shape, .. } = &error else {
                panic!("{name}: {error}");
            };
            assert_eq!(shape, before.dims(), "{name}");
            assert_text(&name, &error, &["`linear`: its weight"]);
            refused.push(name);
        }
        var.set(&before).unwrap();
        fp8_recipes::backward(&loss).unwrap();
    }
    let expected = ["fc.lora_A.weight", "fc.lora_B.weight", "fc.weight"];
    assert_eq!(refused, expected);
}

/// What is computed again knows no layers: the error names the variable's shape.
#[test]
fn a_changed_parameter_of_a_checkpoint_is_named_by_its_shape() {
    if skipped_on_cuda("a change of a weight is noticed if it is announced") {
        return;
    }
    let model = Model::prepared(&config(), true, DType::F32);
    let layer = model.layer.clone();
    let forward = move |x: &Tensor| layer.forward(x, &LayerInputs::default());
    let guard = fp8_autocast("rowwise").unwrap();
    let y = checkpoint(forward, &input(DType::F32)).unwrap();
    guard.close().unwrap();
    let loss = y.sum_all().unwrap();
    for (name, var) in model.named() {
        let before = var.as_tensor().copy().unwrap();
        var.set(&before.affine(1.5, 0.1).unwrap()).unwrap();
        let error = fp8_recipes::backward(&loss).unwrap_err();
        let fp8_candle::Error::RecomputedValues { shape, .. } = &error else {
            panic!("{name}: {error}");
        };
        assert_eq!(shape, before.dims(), "{name}");
        let which = format!("variable of shape {shape:?} (F32)");
        assert_text(&name, &error, &[&which]);
        var.set(&before).unwrap();
    }
    fp8_recipes::backward(&loss).unwrap();
}
