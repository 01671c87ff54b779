//! Graphs around a module: shared weights, frozen and computed ones, several passes and threads.

use crate::support::*;
use candle_core::{DType, Tensor, Var};
use fp8_recipes::config::Recipe;
use fp8_recipes::nn::{LayerInputs, LayerNorm, LayerNormMlp, Linear, MlpInput, ops::Activation};
use fp8_recipes::{Autocast, fp8_autocast};
use fp8_test_support::{assert_close, assert_same, device, tensor, var};

fn forward(model: &Model, x: &Tensor) -> Tensor {
    forward_with(model, x, &LayerInputs::default())
}

fn forward_with(model: &Model, x: &Tensor, inputs: &LayerInputs<'_>) -> Tensor {
    model.layer.forward(x, inputs).unwrap()
}

/// A module applied twice in one graph adds its gradients, as the separate layers do.
#[test]
fn one_module_applied_twice() {
    for recipe in [None, Some("delayed")] {
        let run = |single| {
            let model = Model::prepared(&config().with_fused_qkv(true), single, DType::F32);
            let guard = recipe.map(|name: &str| {
                fp8_autocast(Autocast::new(name.parse::<Recipe>().unwrap())).unwrap()
            });
            let x = Var::from_tensor(&input(DType::F32)).unwrap();
            let y = forward(&model, &forward(&model, &x));
            let step = model.backward(&x, y);
            guard.map(|guard| guard.close().unwrap());
            step
        };
        // Two gradients meet at each parameter: addition commutes.
        assert_steps(&format!("{recipe:?}"), &run(true), &run(false), &[], 0.);
    }
}

#[test]
fn two_backward_passes_of_one_graph_and_of_two_threads() {
    let model = Model::prepared(&config(), true, DType::F32);
    let x = Var::from_tensor(&input(DType::F32)).unwrap();
    let guard = fp8_autocast("rowwise".parse::<Recipe>().unwrap()).unwrap();
    let y = forward(&model, &x);
    guard.close().unwrap();
    let first = model.backward(&x, y.clone());
    assert_steps("again", &model.backward(&x, y.clone()), &first, &[], 0.);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (model, x, y, first) = (&model, &x, &y, &first);
            scope.spawn(move || {
                for _ in 0..3 {
                    assert_steps("thread", &model.backward(x, y.clone()), first, &[], 0.);
                }
            });
        }
    });
    // Our own pass, which collects the gradients of variables past candle's store.
    let loss = (&y * fp8_test_support::normal(77, y.dims()))
        .unwrap()
        .sum_all()
        .unwrap();
    let grads = fp8_candle::wide::backward(&loss).unwrap();
    for (name, var) in model.named() {
        assert_same(&name, grads.get(&var).unwrap(), &first.all[&name]);
    }
}

/// Frozen parameters have no gradient; others keep theirs.
#[test]
fn frozen_and_computed_parameters() {
    for (frozen, single) in [(true, true), (true, false), (false, true), (false, false)] {
        let (base, a, b) = (
            tensor(1, &[128, HIDDEN]),
            var(2, &[128, 2]),
            var(3, &[2, HIDDEN]),
        );
        let down = match frozen {
            true => tensor(4, &[HIDDEN, 128]),
            false => var(4, &[HIDDEN, 128]).as_tensor().clone(),
        };
        // A low-rank update: the weight is computed from variables.
        let weight = (&base + a.matmul(&b).unwrap()).unwrap();
        let gain = tensor(5, &[HIDDEN]);
        let mlp = LayerNormMlp::new(
            LayerNorm::rms_norm(gain, 1e-5),
            MlpInput::Up(Linear::new(weight, None).with_path("up")),
            Linear::new(down.clone(), None).with_path("down"),
            Activation::Gelu,
        )
        .with_single_node(single);
        fp8_recipes::prepare_fp8(&mlp, &Default::default()).unwrap();
        let guard = fp8_autocast("rowwise".parse::<Recipe>().unwrap()).unwrap();
        let x = input(DType::F32);
        let y = mlp.try_forward(&x).unwrap();
        guard.close().unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(grads.get(&a).is_some() && grads.get(&b).is_some());
        assert_eq!(grads.get(&down).is_some(), !frozen);
        let size = grads.get(&a).unwrap().sqr().unwrap().sum_all().unwrap();
        assert!(size.to_scalar::<f32>().unwrap() > 0.);
        // Nothing is left for which a graph would be needed.
        let detached = LayerNormMlp::new(
            None,
            MlpInput::Up(Linear::new(base, None)),
            Linear::new(tensor(4, &[HIDDEN, 128]), None),
            Activation::Gelu,
        );
        assert!(
            !detached
                .with_single_node(single)
                .try_forward(&x)
                .unwrap()
                .track_op()
        );
    }
}

