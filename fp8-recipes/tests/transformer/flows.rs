//! Tokens one by one.

use crate::support::*;
use candle_core::{DType, Tensor};
use fp8_recipes::nn::{AttentionConfig, KeyValues, LayerInputs};
use fp8_test_support::flat64;

/// Euclidean norm of the difference. A norm of thousands of rounding errors depends little on their order.
fn distance(x: &Tensor, exact: &Tensor) -> f64 {
    assert_eq!(x.dims(), exact.dims());
    let pairs = flat64(x).into_iter().zip(flat64(exact));
    pairs
        .map(|(x, exact)| (x - exact).powi(2))
        .sum::<f64>()
        .sqrt()
}

/// Chunks of tokens with those before them cached give what the whole sequence gives.
#[test]
fn tokens_in_chunks_are_those_of_the_whole_sequence() {
    let own = AttentionConfig::new(HEADS, 16).with_causal(true);
    let (cos, sin) = angles(TOKENS, 16);
    let x = input(DType::F32);
    for (case, own) in [
        ("causal", own.clone()),
        ("two heads of keys", own.clone().with_num_key_value_heads(2)),
        ("window", own.clone().with_sliding_window(5)),
        ("window of one", own.clone().with_sliding_window(1)),
        ("interleaved", own.clone().with_rope_interleaved(true)),
    ] {
        for fused in [false, true] {
            let config = config().with_attention(own.clone()).with_fused_qkv(fused);
            let model = Model::new(&config, true, DType::F32);
            let rope = |start: usize, len: usize| {
                (
                    cos.narrow(0, start, len).unwrap(),
                    sin.narrow(0, start, len).unwrap(),
                )
            };
            let want = {
                let inputs = LayerInputs::default().with_rope(&cos, &sin);
                model.layer.forward(&x, &inputs).unwrap()
            };
            let exact = {
                let model = Model::new(&config, false, DType::F64);
                let [cos, sin] = [&cos, &sin].map(|x| x.to_dtype(DType::F64).unwrap());
                let inputs = LayerInputs::default().with_rope(&cos, &sin);
                let x = x.to_dtype(DType::F64).unwrap();
                model.layer.forward(&x, &inputs).unwrap()
            };
            for chunks in [vec![1; TOKENS], vec![7, 1, 1, 4, 3], vec![TOKENS]] {
                let mut cache = KeyValues::default();
                let mut parts = vec![];
                let mut start = 0;
                for len in chunks {
                    let (cos, sin) = rope(start, len);
                    let inputs = LayerInputs::default().with_rope(&cos, &sin);
                    let part = x.narrow(1, start, len).unwrap();
                    parts.push(
                        model
                            .layer
                            .forward_cached(&part, &inputs, &mut cache)
                            .unwrap(),
                    );
                    start += len;
                }
                let got = Tensor::cat(&parts, 1).unwrap();
                assert_eq!(got.dims(), want.dims(), "{case}");
                // Products of one row add the same terms in another order than those of many.
                let (got, allowed) = (distance(&got, &exact), 2. * distance(&want, &exact));
                assert!(
                    got <= allowed,
                    "{case}, fused {fused}: {got:e} > {allowed:e}"
                );
            }
        }
    }
}
