//! The twin of candle_nn: nothing that candle-nn cuts out of the graph is left in it.
//!
//! The source of candle-nn says which functions lose gradients; each of them is called here through the twin, with values and
//! gradients checked against finite differences of the form that tracks no gradient.

mod flash_attention;
mod kv_caches;

mod scan;
mod sweep;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use flash_attention::{flash, varlen};
use fp8_recipes::nn::attention::{self, AttnMask, cpu_flash};
use fp8_recipes::nn::{self, kv_cache, moe, ops, rotary_emb};
use fp8_test_support::flat;
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

/// Values in (-1, 1) without a pattern.
fn wave(seed: usize, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let value = |i: usize| (((i + 3) * (2 * seed + 7)) as f32 * 12.9898).sin();
    Tensor::from_vec((0..count).map(value).collect(), shape, &Device::Cpu).unwrap()
}

fn sum_of_products(y: &Tensor, weights: &Tensor) -> f64 {
    let products = flat(y).into_iter().zip(flat(weights));
    products.map(|(y, w)| f64::from(y) * f64::from(w)).sum()
}

/// Runs `f` with and without gradients tracked: the values agree, and the gradient of every input equals central differences
/// of the untracked form.
fn check(what: &str, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    const STEP: f32 = 5e-3;
    let vars: Vec<Var> = inputs
        .iter()
        .map(|x| Var::from_tensor(x).unwrap())
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors).unwrap_or_else(|error| panic!("{what}: {error}"));
    let plain = f(inputs).unwrap_or_else(|error| panic!("{what}, untracked: {error}"));
    assert_eq!(
        (y.dims(), y.dtype()),
        (plain.dims(), plain.dtype()),
        "{what}"
    );
    for (got, expected) in flat(&y).iter().zip(flat(&plain)) {
        assert!(
            (got - expected).abs() < 1e-5,
            "{what}: {got}, untracked {expected}"
        );
    }
    let weights = wave(29, y.dims());
    let loss = (&y * weights.to_dtype(y.dtype()).unwrap()).unwrap();
    let grads = loss.sum_all().unwrap().backward().unwrap();
    for (n, var) in vars.iter().enumerate() {
        let grad = grads.get(var);
        let grad = flat(grad.unwrap_or_else(|| panic!("{what}: input {n} has no gradient")));
        let largest = grad.iter().fold(0f32, |max, g| max.max(g.abs()));
        assert!(largest > 0., "{what}: the gradient of input {n} is 0");
        for at in (0..grad.len()).step_by(grad.len().div_ceil(7)) {
            let shifted = |by: f32| {
                let mut x = flat(&inputs[n]);
                x[at] += by;
                let mut inputs = inputs.to_vec();
                let (dims, device) = (inputs[n].dims().to_vec(), Device::Cpu);
                inputs[n] = Tensor::from_vec(x, dims, &device).unwrap();
                sum_of_products(&f(&inputs).unwrap(), &weights)
            };
            let slope = (shifted(STEP) - shifted(-STEP)) / (2. * f64::from(STEP));
            let error = (f64::from(grad[at]) - slope).abs();
            assert!(
                error <= 2e-3 * f64::from(largest.max(1.)),
                "{what}: input {n}, element {at}: gradient {}, slope {slope}",
                grad[at]
            );
        }
    }
}

fn softmax() {
    check("softmax_last_dim", &[wave(1, &[2, 3, 5])], |x| {
        ops::softmax_last_dim(&x[0])
    });
}

fn rms_norm() {
    check("rms_norm", &[wave(1, &[2, 3, 8]), wave(2, &[8])], |x| {
        ops::rms_norm(&x[0], &x[1], 1e-5)
    });
}

fn layer_norm() {
    let inputs = [wave(1, &[2, 3, 8]), wave(2, &[8]), wave(3, &[8])];
    check("layer_norm", &inputs, |x| {
        ops::layer_norm(&x[0], &x[1], &x[2], 1e-5)
    });
}

fn sdpa() {
    // Grouped heads, more keys than queries.
    let inputs = [
        wave(1, &[2, 4, 3, 8]),
        wave(2, &[2, 2, 5, 8]),
        wave(3, &[2, 2, 5, 8]),
    ];
    let mask = wave(4, &[2, 4, 3, 5]);
    let mut hidden = flat(&mask);
    hidden[1] = f32::NEG_INFINITY;
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
        wave(1, &[1, 2, 3, 8]),
        wave(2, &[1, 2, 4, 8]),
        wave(3, &[1, 2, 4, 6]),
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
                "rope_thd" => wave(1, &[2, 4, 3, 8]),
                _ => wave(1, &[2, 3, 4, 8]),
            };
            let (cos, sin) = (wave(2, angles), wave(3, angles));
            let expected = candles(&x, &cos, &sin).unwrap();
            let got = ours(&x, &cos, &sin).unwrap();
            assert_eq!(got.dims(), expected.dims(), "{what}");
            for (got, expected) in flat(&got).iter().zip(flat(&expected)) {
                assert!((got - expected).abs() < 1e-6, "{what}: {got}, {expected}");
            }
            check(&what, &[x.clone(), cos, sin], |x| ours(&x[0], &x[1], &x[2]));
        }
    }
}

#[test]
fn norms() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let affine = nn::layer_norm(8, 1e-5, vb.pp("a")).unwrap();
    let no_bias = nn::layer_norm_no_bias(8, 1e-5, vb.pp("b")).unwrap();
    let rms = nn::rms_norm(8, 1e-5, vb.pp("c")).unwrap();
    check("LayerNorm", &[wave(1, &[3, 8])], |x| affine.forward(&x[0]));
    check("LayerNorm without a bias", &[wave(1, &[3, 8])], |x| {
        no_bias.forward(&x[0])
    });
    check("RmsNorm", &[wave(1, &[3, 8])], |x| rms.forward(&x[0]));
    check("RmsNorm::forward_diff", &[wave(1, &[3, 8])], |x| {
        rms.forward_diff(&x[0])
    });
    assert_eq!((affine.eps(), affine.remove_mean()), (1e-5, true));
    assert_eq!((rms.eps(), rms.path()), (1e-5, Some("c")));
    assert!(!rms.into_inner().remove_mean());
    // The old names of transformers' checkpoints.
    let old = [("n.gamma", wave(1, &[8])), ("n.beta", wave(2, &[8]))];
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
    let (x, w) = (wave(1, &[2, 32]), wave(2, &[3, 4, 32]));
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
    let x = wave(1, &[3, 5]);
    check("cross_entropy", std::slice::from_ref(&x), |x| {
        nn::loss::cross_entropy(&x[0], &target)
    });
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let x = x.to_dtype(dtype).unwrap();
        let ours = nn::loss::cross_entropy(&x, &target).unwrap();
        let candles = candle_nn::loss::cross_entropy(&x, &target).unwrap();
        assert_eq!((ours.dtype(), ours.dims()), (dtype, candles.dims()));
        let (ours, candles) = (ours.to_dtype(DType::F32), candles.to_dtype(DType::F32));
        let (ours, candles): (f32, f32) = (
            ours.unwrap().to_scalar().unwrap(),
            candles.unwrap().to_scalar().unwrap(),
        );
        let rounding = if dtype == DType::BF16 { 3e-2 } else { 1e-6 };
        assert!(
            (ours - candles).abs() < rounding,
            "{dtype:?}: {ours}, {candles}"
        );
    }
}
