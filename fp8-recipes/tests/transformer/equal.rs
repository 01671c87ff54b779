//! The layer as one node against its layers one by one, over its options and recipes.

use crate::support::*;
use candle_core::{DType, Var};
use candle_nn::VarBuilder;
use fp8_candle::ops::Activation;
use fp8_recipes::nn::{
    AttentionConfig, LayerInputs, LayerNorm, LayerNormLinear, Linear, NormKind, NormPlacement,
    TransformerConfig, layer_norm_mlp,
};
use fp8_test_support::{assert_same, device, tensor};

/// What flows through the sum of the gradients of q's, k's and v's input.
const SUMS: [&str; 2] = ["x", "input_layernorm"];

/// Both forms over one recipe, or none.
fn compare(
    case: &str,
    config: &TransformerConfig,
    inputs: &LayerInputs<'_>,
    dtype: DType,
    recipe: Option<&str>,
) {
    let case = format!("{case}, {dtype:?}, {recipe:?}");
    // With one projection for q, k and v no more than two gradients meet anywhere, and addition commutes.
    let mut sums = match (config.fused_qkv, config.norm_placement) {
        (true, _) => vec![],
        (false, NormPlacement::Pre) => SUMS.to_vec(),
        (false, _) => SUMS[..1].to_vec(),
    };
    let mut tolerance = tolerance(dtype);
    if recipe.is_none() {
        // candle sums the gradient of a bias token by token, in bf16 with a rounding for each; the node in f32, in blocks. The keys' is
        // 0 but for roundings, since the softmax does not change where all its arguments do.
        sums.extend([
            "q_proj.bias",
            "qkv_proj.bias",
            "v_proj.bias",
            "o_proj.bias",
            "mlp.up_proj.bias",
            "down_proj.bias",
        ]);
        tolerance = match dtype {
            DType::BF16 => (BATCH * TOKENS) as f64 * 2f64.powi(-9),
            _ => tolerance,
        };
    }
    let run = |single| {
        let model = Model::new(config, single, dtype);
        if recipe.is_some() {
            model.prepare(&Default::default());
        }
        // Twice, so that delayed scales and kept weights count.
        model.step(&input(dtype), inputs, recipe);
        model.step(&input(dtype), inputs, recipe)
    };
    let (mut one, mut apart) = (run(true), run(false));
    let parameters = one.all.len() - 2;
    assert_eq!(
        parameters,
        Model::new(config, true, dtype).named().len(),
        "{case}"
    );
    if recipe.is_none() {
        for step in [&mut one, &mut apart] {
            step.all.remove("layer.self_attn.k_proj.bias");
        }
    }
    assert_steps(&case, &one, &apart, &sums, tolerance);
    let casts = |step: &Step| {
        step.summary
            .as_ref()
            .map(|summary| (summary.casts(), summary.layers()))
    };
    assert_eq!(casts(&one), casts(&apart), "{case}");
}

fn everywhere(case: &str, config: &TransformerConfig, inputs: &LayerInputs<'_>) {
    for recipe in [None, Some("delayed"), Some("rowwise")] {
        compare(case, config, inputs, DType::F32, recipe);
    }
}

#[test]
fn all_recipes_and_dtypes() {
    for dtype in [DType::F32, DType::BF16] {
        for fused in [false, true] {
            for recomputation in [false, true] {
                let config = config()
                    .with_fused_qkv(fused)
                    .with_recomputation(recomputation);
                let case = format!("fused {fused}, recomputation {recomputation}");
                compare(&case, &config, &Default::default(), dtype, None);
                for recipe in RECIPES {
                    compare(&case, &config, &Default::default(), dtype, Some(recipe));
                }
            }
        }
    }
}

#[test]
fn all_activations() {
    for activation in Activation::all() {
        for fused in [false, true] {
            for recomputation in [false, true] {
                let config = config()
                    .with_hidden_act(activation)
                    .with_fused_gate_up(fused)
                    .with_recomputation(recomputation);
                let case = format!("{activation}, fused {fused}, recomputation {recomputation}");
                everywhere(&case, &config, &Default::default());
                compare(
                    &case,
                    &config,
                    &Default::default(),
                    DType::BF16,
                    Some("current"),
                );
            }
        }
    }
}

