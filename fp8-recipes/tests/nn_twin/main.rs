//! The twin of candle_nn: nothing that candle-nn cuts out of the graph is left in it, and its layers enter spans.
//!
//! The source of candle-nn says which functions lose gradients; each of them is called here through the twin, with values and
//! gradients checked against finite differences of the form that tracks no gradient.

mod flash_attention;
mod kv_caches;
mod scan;
mod spans;
mod sweep;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use flash_attention::{flash, varlen};
use fp8_recipes::nn::attention::{self, AttnMask, cpu_flash};
use fp8_recipes::nn::{self, kv_cache, moe, ops, rotary_emb};
use fp8_test_support::differences::Slope;
use fp8_test_support::rounding::{LAMBDA, UNIT, UNIT_F64};
use fp8_test_support::{assert_within, flat, flat64, largest, wave};
use kv_caches::{caches, rotating, scattered};
use std::collections::BTreeMap;

type Check = fn();

/// Every item of candle-nn that may lose a gradient, with what shows that the twin's does not.
fn checks() -> BTreeMap<&'static str, Check> {
    BTreeMap::from([
        ("ops::softmax_last_dim", softmax as Check),
        ("ops::rms_norm", rms_norm),
        ("ops::layer_norm", layer_norm),
        ("ops::sdpa", sdpa),
        ("rotary_emb::rope", rope),
        ("rotary_emb::rope_i", rope),
        ("rotary_emb::rope_thd", rope),
        ("layer_norm::LayerNorm", norms),
        ("layer_norm::RmsNorm", norms),
        ("layer_norm::rms_norm", norms),
        ("layer_norm::layer_norm_no_bias", norms),
        ("attention::cpu_flash::flash_attn", flash),
        ("attention::cpu_flash::standard::run_flash_attn_cpu", flash),
        ("attention::cpu_flash::causal::run_causal_attn_cpu", flash),
        (
            "attention::cpu_flash::varlen::flash_attn_varlen_cpu",
            varlen,
        ),
        ("attention::varlen::flash_attn_varlen_unfused", varlen),
        ("cpu_flash_attention::run_flash_attn_cpu", flash),
        ("kv_cache::Cache", caches),
        ("kv_cache::KvCache", caches),
        ("kv_cache::ConcatKvCache", caches),
        ("kv_cache::InterleavedKvCache", caches),
        ("kv_cache::RotatingCache", rotating),
        ("kv_cache::RotatingKvCache", rotating),
        ("kv_cache::ScatteredKvCache", scattered),
        ("moe::moe_gemm", mixture_of_experts),
        ("moe::moe_gemm_gguf", mixture_of_experts),
    ])
}

/// Items that read values of tensors that no gradient goes through.
const HARMLESS: [&str; 1] = [
    // Indexes.
    "encoding::one_hot",
];

/// Behind features of candle-nn that this workspace does not have.
const ABSENT: [&str; 3] = [
    "moe::cutile::MoeRouting",
    "moe::cutile::routed_grouped_matmul",
    "moe::cutile::warmup_routed_grouped_matmul",
];

#[test]
fn every_item_of_candle_nn_that_loses_gradients_has_a_twin_that_does_not() {
    let found = scan::cutting(&scan::candle_nn());
    let checks = checks();
    let known = checks.keys().chain(&HARMLESS).chain(&ABSENT);
    let known = known.map(|item| item.to_string()).collect();
    let new: Vec<_> = found.difference(&known).collect();
    assert!(new.is_empty(), "candle-nn has more of them: {new:?}");
    let gone: Vec<_> = known.difference(&found).collect();
    assert!(gone.is_empty(), "these are no longer found: {gone:?}");
    for (item, check) in checks {
        println!("{item}");
        check();
    }
}

/// The most roundings that a term of a result here goes through: five steps of a recurrent network, or attention, where the
/// roundings of a score of size 3 count as often again in its exponential.
const ROUNDINGS: f64 = 128.;

