//! The memory that a layer keeps for its backward pass.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::{Fp8LinearConfig, KeptActivations};
use fp8_recipes::nn::{
    AttentionConfig, LayerInputs, TransformerConfig, TransformerLayer, transformer_layer,
};
use fp8_recipes::{PrepareOptions, RecipeName, end_step, fp8_autocast, prepare_fp8};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

/// Smaller allocations belong to the graph, to scales and to the test itself.
const LEAST: usize = 2048;

/// The large sizes seen so far, and how many allocations of each live.
static SIZES: [AtomicUsize; 256] = [const { AtomicUsize::new(0) }; 256];
static LIVE: [AtomicIsize; 256] = [const { AtomicIsize::new(0) }; 256];

fn note(size: usize, change: isize) {
    if size < LEAST {
        return;
    }
    for (own, live) in SIZES.iter().zip(&LIVE) {
        let found = own.compare_exchange(0, size, Ordering::Relaxed, Ordering::Relaxed);
        if found.is_ok() || found == Err(size) {
            live.fetch_add(change, Ordering::Relaxed);
            return;
        }
    }
}

fn live() -> Vec<(usize, isize)> {
    let pairs = SIZES.iter().zip(&LIVE);
    pairs
        .map(|(size, live)| (size.load(Ordering::Relaxed), live.load(Ordering::Relaxed)))
        .collect()
}

struct Counting;

// SAFETY: all calls go to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 1);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(layout.size(), -1);
        note(size, 1);
        // SAFETY: as above; the memory comes from the same allocator.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note(layout.size(), -1);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
    let mut bytes = 0;
    // In the second step weights are cast and kept, and all helpers run.
    for step in 0..2 {
        let before = live();
        let guard = fp8_autocast(recipe.clone()).unwrap();
        let y = layer.forward(x, &LayerInputs::default()).unwrap();
        let after = live();
        y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        guard.close().unwrap();
        end_step().unwrap();
        if step == 0 {
            continue;
        }
        println!("{case}");
        let mut rows = vec![];
        for (i, (size, live)) in after.into_iter().enumerate() {
            // A size seen for the first time has no earlier entry.
            let count = live - before.get(i).map_or(0, |(_, live)| *live);
            if count != 0 {
                rows.push((size, count));
            }
        }
        rows.sort();
        for (size, count) in &rows {
            let each = *size as f64 / (BATCH * TOKENS * HIDDEN) as f64;
            println!("{count:>6} of {size:>9} bytes, {each:.3} for each feature of a token");
        }
        let sum: isize = rows
            .iter()
            .map(|(size, count)| *size as isize * count)
            .sum();
        // The input of the first norm is the result of the layer before: in torch's sum, and here instead of the own result.
        bytes = usize::try_from(sum).unwrap();
        assert_eq!((x.elem_count(), x.dtype()), (y.elem_count(), y.dtype()));
        println!(
            "{:.2} in all, with the input instead of the result\n",
            bytes as f64 / (BATCH * TOKENS * HIDDEN) as f64
        );
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
    // The measurement sees the layers' results, which candle's graph keeps.
    assert!(apart > torch, "{apart}");
    assert!(again < one && one < apart, "{again}, {one}, {apart}");
    // Without kernels for attention, queries, keys and values stay in f32, 6 bytes more of torch's 36.
    let bound = match fp8_core::Isa::best().level() {
        fp8_core::IsaLevel::Portable => 0.55 + 6. / 36.,
        #[cfg(target_arch = "aarch64")]
        fp8_core::IsaLevel::Neon => 0.55 + 6. / 36.,
        _ => 0.55,
    };
    assert!(again as f64 <= bound * torch as f64, "{again} of {torch}");
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
