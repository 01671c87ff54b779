//! Tokens one by one.

use crate::support::*;
use candle_core::{DType, Tensor};
use fp8_recipes::nn::{AttentionConfig, KeyValues, LayerInputs};
use fp8_test_support::assert_close;

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
                // Products of one row sum in another order than those of many.
                assert_close(&format!("{case}, fused {fused}"), &got, &want, 1e-5);
            }
        }
    }
}