/// How far a result may be off, as a share of the largest: the bound for signs as good as random of
/// `fp8_test_support::rounding`.
fn share(dtype: DType) -> f64 {
    let unit = match dtype {
        DType::F64 => UNIT_F64,
        _ => UNIT,
    };
    LAMBDA * unit * ROUNDINGS.sqrt()
}

/// Runs `f` with and without gradients tracked: the values agree, and the gradient of every input equals finite differences
/// of the untracked form.
fn check(what: &str, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    check_with(what, inputs, 2f64.powi(-12), 0., f);
}

/// [`check`] for GELU, whose backward pass in candle has constants of six digits. Each is off by less than 7e-7 of itself: the two
/// of the tanh by that much of 0.83 together, and its slope by twice that, the others by that much of 0.45.
fn check_gelu(what: &str, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let digits = 7e-7 * (0.5 * 0.83 + 2. * 0.83 * 0.45 + 0.45);
    check_with(what, inputs, 2f64.powi(-12), digits, f);
}

/// [`check`] for what candle-nn computes in f32 alone. There a larger step costs less.
fn check_in_f32(what: &str, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let inputs = inputs.iter().map(|x| x.to_dtype(DType::F32).unwrap());
    check_with(what, &inputs.collect::<Vec<_>>(), 2f64.powi(-4), 0., f);
}

/// `slack`: how far a gradient may be off beside all rounding.
fn check_with(
    what: &str,
    inputs: &[Tensor],
    step: f64,
    slack: f64,
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let vars = inputs.iter().map(|x| Var::from_tensor(x).unwrap());
    let vars: Vec<Var> = vars.collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors).unwrap_or_else(|error| panic!("{what}: {error}"));
    let plain = f(inputs).unwrap_or_else(|error| panic!("{what}, untracked: {error}"));
    let dtype = inputs[0].dtype();
    assert_eq!((y.dtype(), plain.dtype()), (dtype, dtype), "{what}");
    // Each of the two is off by `rounding`.
    let rounding = share(dtype) * largest(&plain);
    assert_within(what, &y, &plain, |_, _| 2. * rounding);
    let weights = wave(y.dims(), 29);
    let loss = (&y * weights.to_dtype(dtype).unwrap()).unwrap();
    let grads = loss.sum_all().unwrap().backward().unwrap();
    let weights = flat64(&weights);
    let norm = weights.iter().map(|w| w * w).sum::<f64>().sqrt();
    for (n, var) in vars.iter().enumerate() {
        let grad = grads.get(var);
        let grad = grad.unwrap_or_else(|| panic!("{what}: input {n} has no gradient"));
        let scale = largest(grad);
        assert!(scale > 0., "{what}: the gradient of input {n} is 0");
        let grad = flat64(grad);
        for at in (0..grad.len()).step_by(grad.len().div_ceil(7)) {
            let slope = Slope::of(step, |by| {
                let mut x = flat64(&inputs[n]);
                x[at] += by;
                let mut inputs = inputs.to_vec();
                let shifted = Tensor::from_vec(x, inputs[n].dims(), &Device::Cpu);
                inputs[n] = shifted.and_then(|x| x.to_dtype(dtype)).unwrap();
                let y = flat64(&f(&inputs).unwrap());
                y.iter().zip(&weights).map(|(y, w)| y * w).sum()
            });
            // Elements are off independently of each other. The input itself is rounded after a step.
            let x = flat64(&inputs[n])[at].abs() + 4. * step;
            let of_sum = rounding * norm + share(dtype) * x * slope.value.abs();
            let bound = slope.bound(of_sum) + share(dtype) * scale.max(1.) + slack;
            let error = (grad[at] - slope.value).abs();
            assert!(
                error <= bound && bound <= 2e-3 * scale.max(1.),
                "{what}: input {n}, element {at}: gradient {}, slope {} +- {bound:e}",
                grad[at],
                slope.value
            );
        }
    }
}

fn softmax() {
    check("softmax_last_dim", &[wave(&[2, 3, 5], 1)], |x| {
        ops::softmax_last_dim(&x[0])
    });
}

fn rms_norm() {
    check("rms_norm", &[wave(&[2, 3, 8], 1), wave(&[8], 2)], |x| {
        ops::rms_norm(&x[0], &x[1], 1e-5)
    });
}

