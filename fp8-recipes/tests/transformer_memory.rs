//! The memory that a layer keeps for its backward pass.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::{AttentionProducts, Fp8LinearConfig, KeptActivations};
use fp8_recipes::nn::{
    AttentionConfig, LayerInputs, TransformerConfig, TransformerLayer, transformer_layer,
};
use fp8_recipes::{PrepareOptions, Recipe, RecipeName, end_step, fp8_autocast, prepare_fp8};
use fp8_test_support::memory::{Counting, held};

/// Smaller allocations belong to the graph, to scales and to the test itself.
const LEAST: usize = 2048;

#[global_allocator]
static ALLOCATOR: Counting<LEAST> = Counting;

const HIDDEN: usize = 256;
const BATCH: usize = 8;
const TOKENS: usize = 128;

/// Bytes for each feature of each token that torch keeps of a block under autocast to bf16: both inputs of norms in f32, both
/// results of norms cast to bf16, q, k and v, the result of attention, input and result of GELU.
const TORCH: usize = 4 + 4 + 2 + 2 + 6 + 2 + 8 + 8;

fn layer(single: bool, recomputation: bool) -> TransformerLayer {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    // As torch's autocast.
    let own = AttentionConfig::new(8, HIDDEN / 8).with_operands(DType::BF16);
    let config = TransformerConfig::new(HIDDEN, 8)
        .with_attention(own)
        .with_causal(true)
        .with_recomputation(recomputation);
    let layer = transformer_layer(&config, vb.pp("layer")).unwrap();
    prepare_fp8(&layer, &PrepareOptions::default()).unwrap();
    layer.with_single_node(single)
}

/// Bytes that live because of a graph, with its input and without its result.
fn kept(case: &str, layer: &TransformerLayer, x: &Tensor) -> usize {
    kept_as(case, layer, x, KeptActivations::HighPrecision)
}

fn kept_as(case: &str, layer: &TransformerLayer, x: &Tensor, how: KeptActivations) -> usize {
    let recipe = Fp8LinearConfig::from_recipe_name(RecipeName::Delayed).with_kept_activations(how);
    kept_by(case, recipe.into(), layer, x)
}

/// [`kept`] under a recipe.
fn kept_by(case: &str, recipe: Recipe, layer: &TransformerLayer, x: &Tensor) -> usize {
    let mut bytes = 0;
    // In the second step weights are cast and kept, and all helpers run.
    for step in 0..2 {
        let before = held();
        let guard = fp8_autocast(recipe.clone()).unwrap();
        let y = layer.forward(x, &LayerInputs::default()).unwrap();
        // The input of the first norm is the result of the layer before: in torch's sum, and here instead of the own result.
        bytes = usize::try_from(held() - before).unwrap();
        y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        guard.close().unwrap();
        end_step().unwrap();
        assert_eq!((x.elem_count(), x.dtype()), (y.elem_count(), y.dtype()));
        if step == 1 {
            let each = bytes as f64 / (BATCH * TOKENS * HIDDEN) as f64;
            println!(
                "{case}: {each:.3} bytes for each feature of a token, with the input instead of the result"
            );
        }
    }
    bytes
}

/// One test, since it counts the allocations of the whole process.
#[test]
fn layers_keep_less_than_bf16_does() {
    computing_again();
    in_fp8();
}

/// A layer that computes again keeps half of what torch's bf16 keeps.
fn computing_again() {
    let x = Var::randn(0f32, 1., (BATCH, TOKENS, HIDDEN), &Device::Cpu).unwrap();
    let torch = TORCH * BATCH * TOKENS * HIDDEN;
    let apart = kept("layers one by one", &layer(false, false), &x);
    let one = kept("one node", &layer(true, false), &x);
    let again = kept("one node that computes again", &layer(true, true), &x);
    println!("of torch's: {:.3}", again as f64 / torch as f64);
    // Codes of q, k and v with a scale of four bytes for each head, where copies in bf16 were, or without kernels in f32.
    let recipe = Recipe::from(RecipeName::Delayed).with_attention(AttentionProducts::all());
    let fp8 = kept_by("FP8 attention", recipe, &layer(true, false), &x);
    let tokens = BATCH * TOKENS;
    assert!(
        fp8 + 3 * tokens * HIDDEN <= one + 3 * tokens * 8 * 4,
        "{fp8}, {one}"
    );
    // The measurement sees the layers' results, which candle's graph keeps.
    assert!(apart > torch, "{apart}");
    assert!(again < one && one < apart, "{again}, {one}, {apart}");
    // Without kernels for attention, queries, keys and values stay in f32, 6 bytes more of torch's 36.
    let more = match fp8_core::Isa::best().level() {
        fp8_core::IsaLevel::Portable => 6.,
        #[cfg(target_arch = "aarch64")]
        fp8_core::IsaLevel::Neon => 6.,
        _ => 0.,
    };
    let bound = 0.55 + more / 36.;
    assert!(again as f64 <= bound * torch as f64, "{again} of {torch}");
    // The guide's table: the inputs of norms, q, k and v in bf16, attention's result in codes; and the codes of the norms' results, the
    // input of GELU and the codes of its result. Beside these scales, log-sum-exps and the like, as below.
    let each = |bytes: usize| bytes as f64 / (tokens * HIDDEN) as f64;
    for (got, expected) in [(one, 37. + more), (again, 15. + more)] {
        let got = each(got);
        assert!(
            got >= expected && got <= expected + 0.4,
            "{got} of {expected}"
        );
    }
}

/// One that also keeps activations in FP8, a third.
fn in_fp8() {
    let x = Var::randn(0f32, 1., (BATCH, TOKENS, HIDDEN), &Device::Cpu).unwrap();
    let features = (BATCH * TOKENS * HIDDEN) as f64;
    let each = |bytes: usize| bytes as f64 / features;
    let fp8 = |case, again| {
        each(kept_as(
            case,
            &layer(true, again),
            &x,
            KeptActivations::fp8(),
        ))
    };
    let codes = fp8("one node, FP8", false);
    let again = fp8("one node that computes again, FP8", true);
    println!(
        "of torch's: {:.3}, {:.3}",
        codes / TORCH as f64,
        again / TORCH as f64
    );
    // A scale for 128 codes, and attention's log-sum-exps: 4 bytes for each of 8 heads.
    let (code, sums) = (1. + 4. / 128., 4. * 8. / HIDDEN as f64);
    // The input, which candle's graph holds; the other norm's input, q, k and v; attention's result in the codes of its projection.
    let expected = 4. + 4. * code + 1. + sums;
    // Small tensors whose sizes do not follow the number of tokens: biases, parameters of norms, boxes of the graph.
    let others = 0.15;
    assert!(
        again >= expected && again <= expected + others,
        "{again} of {expected}"
    );
    assert!(again <= 0.35 * TORCH as f64);
    // The codes of both norms' results, the input of GELU and the codes of its result.
    let expected = expected + 2. + 4. * code + 4.;
    assert!(
        codes >= expected && codes <= expected + others,
        "{codes} of {expected}"
    );
}
