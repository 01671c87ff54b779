//! Bad options and inputs: errors that name the value, the path and what was expected.

use crate::support::*;
use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::checkpoint::fp8_state;
use fp8_recipes::config::Recipe;
use fp8_recipes::nn::{
    AttentionConfig, KeyValues, LayerInputs, LayerNormMlp, Linear, MlpInput, MultiheadAttention,
    TransformerConfig, layer_norm_mlp, ops::Activation, transformer_layer,
};
use fp8_recipes::{Error, RecipeName, fp8_autocast};
use fp8_test_support::{assert_text, device, rounding, tensor};

fn attention() -> AttentionConfig {
    AttentionConfig::new(HEADS, 16).with_causal(true)
}

fn fails(config: &TransformerConfig, x: &Tensor, inputs: &LayerInputs<'_>, parts: &[&str]) {
    for single in [false, true] {
        let model = Model::new(config, single, DType::F32);
        let error = model.layer.forward(x, inputs).unwrap_err();
        assert!(!matches!(error, Error::Candle(_)), "{error:?}");
        assert_text(&format!("single {single}"), error, parts);
    }
}

#[test]
fn invalid_numbers_of_heads_are_refused() {
    let build = |config: &TransformerConfig| {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
        let error = transformer_layer(config, vb.pp("layer")).unwrap_err();
        assert!(
            vars.all_vars().is_empty()
                || !vars
                    .data()
                    .lock()
                    .unwrap()
                    .contains_key("layer.self_attn.q_proj.weight")
        );
        error
    };
    let parts = [
        "layer.self_attn",
        "head_dim",
        "0 of 3 heads",
        "divide the hidden size",
    ];
    assert_text("hidden", build(&TransformerConfig::new(64, 3)), &parts);
    assert_text(
        "none",
        build(&TransformerConfig::new(64, 0)),
        &["0 of 0 heads", "one head or more"],
    );
    let huge = AttentionConfig::new(usize::MAX / 4, 3);
    assert_text(
        "huge",
        build(&TransformerConfig::new(64, 4).with_attention(huge)),
        &["3 of 4611686018427387903 heads", "fits into a usize"],
    );
    for (kv_heads, got) in [(3, "is 3"), (0, "is 0"), (8, "is 8")] {
        let own = attention().with_num_key_value_heads(kv_heads);
        let parts = [
            "layer.self_attn",
            "num_key_value_heads",
            got,
            "a divisor of the 4 heads",
        ];
        assert_text(got, build(&config().with_attention(own)), &parts);
    }
    let own = attention().with_sliding_window(0);
    let parts = ["layer.self_attn", "sliding_window", "is 0", "one token"];
    assert_text("window", build(&config().with_attention(own)), &parts);
}

#[test]
fn inputs_that_do_not_fit() {
    let (x, none) = (input(DType::F32), LayerInputs::default());
    fails(
        &config(),
        &tensor(1, &[4, HIDDEN]),
        &none,
        &["[batch, tokens, features]", "[4, 64]"],
    );
    let lengths = |lengths: &[usize]| LayerInputs::default().with_key_lengths(lengths.to_vec());
    let parts = [
        "layer.self_attn.o_proj",
        "key_lengths",
        "[16, 17]",
        "2 lengths of at most 16",
    ];
    fails(&config(), &x, &lengths(&[16, 17]), &parts);
    fails(&config(), &x, &lengths(&[16]), &["[16]", "2 lengths"]);
    for (tokens, head_dim, got) in [(TOKENS, 32, "[16, 16]"), (TOKENS - 1, 16, "[15, 8]")] {
        let (cos, sin) = angles(tokens, head_dim);
        let inputs = LayerInputs::default().with_rope(&cos, &sin);
        fails(
            &config(),
            &x,
            &inputs,
            &["layer.self_attn.o_proj", "rope", got, "[16, 8]"],
        );
    }
}

#[test]
fn invalid_dropout_probabilities_are_refused() {
    let x = input(DType::F32);
    for probability in [1.5, 1., -0.5, f64::NAN] {
        let got = format!("is {probability}");
        let parts = |what| {
            [
                "layer.self_attn.o_proj",
                what,
                &got,
                "at least 0 and below 1",
            ]
            .map(str::to_string)
        };
        // With or without a seed: evaluation finds it as well as training.
        for inputs in [
            LayerInputs::default(),
            LayerInputs::default().with_dropout_seed(1),
        ] {
            for (what, config) in [
                (
                    "attention_dropout",
                    config().with_attention(attention().with_attention_dropout(probability)),
                ),
                ("hidden_dropout", config().with_hidden_dropout(probability)),
            ] {
                let parts = parts(what);
                fails(&config, &x, &inputs, &parts.each_ref().map(String::as_str));
            }
        }
    }
}