fn layer_norm() {
    let inputs = [wave(&[2, 3, 8], 1), wave(&[8], 2), wave(&[8], 3)];
    check("layer_norm", &inputs, |x| {
        ops::layer_norm(&x[0], &x[1], &x[2], 1e-5)
    });
}

fn sdpa() {
    // Grouped heads, more keys than queries.
    let inputs = [
        wave(&[2, 4, 3, 8], 1),
        wave(&[2, 2, 5, 8], 2),
        wave(&[2, 2, 5, 8], 3),
    ];
    let mask = wave(&[2, 4, 3, 5], 4);
    let mut hidden = flat64(&mask);
    hidden[1] = f64::NEG_INFINITY;
    let mask = Tensor::from_vec(hidden, mask.dims(), &Device::Cpu).unwrap();
    for (mask, causal, cap) in [
        (None, false, 1.),
        (None, true, 1.),
        (Some(&mask), false, 1.),
        (Some(&mask), true, 0.7),
        (None, false, 0.7),
    ] {
        let what = format!("sdpa, mask {}, causal {causal}, cap {cap}", mask.is_some());
        check(&what, &inputs, |x| {
            ops::sdpa(&x[0], &x[1], &x[2], mask, causal, 0.4, cap)
        });
    }
    // Values of another size than keys.
    let inputs = [
        wave(&[1, 2, 3, 8], 1),
        wave(&[1, 2, 4, 8], 2),
        wave(&[1, 2, 4, 6], 3),
    ];
    check("sdpa, d_v", &inputs, |x| {
        ops::sdpa(&x[0], &x[1], &x[2], None, true, 0.4, 1.)
    });
}

fn rope() {
    type Rope = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
    let all: [(&str, Rope, Rope); 3] = [
        ("rope", rotary_emb::rope, candle_nn::rotary_emb::rope),
        ("rope_i", rotary_emb::rope_i, candle_nn::rotary_emb::rope_i),
        (
            "rope_thd",
            rotary_emb::rope_thd,
            candle_nn::rotary_emb::rope_thd,
        ),
    ];
    for (name, ours, candles) in all {
        // candle-nn takes the wrong rows where each row of the batch has more angles than positions.
        for angles in [&[6usize, 4][..], &[2, 4, 4]] {
            let what = format!("{name}, angles {angles:?}");
            // Four positions.
            let x = match name {
                "rope_thd" => wave(&[2, 4, 3, 8], 1),
                _ => wave(&[2, 3, 4, 8], 1),
            };
            let (cos, sin) = (wave(angles, 2), wave(angles, 3));
            let expected = candles(&x, &cos, &sin).unwrap();
            let got = ours(&x, &cos, &sin).unwrap();
            // Two products below 1 and their sum, three roundings, in each of the two.
            assert_within(&what, &got, &expected, |_, _| 2. * 4. * UNIT_F64);
            check(&what, &[x.clone(), cos, sin], |x| ours(&x[0], &x[1], &x[2]));
        }
    }
}

#[test]
fn angles_that_do_not_fit_are_refused() {
    let x = wave(&[1, 3, 4, 8], 1);
    let fits = wave(&[4, 4], 3);
    // Of all features instead of half of them, of another batch, of too few positions.
    for angles in [[1, 4, 8], [3, 4, 4], [1, 3, 4]] {
        let angles = wave(&angles, 2);
        for rope in [rotary_emb::rope, rotary_emb::rope_i] {
            for (cos, sin) in [(&angles, &fits), (&fits, &angles)] {
                let error = rope(&x, cos, sin).unwrap_err().to_string();
                assert!(error.contains("rope: shape"), "{error}");
            }
        }
    }
    // Of an odd number of features the last one would be lost.
    let (x, angles) = (wave(&[1, 3, 4, 9], 1), wave(&[1, 4, 4], 2));
    let error = rotary_emb::rope(&x, &angles, &angles).unwrap_err();
    assert!(error.to_string().contains("an even d, here 9"), "{error}");
}

