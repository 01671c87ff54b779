//! Attention with products in FP8, as the recipe of a guard says.

use crate::support::*;
use candle_core::{DType, Tensor, Var};
use fp8_recipes::config::{AttentionProducts, Fp8LinearConfig, LayerFilter, Recipe};
use fp8_recipes::nn::{AttentionConfig, LayerInputs, TransformerConfig, checkpoint};
use fp8_recipes::{Autocast, PrepareOptions, fp8_autocast};
use fp8_test_support::{assert_same, flat64};

/// What flows through the sum of the gradients of q's, k's and v's input.
const SUMS: [&str; 2] = ["x", "input_layernorm"];

fn recipe(name: &str, attention: AttentionProducts) -> Recipe {
    name.parse::<Recipe>().unwrap().with_attention(attention)
}

fn all() -> AttentionProducts {
    AttentionProducts::all()
}

fn configs() -> Vec<TransformerConfig> {
    let heads = AttentionConfig::new(HEADS, HIDDEN / HEADS).with_causal(true);
    vec![
        config(),
        config().with_attention(
            (heads
                .clone()
                .with_num_key_value_heads(2)
                .with_sliding_window(5))
            .with_operands(DType::BF16),
        ),
        config().with_attention(heads.with_attention_dropout(0.2)),
    ]
}

#[test]
fn both_forms_give_the_same_bits() {
    for config in configs() {
        for name in ["delayed", "rowwise"] {
            for products in [
                all(),
                all().with_scores(false),
                all().with_grad_inputs(false),
            ] {
                let run = |single| {
                    let model = Model::prepared(&config, single, DType::F32);
                    let inputs = LayerInputs::default().with_dropout_seed(3);
                    let step = || {
                        let autocast = Autocast::new(recipe(name, products));
                        model.step_in(&input(DType::F32), &inputs, Some(autocast))
                    };
                    step();
                    step()
                };
                let case = format!("{name} {products} {config:?}");
                assert_steps(&case, &run(true), &run(false), &SUMS, tolerance(DType::F32));
            }
        }
    }
}

fn result(model: &Model, recipe: Option<Recipe>) -> Step {
    let autocast = recipe.map(Autocast::new);
    model.step_in(&input(DType::F32), &LayerInputs::default(), autocast)
}

fn same(a: &Step, b: &Step) -> bool {
    assert!(!a.all.is_empty() && a.all.keys().eq(b.all.keys()));
    a.all
        .iter()
        .all(|(name, x)| flat64(x) == flat64(&b.all[name]))
}

#[test]
fn attention_follows_the_recipe_of_its_projection() {
    let fresh = |filter: LayerFilter| {
        let model = Model::new(&config(), true, DType::F32);
        fp8_recipes::prepare_fp8(&model.layer, &PrepareOptions::from(filter)).unwrap();
        model
    };
    let whole = || fresh(LayerFilter::default());
    let plain = result(&whole(), Some(recipe("rowwise", AttentionProducts::none())));
    let fp8 = result(&whole(), Some(recipe("rowwise", all())));
    assert!(!same(&plain, &fp8));
    // Not without a guard, nor in one of high precision.
    let model = whole();
    let outside = result(&model, None);
    assert!(same(
        &outside,
        &result(&Model::new(&config(), true, DType::F32), None)
    ));
    let off = Autocast::new(recipe("rowwise", all())).enabled(false);
    let off = model.step_in(&input(DType::F32), &LayerInputs::default(), Some(off));
    assert!(same(&outside, &off));
    // Nor without FP8 state of the projection of results.
    let skipped = || fresh(LayerFilter::new().skip_paths(["o_proj"]));
    let [none, some] = [AttentionProducts::none(), all()]
        .map(|products| result(&skipped(), Some(recipe("rowwise", products))));
    assert!(same(&none, &some));
}

/// Attention alone: no layer is cast, and only the products of attention differ.
#[test]
fn products_alone_change_the_result_a_little() {
    let disabled = |products| Fp8LinearConfig::disabled().with_attention(products).into();
    let model = || Model::prepared(&config(), true, DType::F32);
    let plain = result(&model(), Some(disabled(AttentionProducts::none())));
    let fp8 = result(&model(), Some(disabled(all())));
    for name in ["y", "x"] {
        let (a, b) = (flat64(&plain.all[name]), flat64(&fp8.all[name]));
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / norm(&mut a.iter().copied());
        // Less than one cast to E4M3 at worst, since attention is a part of the sums beside the residual.
        assert!(error > 0. && error < 2f64.powi(-4), "{name}: {error}");
    }
}

/// The second run of a recomputed function sees the recipe of its guard, which has closed by then.
#[test]
fn recomputed_layers_repeat_their_attention() {
    let run = |recomputed: bool| {
        let model = Model::prepared(&config(), true, DType::F32);
        let x = Var::from_tensor(&input(DType::F32)).unwrap();
        let guard = fp8_autocast(recipe("delayed", all())).unwrap();
        let layer = model.layer.clone();
        let call = move |x: &Tensor| layer.forward(x, &LayerInputs::default());
        let y = match recomputed {
            true => checkpoint(call, x.as_tensor()).unwrap(),
            false => call(x.as_tensor()).unwrap(),
        };
        guard.close().unwrap();
        model.backward(&x, y)
    };
    let (plain, again) = (run(false), run(true));
    for (name, want) in &plain.all {
        assert_same(name, &again.all[name], want);
    }
}
