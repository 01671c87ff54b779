//! The smaller modules on their own.

use crate::support::{HIDDEN, RECIPES, config, input};
use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::Recipe;
use fp8_recipes::nn::ops::Activation;
use fp8_recipes::nn::{
    AttentionConfig, LayerInputs, NormKind, NormPlacement, TransformerConfig, layer_norm_linear,
    layer_norm_mlp, multihead_attention,
};
use fp8_recipes::{Fp8Module, fp8_autocast};
use fp8_test_support::{assert_same, device, normal};
use std::collections::BTreeMap;

/// The result and all gradients of a module that `build` makes and `forward` calls.
fn run<M: Fp8Module>(
    recipe: Option<&str>,
    build: impl Fn(VarBuilder<'_>) -> M,
    forward: impl Fn(&M, &Tensor) -> Tensor,
) -> BTreeMap<String, Tensor> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    build(vb.clone());
    for (name, var) in vars.data().lock().unwrap().iter() {
        let seed = name.len() as u64 + 3 * var.elem_count() as u64;
        var.set(&(normal(seed, var.dims()) * 0.2).unwrap()).unwrap();
    }
    let module = build(vb);
    fp8_recipes::prepare_fp8(&module, &Default::default()).unwrap();
    let guard = recipe.map(|name| fp8_autocast(name.parse::<Recipe>().unwrap()).unwrap());
    let x = Var::from_tensor(&input(DType::F32)).unwrap();
    let y = forward(&module, &x);
    let loss = (&y * normal(1, y.dims())).unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();
    guard.map(|guard| guard.close().unwrap());
    let mut all = BTreeMap::from([
        ("y".to_string(), y),
        ("x".to_string(), grads.get(&x).unwrap().clone()),
    ]);
    for (name, var) in vars.data().lock().unwrap().iter() {
        all.insert(
            name.clone(),
            grads.get(var).unwrap_or_else(|| panic!("{name}")).clone(),
        );
    }
    all
}

/// At most two gradients meet, and addition commutes: everything is the same to the bit.
#[track_caller]
fn assert_all(
    case: &str,
    one: &BTreeMap<String, Tensor>,
    apart: &BTreeMap<String, Tensor>,
    parameters: usize,
) {
    assert_eq!(
        (one.len(), apart.len()),
        (parameters + 2, parameters + 2),
        "{case}"
    );
    for (name, want) in apart {
        assert_same(&format!("{case}: {name}"), &one[name], want);
    }
}

#[test]
fn each_module_against_its_layers() {
    for norm in [NormKind::LayerNorm, NormKind::RmsNorm] {
        let config = config().with_norm(norm).with_fused_qkv(true);
        let norms = if norm == NormKind::LayerNorm { 2 } else { 1 };
        for recipe in RECIPES.map(Some).into_iter().chain([None]) {
            let case = format!("{norm:?}, {recipe:?}");
            let linear = |single| {
                let build = |vb: VarBuilder<'_>| {
                    layer_norm_linear(HIDDEN, 96, &config, vb)
                        .unwrap()
                        .with_single_node(single)
                };
                run(recipe, build, |module, x| module.try_forward(x).unwrap())
            };
            assert_all(
                &format!("linear, {case}"),
                &linear(true),
                &linear(false),
                norms + 2,
            );
            let attention = |single| {
                let build = |vb: VarBuilder<'_>| {
                    multihead_attention(&config, vb)
                        .unwrap()
                        .with_single_node(single)
                };
                run(recipe, build, |module, x| {
                    module.forward(x, &LayerInputs::default()).unwrap()
                })
            };
            assert_all(
                &format!("attention, {case}"),
                &attention(true),
                &attention(false),
                norms + 4,
            );
            let gated = config
                .clone()
                .with_hidden_act(Activation::SwiGlu)
                .with_recomputation(true);
            let mlp = |single| {
                let build = |vb: VarBuilder<'_>| {
                    layer_norm_mlp(&gated, vb).unwrap().with_single_node(single)
                };
                run(recipe, build, |module, x| module.try_forward(x).unwrap())
            };
            assert_all(&format!("mlp, {case}"), &mlp(true), &mlp(false), norms + 6);
        }
    }
}

/// A layer as in GPT-2, but attending to all tokens.
#[test]
fn configurations_have_the_documented_defaults() {
    let config = TransformerConfig::new(64, 4);
    assert_eq!(config.intermediate_size, 4 * 64);
    assert_eq!(
        (config.norm, config.norm_placement),
        (NormKind::LayerNorm, NormPlacement::Pre)
    );
    assert_eq!(config.norm_eps, 1e-5);
    assert_eq!(config.hidden_act, Activation::Gelu);
    assert!(config.bias && !config.fused_qkv && !config.fused_gate_up);
    assert_eq!(config.hidden_dropout, 0.);
    assert!(!config.recomputation);

    let own = config.attention;
    assert_eq!(own, AttentionConfig::new(4, 16));
    assert_eq!((own.num_attention_heads, own.num_key_value_heads), (4, 4));
    assert!(!own.causal && !own.rope_interleaved);
    assert_eq!((own.sliding_window, own.softmax_scale), (None, None));
    assert_eq!((own.attention_dropout, own.operands), (0., None));
}