#[test]
fn gated_activations_of_projections_that_do_not_fit() {
    let layer = |out: usize, input: usize, path: &str| {
        Linear::new(tensor(1, &[out, input]), None).with_path(path)
    };
    let x = input(DType::F32);
    for single in [false, true] {
        let odd = LayerNormMlp::new(
            None,
            MlpInput::Up(layer(33, HIDDEN, "mlp.up")),
            layer(HIDDEN, 16, "down"),
            Activation::SwiGlu,
        );
        let error = odd.with_single_node(single).try_forward(&x).unwrap_err();
        assert_text("odd", error, &["mlp.up", "33", "an even one", "swiglu"]);
        let pair = MlpInput::GateUp {
            gate: layer(32, HIDDEN, "mlp.gate"),
            up: layer(32, HIDDEN, "mlp.up"),
        };
        let plain = LayerNormMlp::new(None, pair, layer(HIDDEN, 32, "down"), Activation::Gelu);
        let error = plain.with_single_node(single).try_forward(&x).unwrap_err();
        assert_text("not gated", error, &["mlp.gate", "gelu", "a gated one"]);
        let pair = MlpInput::GateUp {
            gate: layer(32, HIDDEN, "mlp.gate"),
            up: layer(16, HIDDEN, "mlp.up"),
        };
        let uneven = LayerNormMlp::new(None, pair, layer(HIDDEN, 32, "down"), Activation::SwiGlu);
        let error = uneven.with_single_node(single).try_forward(&x).unwrap_err();
        assert_text("uneven", error, &["[2, 16, 32]", "[2, 16, 16]"]);
    }
}

/// A failure within the node leaves the guard as one of the separate layers does.
#[test]
fn a_failure_under_a_guard() {
    for (case, dropped) in [("closed", false), ("dropped", true)] {
        let run = |single| {
            let config = config().with_bias(false);
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
            let good = layer_norm_mlp(&config, vb.pp("good")).unwrap();
            // The second projection reads more features than the first one gives.
            let up = Linear::new(tensor(1, &[96, HIDDEN]), None).with_path("bad.up");
            let down = Linear::new(tensor(2, &[HIDDEN, 128]), None).with_path("bad.down");
            let bad = LayerNormMlp::new(None, MlpInput::Up(up), down, Activation::Gelu)
                .with_single_node(single);
            let model = (good, bad);
            fp8_recipes::prepare_fp8(&model, &Default::default()).unwrap();
            let x = input(DType::F32);
            let step = || {
                let guard = fp8_autocast(Recipe::from(RecipeName::Delayed)).unwrap();
                let error = model.1.try_forward(&x).unwrap_err();
                assert_text(case, &error, &["bad.down", "128", "96"]);
                let closed = match dropped {
                    true => {
                        drop(guard);
                        None
                    }
                    false => Some(
                        guard
                            .close()
                            .map(|summary| summary.casts())
                            .map_err(|e| e.to_string()),
                    ),
                };
                (error.to_string(), closed)
            };
            let report = step();
            fp8_recipes::end_step().unwrap();
            (report, format!("{:?}", fp8_state(&model).unwrap()))
        };
        assert_eq!(run(true), run(false), "{case}");
    }
}

/// A layer that fails behind one that has cast: whatever the form, the step is not taken.
#[test]
fn a_failure_of_no_linear_layer_under_a_guard() {
    for single in [false, true] {
        let good = Model::prepared(&config(), single, DType::F32);
        let state = || format!("{:?}", fp8_state(&good).unwrap());
        let x = input(DType::F32);
        good.step(&x, &LayerInputs::default(), Some("delayed"));
        let before = state();
        let guard = fp8_autocast(Recipe::from(RecipeName::Delayed)).unwrap();
        let y = good.layer.forward(&x, &LayerInputs::default()).unwrap();
        let lengths = LayerInputs::default().with_key_lengths(vec![17, 16]);
        good.layer.forward(&y, &lengths).unwrap_err();
        drop(guard);
        fp8_recipes::end_step().unwrap();
        assert_eq!(state(), before, "single {single}");
        // In the forms that are never one node.
        let guard = fp8_autocast(Recipe::from(RecipeName::Delayed)).unwrap();
        let mut cache = KeyValues::default();
        let cached = |lengths: Option<Vec<usize>>, cache: &mut KeyValues| {
            let inputs = LayerInputs::default().with_key_lengths(lengths);
            good.layer.forward_cached(&x, &inputs, cache)
        };
        cached(None, &mut cache).unwrap();
        cached(Some(vec![33, 32]), &mut cache).unwrap_err();
        drop(guard);
        fp8_recipes::end_step().unwrap();
        assert_eq!(state(), before, "cached, single {single}");
    }
}

/// What a failed call would have added to a cache is not there.
#[test]
fn a_cache_after_a_failure() {
    let config = config();
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let good = transformer_layer(&config, vb).unwrap();
    let projections = good.attention().projections().clone();
    // Behind attention, a layer that reads more features than there are.
    let out = Linear::new(tensor(1, &[HIDDEN, 96]), None);
    let bad = MultiheadAttention::new(None, projections, out, config.attention);
    let (x, inputs) = (input(DType::F32), LayerInputs::default());
    let mut cache = KeyValues::default();
    let parts = [x.narrow(1, 0, 8).unwrap(), x.narrow(1, 8, 8).unwrap()];
    let attention = good.attention();
    let first = attention
        .forward_cached(&parts[0], &inputs, &mut cache)
        .unwrap();
    bad.forward_cached(&parts[1], &inputs, &mut cache)
        .unwrap_err();
    let second = attention
        .forward_cached(&parts[1], &inputs, &mut cache)
        .unwrap();
    let got = Tensor::cat(&[first, second], 1).unwrap();
    let want = attention.forward(&x, &inputs).unwrap();
    // Projections, scores and what they weight: sums over features and 16 keys.
    let sums = rounding::two_orders(4 * rounding::roundings(HIDDEN) + 16);
    fp8_test_support::assert_close("tokens", &got, &want, sums);
}