/// Both projections have one weight, which is one argument of the node.
#[test]
fn one_variable_in_two_places_of_a_node() {
    let run = |single| {
        let weight = var(1, &[HIDDEN, HIDDEN]);
        let layer = |path: &str| Linear::new(weight.as_tensor().clone(), None).with_path(path);
        let mlp = LayerNormMlp::new(
            None,
            MlpInput::Up(layer("up")),
            layer("down"),
            Activation::Silu,
        )
        .with_single_node(single);
        let x = Var::from_tensor(&input(DType::F32)).unwrap();
        let y = mlp.try_forward(&x).unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let of = |var: &Var| grads.get(var).unwrap().clone();
        (y, of(&x), of(&weight))
    };
    let (one, apart) = (run(true), run(false));
    assert_same("y", &one.0, &apart.0);
    assert_same("x", &one.1, &apart.1);
    assert_same("weight", &one.2, &apart.2);
}

/// Results do not depend on the number of threads.
#[test]
fn any_number_of_threads() {
    // Long enough for several tasks everywhere.
    let x = fp8_test_support::normal(5, (4, 160, HIDDEN));
    for recipe in [None, Some("delayed"), Some("blockwise")] {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let config = config().with_recomputation(true).with_hidden_dropout(0.1);
            let model = Model::prepared(&config, true, DType::F32);
            let inputs = LayerInputs::default().with_dropout_seed(3);
            // A worker sees no guard: then only the backward pass runs there.
            let x = Var::from_tensor(&x).unwrap();
            let guard = recipe.map(|name: &str| {
                fp8_autocast(Autocast::new(name.parse::<Recipe>().unwrap())).unwrap()
            });
            let y = match guard {
                Some(_) => forward_with(&model, &x, &inputs),
                None => pool.install(|| forward_with(&model, &x, &inputs)),
            };
            guard.map(|guard| guard.close().unwrap());
            pool.install(|| model.backward(&x, y))
        };
        let want = run(1);
        for threads in [2, 5] {
            assert_steps(
                &format!("{recipe:?}, {threads}"),
                &run(threads),
                &want,
                &[],
                0.,
            );
        }
    }
}

/// Scaled parameters: the layers one by one in scaled arithmetic, near the result in f32.
#[test]
fn scaled_parameters() {
    use fp8_recipes::scaled::ScaledVarMap;
    use fp8_scaled::{Scaled, as_scaled};
    for activation in Activation::all() {
        let config = config().with_hidden_act(activation);
        let plain = Model::new(&config, true, DType::F32);
        let vars = ScaledVarMap::new(DType::F16, &device()).unwrap();
        let layer =
            fp8_recipes::nn::transformer_layer(&config, vars.var_builder().pp("layer")).unwrap();
        for (name, var) in plain.named() {
            vars.set(&name, &var).unwrap();
        }
        let x = input(DType::F32);
        let want = forward(&plain, &x);
        let scaled: Scaled = as_scaled(&x.to_dtype(DType::F16).unwrap(), None).unwrap();
        let y = layer
            .forward_array(&scaled, &LayerInputs::default())
            .unwrap();
        let grads = y.square().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(vars.missing_gradients(&grads).is_empty(), "{activation}");
        // f16 has 11 bits; a dozen operations round.
        assert_close(
            &format!("scaled, {activation}"),
            &y.detach().to_tensor(DType::F32).unwrap(),
            &want,
            0.02,
        );
        // Plain tensors through the same door.
        let same = plain
            .layer
            .forward_array(&x, &LayerInputs::default())
            .unwrap();
        assert_same("plain", &same, &want);
    }
}
