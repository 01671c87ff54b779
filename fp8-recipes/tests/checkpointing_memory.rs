//! A checkpointed layer keeps its input and little else.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::nn::{LayerInputs, TransformerConfig, checkpoint, transformer_layer};
use fp8_recipes::{prepare_fp8, with_fp8};
use fp8_test_support::memory::{Counting, held};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that the graph of `f` keeps beside its result.
fn kept(f: impl Fn() -> Tensor) -> isize {
    let before = held();
    let y = f();
    assert!(y.track_op());
    let result = y.elem_count() * y.dtype().size_in_bytes();
    held() - before - result as isize
}

#[test]
fn a_transformer_layer_keeps_a_fifth_at_most() {
    let device = Device::Cpu;
    for recipe in ["delayed", "rowwise", "hybrid"] {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
        let config = TransformerConfig::new(64, 4).with_causal(true);
        let layer = transformer_layer(&config, vb).unwrap();
        prepare_fp8(&layer, &Default::default()).unwrap();
        let x = || Tensor::ones((4, 128, 64), DType::F32, &device).unwrap();
        let own = layer.clone();
        let plain = || {
            let x = x();
            with_fp8(recipe, || own.forward(&x, &LayerInputs::default())).unwrap()
        };
        let checkpointed = || {
            let (x, layer) = (x(), layer.clone());
            let f = move |x: &Tensor| layer.forward(x, &LayerInputs::default());
            with_fp8(recipe, || checkpoint(f, &x)).unwrap()
        };
        // Caches of weights, buffers, threads.
        for _ in 0..3 {
            plain();
            checkpointed();
        }
        let (plain, checkpointed) = (kept(plain), kept(checkpointed));
        let input = (4 * 128 * 64 * 4) as isize;
        let beyond = checkpointed - input;
        println!(
            "{recipe}: {plain} bytes kept, {checkpointed} checkpointed: {beyond} beyond the input of {input}, {:.4} of {}",
            beyond as f64 / (plain - input) as f64,
            plain - input
        );
        // The measurement notices what a layer keeps: attention's operands alone are three times the input.
        assert!(plain > 4 * input, "{recipe}: {plain}");
        assert!(beyond * 5 <= plain - input, "{recipe}: {beyond} of {plain}");
    }
}