#[test]
fn norms() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
    let affine = nn::layer_norm(8, 1e-5, vb.pp("a")).unwrap();
    let no_bias = nn::layer_norm_no_bias(8, 1e-5, vb.pp("b")).unwrap();
    let rms = nn::rms_norm(8, 1e-5, vb.pp("c")).unwrap();
    check("LayerNorm", &[wave(&[3, 8], 1)], |x| affine.forward(&x[0]));
    check("LayerNorm without a bias", &[wave(&[3, 8], 1)], |x| {
        no_bias.forward(&x[0])
    });
    check("RmsNorm", &[wave(&[3, 8], 1)], |x| rms.forward(&x[0]));
    check("RmsNorm::forward_diff", &[wave(&[3, 8], 1)], |x| {
        rms.forward_diff(&x[0])
    });
    assert_eq!((affine.eps(), affine.remove_mean()), (1e-5, true));
    assert_eq!((rms.eps(), rms.path()), (1e-5, Some("c")));
    assert!(!rms.into_inner().remove_mean());
    // The old names of transformers' checkpoints.
    let old = [("n.gamma", wave(&[8], 1)), ("n.beta", wave(&[8], 2))];
    let old = old.map(|(name, tensor)| (name.to_string(), tensor));
    let vb = VarBuilder::from_tensors(old.into(), DType::F32, &Device::Cpu);
    let (ours, candles) = (
        nn::layer_norm(8, 1e-5, vb.pp("n")).unwrap(),
        candle_nn::layer_norm(8, 1e-5, vb.pp("n")).unwrap(),
    );
    assert_eq!(flat(ours.weight()), flat(candles.weight()));
    assert_eq!(flat(ours.bias().unwrap()), flat(candles.bias().unwrap()));
}

#[test]
fn mixture_of_experts() {
    use candle_core::quantized::{GgmlDType, QTensor};
    let in_f32 = |dims: &[usize], seed| wave(dims, seed).to_dtype(DType::F32).unwrap();
    let (x, w) = (in_f32(&[2, 32], 1), in_f32(&[3, 4, 32], 2));
    let ids = Tensor::new(&[0u32, 1], &Device::Cpu).unwrap();
    let var = Var::from_tensor(&x).unwrap();
    let run = |x: &Tensor| moe::moe_gemm(x, &w, &None, &ids, &ids, 1, true);
    let quantized = QTensor::quantize(&w, GgmlDType::Q8_0).unwrap();
    let run_gguf =
        |x: &Tensor| moe::moe_gemm_gguf(x, &quantized, &None, &ids, &ids, 1, true, DType::F16);
    for (tracked, plain) in [(run(&var), run(&x)), (run_gguf(&var), run_gguf(&x))] {
        let error = tracked.unwrap_err().to_string();
        assert!(error.contains("has no backward pass"), "{error}");
        let error = plain.unwrap_err().to_string();
        assert!(error.contains("only implemented for the cuda"), "{error}");
    }
}

#[test]
fn cross_entropy_is_candles() {
    let target = Tensor::new(&[2u32, 0, 4], &Device::Cpu).unwrap();
    let x = wave(&[3, 5], 1);
    check("cross_entropy", std::slice::from_ref(&x), |x| {
        nn::loss::cross_entropy(&x[0], &target)
    });
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let x = x.to_dtype(dtype).unwrap();
        let ours = nn::loss::cross_entropy(&x, &target).unwrap();
        let wide = x.to_dtype(DType::F64).unwrap();
        let candles = candle_nn::loss::cross_entropy(&wide, &target).unwrap();
        assert_eq!((ours.dtype(), ours.dims()), (dtype, candles.dims()));
        // Computed in f32 at least, and rounded once to the dtype.
        let last = match dtype {
            DType::BF16 => 2f64.powi(-8),
            _ => 0.,
        };
        let ours = ours.to_dtype(DType::F64).unwrap();
        let what = format!("{dtype:?}");
        assert_within(&what, &ours, &candles, |_, loss| {
            (share(dtype) + last) * loss.max(1.)
        });
    }
}
