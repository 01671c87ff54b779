//! Tokens one by one outside any graph, where keys and values lie in memory that grows.

use crate::support::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use fp8_recipes::nn::{
    AttentionConfig, KeyValues, LayerInputs, TransformerLayer, transformer_layer,
};
use fp8_recipes::{PrepareOptions, prepare_fp8, with_fp8};
use fp8_test_support::{assert_same, normal, rounding};

/// More than memory has room for at first, and than a group of keys.
const LONG: usize = 150;

/// A layer on plain tensors, which a recipe's guard computes with.
fn frozen(own: AttentionConfig) -> TransformerLayer {
    let config = config().with_attention(own);
    let model = Model::new(&config, false, DType::F32);
    let tensors = model.named().into_iter();
    let tensors = tensors.map(|(name, var)| (name, var.as_detached_tensor()));
    let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu);
    let layer = transformer_layer(&config, vb.pp("layer")).unwrap();
    let report = prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
    assert_eq!(report.skipped(), 0, "{report}");
    layer
}

fn causal() -> AttentionConfig {
    AttentionConfig::new(HEADS, 16)
        .with_num_key_value_heads(2)
        .with_causal(true)
}

fn tokens(seed: u64) -> Tensor {
    let x = normal(seed, (BATCH, LONG, HIDDEN));
    x.to_device(&Device::Cpu).unwrap()
}

/// Scales of single rows, so that a row's result does not depend on the others.
fn run(layer: &TransformerLayer, x: &Tensor, cache: Option<&mut KeyValues>) -> Tensor {
    let inputs = LayerInputs::default();
    let y = with_fp8("rowwise", || match cache {
        None => layer.forward(x, &inputs),
        Some(cache) => layer.forward_cached(x, &inputs, cache),
    });
    y.unwrap()
}

fn part(x: &Tensor, start: usize, len: usize) -> Tensor {
    x.narrow(1, start, len).unwrap()
}

/// What a row is does not depend on how the tokens before it have come, nor on what a window has dropped.
#[test]
fn rows_are_those_of_one_pass_to_the_bit() {
    for operands in [None, Some(DType::BF16)] {
        for window in [None, Some(1), Some(5), Some(33), Some(64), Some(100)] {
            let own = causal().with_operands(operands);
            let layer = frozen(own.with_sliding_window(window));
            let x = tokens(3);
            let want = run(&layer, &x, None);
            let long = [vec![100], vec![1; LONG - 100]].concat();
            for chunks in [vec![1; LONG], long, vec![7, 60, 60, 23]] {
                let case = format!("operands {operands:?}, window {window:?}, {chunks:?}");
                let (mut cache, mut start) = (KeyValues::default(), 0);
                for len in chunks {
                    let got = run(&layer, &part(&x, start, len), Some(&mut cache));
                    let case = format!("{case}, from {start}");
                    assert_same(&case, &got, &part(&want, start, len));
                    start += len;
                }
            }
        }
    }
}

/// Copies share memory, but not what they append: the one that comes second gets memory of its own.
#[test]
fn copies_of_a_cache_do_not_see_each_other() {
    for window in [None, Some(20)] {
        let layer = frozen(causal().with_sliding_window(window));
        let (x, y) = (tokens(3), tokens(4));
        let mut first = KeyValues::default();
        run(&layer, &part(&x, 0, 70), Some(&mut first));
        let mut second = first.clone();
        let other = Tensor::cat(&[part(&x, 0, 70), part(&y, 70, LONG - 70)], 1).unwrap();
        let [want_first, want_second] = [&x, &other].map(|x| run(&layer, x, None));
        for token in 70..LONG {
            let case = format!("window {window:?}, token {token}");
            let got = run(&layer, &part(&x, token, 1), Some(&mut first));
            assert_same(&case, &got, &part(&want_first, token, 1));
            let got = run(&layer, &part(&other, token, 1), Some(&mut second));
            assert_same(&case, &got, &part(&want_second, token, 1));
        }
    }
}

/// Lengths count from the first token that the cache holds, also where memory still has tokens before it.
#[test]
fn lengths_count_from_the_first_token_held() {
    let layer = frozen(causal().with_sliding_window(10));
    let x = tokens(3);
    let mut cache = KeyValues::default();
    run(&layer, &part(&x, 0, 30), Some(&mut cache));
    // Ten tokens are held; the second entry of the batch has only the first four of them, and none is its own.
    let inputs = LayerInputs::default().with_key_lengths(vec![11, 4]);
    let attention = layer.attention();
    let next = part(&x, 30, 1);
    let got = attention
        .forward_cached(&next, &inputs, &mut cache.clone())
        .unwrap();
    let whole = attention
        .forward_cached(&next, &LayerInputs::default(), &mut cache.clone())
        .unwrap();
    assert_same("first", &got.get(0).unwrap(), &whole.get(0).unwrap());
    fp8_test_support::assert_differ("second", &got.get(1).unwrap(), &whole.get(1).unwrap());

    // With tokens in a graph, the cache holds exactly ten.
    let traced = Var::from_tensor(&next).unwrap();
    let want = attention
        .forward_cached(traced.as_tensor(), &inputs, &mut cache)
        .unwrap();
    let sums = rounding::two_orders(4 * rounding::roundings(HIDDEN) + 16);
    fp8_test_support::assert_close("traced", &got, &want, sums);
    let loss = want.sqr().unwrap().sum_all().unwrap();
    assert!(loss.backward().unwrap().get(traced.as_tensor()).is_some());
    let after = attention
        .forward_cached(&next, &LayerInputs::default(), &mut cache)
        .unwrap();
    assert!(after.track_op(), "keys in a graph stay in it");
}
