//! Dropout: the same masks in both forms and in both passes, others for another seed, layer or place.

use crate::support::*;
use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::nn::{
    AttentionConfig, LayerInputs, NormPlacement, TransformerConfig, TransformerLayer,
    transformer_layer,
};
use fp8_test_support::{assert_differ, assert_same, bits, device, flat};

fn dropping(hidden: f64, attention: f64) -> TransformerConfig {
    let own = AttentionConfig::new(HEADS, 16)
        .with_causal(true)
        .with_attention_dropout(attention);
    config()
        .with_attention(own)
        .with_fused_qkv(true)
        .with_hidden_dropout(hidden)
}

fn seeded(seed: u64) -> LayerInputs<'static> {
    LayerInputs::default().with_dropout_seed(seed)
}

#[test]
fn both_forms_drop_the_same_in_both_passes() {
    for (hidden, attention) in [(0.2, 0.), (0., 0.2), (0.4, 0.3)] {
        for placement in [NormPlacement::Pre, NormPlacement::Post] {
            for recipe in [None, Some("delayed"), Some("rowwise")] {
                for recomputation in [false, true] {
                    let config = dropping(hidden, attention)
                        .with_norm_placement(placement)
                        .with_recomputation(recomputation);
                    let run = |single, seed| {
                        let model = Model::prepared(&config, single, DType::F32);
                        model.step(&input(DType::F32), &seeded(seed), recipe)
                    };
                    let case = format!("{hidden}, {attention}, {placement:?}, {recipe:?}");
                    let one = run(true, 5);
                    assert_steps(&case, &one, &run(false, 5), &[], 0.);
                    assert_differ(&case, &one.all["y"], &run(true, 6).all["y"]);
                }
            }
        }
    }
}

#[test]
fn without_a_seed_nothing_is_dropped() {
    for single in [false, true] {
        let run = |config: &TransformerConfig, inputs: &LayerInputs<'_>| {
            let model = Model::new(config, single, DType::F32);
            model.layer.forward(&input(DType::F32), inputs).unwrap()
        };
        let without = run(&dropping(0., 0.), &LayerInputs::default());
        assert_same(
            "no seed",
            &run(&dropping(0.5, 0.5), &LayerInputs::default()),
            &without,
        );
        assert_same("no share", &run(&dropping(0., 0.), &seeded(1)), &without);
    }
}

/// Two layers of one stack, of the same values.
fn layers(single: bool) -> [TransformerLayer; 2] {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let config = dropping(0.5, 0.);
    let layers = [0, 1].map(|i| transformer_layer(&config, vb.pp("layers").pp(i)).unwrap());
    let vars = vars.data().lock().unwrap();
    for (name, var) in vars
        .iter()
        .filter(|(name, _)| name.starts_with("layers.0."))
    {
        vars[&name.replacen('0', "1", 1)].set(var).unwrap();
    }
    layers.map(|layer| layer.with_single_node(single))
}

#[test]
fn every_layer_and_place_has_a_mask_of_its_own() {
    for single in [false, true] {
        let [a, b] = layers(single);
        let x = input(DType::F32);
        let plain = |layer: &TransformerLayer| layer.forward(&x, &Default::default()).unwrap();
        assert_same("the layers are the same", &plain(&a), &plain(&b));
        let y = a.forward(&x, &seeded(1)).unwrap();
        assert_differ("layers", &y, &b.forward(&x, &seeded(1)).unwrap());
        assert_differ("seeds", &y, &a.forward(&x, &seeded(2)).unwrap());
        assert_same("again", &y, &a.forward(&x, &seeded(1)).unwrap());
    }
}

/// Where attention and MLP are both dropped the layer is the identity: a quarter of the elements if the masks are two, half of
/// them if they were one.
#[test]
fn attention_and_mlp_have_two_masks() {
    let [layer, _] = layers(true);
    let x = Var::from_tensor(&input(DType::F32)).unwrap();
    let y = layer.forward(&x, &seeded(1)).unwrap();
    let kept = |y: &Tensor| {
        let pairs = bits(y).into_iter().zip(bits(&x));
        pairs.filter(|(y, x)| y == x).count() as f64 / flat(&x).len() as f64
    };
    // 2048 elements: the share of a quarter has a standard deviation of a hundredth.
    let share = kept(&y);
    assert!((0.2..0.3).contains(&share), "{share}");
}