#[test]
fn all_ways_to_attend() {
    let attention = AttentionConfig::new(HEADS, 16);
    let (cos, sin) = angles(TOKENS, 16);
    let shapes = [
        ("all tokens", attention.clone()),
        ("causal", attention.clone().with_causal(true)),
        ("window", attention.clone().with_sliding_window(5)),
        (
            "two heads of keys",
            attention
                .clone()
                .with_num_key_value_heads(2)
                .with_causal(true),
        ),
        (
            "one head of keys",
            attention.clone().with_num_key_value_heads(1),
        ),
        (
            "wider heads",
            AttentionConfig::new(HEADS, 32).with_causal(true),
        ),
        ("softmax scale", attention.clone().with_softmax_scale(0.7)),
        (
            "operands of f32",
            attention.clone().with_operands(DType::F32),
        ),
        (
            "operands of bf16",
            attention.clone().with_operands(DType::BF16),
        ),
        (
            "dropout",
            attention
                .clone()
                .with_attention_dropout(0.3)
                .with_causal(true),
        ),
    ];
    for (case, attention) in shapes {
        let (cos, sin) = match attention.head_dim {
            16 => (cos.clone(), sin.clone()),
            head_dim => angles(TOKENS, head_dim),
        };
        for interleaved in [None, Some(false), Some(true)] {
            for lengths in [None, Some(vec![16, 9])] {
                for fused in [false, true] {
                    let own = attention
                        .clone()
                        .with_rope_interleaved(interleaved == Some(true));
                    let config = config().with_attention(own).with_fused_qkv(fused);
                    let mut inputs = LayerInputs::default()
                        .with_key_lengths(lengths.clone())
                        .with_dropout_seed(11);
                    if interleaved.is_some() {
                        inputs = inputs.with_rope(&cos, &sin);
                    }
                    let case =
                        format!("{case}, rope {interleaved:?}, lengths {lengths:?}, fused {fused}");
                    compare(&case, &config, &inputs, DType::F32, None);
                    compare(&case, &config, &inputs, DType::F32, Some("delayed"));
                }
            }
        }
    }
}

#[test]
fn norms_and_biases() {
    for norm in [NormKind::LayerNorm, NormKind::RmsNorm] {
        for placement in [NormPlacement::Pre, NormPlacement::Post] {
            for bias in [false, true] {
                for recomputation in [false, true] {
                    let config = config()
                        .with_norm(norm)
                        .with_norm_placement(placement)
                        .with_bias(bias)
                        .with_recomputation(recomputation);
                    let case = format!("{norm:?}, {placement:?}, bias {bias}");
                    everywhere(&case, &config, &Default::default());
                    compare(&case, &config, &Default::default(), DType::BF16, None);
                }
            }
        }
    }
}

/// Parameters of another dtype than x are cast to it, in both forms.
#[test]
fn parameters_in_f32_under_activations_in_bf16() {
    for recipe in [None, Some("delayed"), Some("rowwise")] {
        for (norm, collects) in [
            (NormKind::LayerNorm, false),
            (NormKind::LayerNorm, true),
            (NormKind::RmsNorm, true),
        ] {
            let config = config().with_norm(norm).with_fused_qkv(true);
            let run = |single| {
                let model = Model::prepared(&config, single, DType::F32);
                let model = Model { collects, ..model };
                model.step(&input(DType::BF16), &Default::default(), recipe)
            };
            let (one, apart) = (run(true), run(false));
            let case = format!("{recipe:?}, {norm:?}, collects {collects}");
            assert_eq!(one.all["y"].dtype(), DType::BF16);
            // As above, a rounding for each token; here of the first step.
            let (sums, tolerance): (&[&str], _) = match recipe {
                None => (&["proj.bias"], (BATCH * TOKENS) as f64 * 2f64.powi(-9)),
                Some(_) => (&[], 0.),
            };
            assert_steps(&case, &one, &apart, sums, tolerance);
        }
    }
}

/// Biases of norms alone in another dtype.
#[test]
fn a_bias_in_f32_behind_a_weight_in_bf16() {
    let run = |single| {
        let part = |seed, dtype| tensor(seed, &[HIDDEN]).to_dtype(dtype).unwrap();
        let norm = LayerNorm::new(part(1, DType::BF16), part(2, DType::F32), 1e-5);
        let weight = tensor(3, &[8, HIDDEN]).to_dtype(DType::BF16).unwrap();
        let layer = LayerNormLinear::new(norm, Linear::new(weight, None));
        let layer = layer.with_single_node(single);
        layer.try_forward(&input(DType::BF16)).unwrap()
    };
    assert_same("y", &run(true), &run(false));
}

/// Products of nodes have no f64: the layers are called one by one.
#[test]
fn f64_layers_are_called_one_by_one() {
    for single in [false, true] {
        let model = Model::new(&config(), single, DType::F64);
        let step = model.step(&input(DType::F64), &Default::default(), None);
        let want = Model::new(&config(), false, DType::F64);
        let want = want.step(&input(DType::F64), &Default::default(), None);
        assert_eq!(step.all["y"].dtype(), DType::F64);
        assert_steps("f64", &step, &want, &[], 0.);
    }
}

/// Gradients that meet where there are no tokens. (candle's linear layer refuses them, so there is nothing to compare with.)
#[test]
fn an_mlp_of_no_tokens() {
    let config = config().with_hidden_act(Activation::SwiGlu);
    let vb = VarBuilder::zeros(DType::F32, &device());
    let mlp = layer_norm_mlp(&config, vb).unwrap();
    let x = Var::zeros((2, 0, HIDDEN), DType::F32, &device()).unwrap();
    let y = mlp.try_forward(&x).unwrap();
    assert_eq!(y.dims(), [2, 0, HIDDEN]);
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(grads.get(&x).unwrap().dims(), [2, 0, HIDDEN]);
}
