//! The twin of candle_nn: nothing that candle-nn cuts out of the graph is left in it.
//!
//! The source of candle-nn says which functions lose gradients; each of them is called here through the twin, with values and
//! gradients checked against finite differences of the form that tracks no gradient.

mod scan;
mod sweep;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::nn::attention::{self, AttnMask, cpu_flash};
use fp8_recipes::nn::{self, kv_cache, moe, ops, rotary_emb};
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

// ---- helpers ---------------------------------------------------------------------------------

/// Values in (-1, 1) without a pattern.
fn wave(seed: usize, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let value = |i: usize| (((i + 3) * (2 * seed + 7)) as f32 * 12.9898).sin();
    Tensor::from_vec((0..count).map(value).collect(), shape, &Device::Cpu).unwrap()
}

fn values(x: &Tensor) -> Vec<f32> {
    let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    x.to_vec1().unwrap()
}

fn sum_of_products(y: &Tensor, weights: &Tensor) -> f64 {
    let products = values(y).into_iter().zip(values(weights));
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
    for (got, expected) in values(&y).iter().zip(values(&plain)) {
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
        let grad = values(grad.unwrap_or_else(|| panic!("{what}: input {n} has no gradient")));
        let largest = grad.iter().fold(0f32, |max, g| max.max(g.abs()));
        assert!(largest > 0., "{what}: the gradient of input {n} is 0");
        for at in (0..grad.len()).step_by(grad.len().div_ceil(7)) {
            let shifted = |by: f32| {
                let mut x = values(&inputs[n]);
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

// ---- operations ------------------------------------------------------------------------------

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
    let mut hidden = values(&mask);
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
            for (got, expected) in values(&got).iter().zip(values(&expected)) {
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
    assert_eq!(values(ours.weight()), values(candles.weight()));
    assert_eq!(
        values(ours.bias().unwrap()),
        values(candles.bias().unwrap())
    );
}

// ---- attention -------------------------------------------------------------------------------

#[test]
#[allow(deprecated)]
fn flash() {
    let inputs = |b, tq, tk| {
        [
            wave(1, &[b, tq, 4, 8]),
            wave(2, &[b, tk, 2, 8]),
            wave(3, &[b, tk, 2, 8]),
        ]
    };
    let mut mask = values(&wave(4, &[3, 5]));
    // The second query sees nothing.
    mask[1] = f32::NEG_INFINITY;
    mask[5..10].fill(f32::NEG_INFINITY);
    let mask = Tensor::from_vec(mask, (1, 1, 3, 5), &Device::Cpu).unwrap();
    for (b, tq, tk, kind, max_bias, softcap) in [
        (1, 3, 5, AttnMask::None, None, None),
        (1, 3, 5, AttnMask::None, Some(4.), Some(0.9)),
        (1, 3, 5, AttnMask::Mask(mask.clone()), None, Some(0.9)),
        (1, 3, 5, AttnMask::Mask(mask.clone()), Some(4.), None),
        (1, 3, 5, AttnMask::causal(), None, None),
        (
            1,
            3,
            5,
            AttnMask::causal_with_offset(2),
            Some(4.),
            Some(0.9),
        ),
        (1, 1, 5, AttnMask::causal_with_offset(4), Some(4.), None),
        (2, 3, 5, AttnMask::None, Some(4.), None),
        (2, 3, 5, AttnMask::causal(), None, None),
        (2, 3, 3, AttnMask::causal(), Some(4.), None),
    ] {
        let what = format!("flash_attn of {b}x{tq}x{tk}, {kind:?}, {max_bias:?}, {softcap:?}");
        check(&what, &inputs(b, tq, tk), |x| {
            attention::flash_attn::<f32>(&x[0], &x[1], &x[2], 0.4, kind.clone(), max_bias, softcap)
        });
    }
    check("standard", &inputs(1, 3, 5), |x| {
        let (q, k, v) = (&x[0], &x[1], &x[2]);
        cpu_flash::standard::run_flash_attn_cpu::<f32>(q, k, v, Some(&mask), 0.4, None, None)
    });
    check("causal", &inputs(1, 3, 5), |x| {
        cpu_flash::causal::run_causal_attn_cpu::<f32>(&x[0], &x[1], &x[2], 0.4, 1, None, None)
    });
    check("the old name", &inputs(1, 3, 5), |x| {
        let (q, k, v) = (&x[0], &x[1], &x[2]);
        nn::cpu_flash_attention::run_flash_attn_cpu::<f32>(q, k, v, None, 0.4, None, None)
    });
    // A learned bias.
    check("mask", &[wave(1, &[1, 1, 3, 5])], |x| {
        let [q, k, v] = inputs(1, 3, 5);
        let mask = AttnMask::Mask(x[0].clone());
        attention::flash_attn::<f32>(&q, &k, &v, 0.4, mask, None, None)
    });
}

#[test]
fn varlen() {
    let inputs = [
        wave(1, &[5, 4, 8]),
        wave(2, &[9, 2, 8]),
        wave(3, &[9, 2, 8]),
    ];
    let lengths = |lengths: &[u32]| Tensor::new(lengths, &Device::Cpu).unwrap();
    let (queries, keys) = (lengths(&[2, 3]), lengths(&[4, 5]));
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu).unwrap();
    for (causal, left, right, slopes) in [
        (false, None, None, None),
        (true, None, None, Some(&slopes)),
        (false, Some(1), None, Some(&slopes)),
        (false, Some(1), Some(1), None),
        (true, Some(2), Some(2), None),
    ] {
        let what = format!(
            "causal {causal}, window {left:?} {right:?}, {}",
            slopes.is_some()
        );
        check(&format!("unfused, {what}"), &inputs, |x| {
            let (q, k, v) = (&x[0], &x[1], &x[2]);
            attention::flash_attn_varlen_unfused(
                q, k, v, slopes, &queries, &keys, 3, 5, 0.4, causal, left, right,
            )
        });
        check(&format!("cpu, {what}"), &inputs, |x| {
            let (q, k, v) = (&x[0], &x[1], &x[2]);
            nn::varlen_attention::flash_attn_varlen_unfused(
                q, k, v, slopes, &queries, &keys, 3, 5, 0.4, causal, left, right,
            )?;
            attention::flash_attn_varlen_cpu(
                q, k, v, slopes, &queries, &keys, 3, 5, 0.4, causal, left, right,
            )
        });
    }
    let tracked = Var::from_tensor(&inputs[0]).unwrap();
    let wrong = attention::flash_attn_varlen_cpu(
        &tracked, &inputs[1], &inputs[2], None, &queries, &queries, 3, 3, 0.4, true, None, None,
    );
    assert!(wrong.unwrap_err().to_string().contains("do not fit"));
}

// ---- caches ----------------------------------------------------------------------------------

/// Two calls, of three positions and one.
fn parts(x: &Tensor, dim: usize) -> [Tensor; 2] {
    [x.narrow(dim, 0, 3), x.narrow(dim, 3, 1)].map(|x| x.unwrap().contiguous().unwrap())
}

fn join(k: Tensor, v: Tensor) -> Result<Tensor> {
    Tensor::cat(&[k, v], 1)
}

#[test]
fn caches() {
    let inputs = [wave(1, &[1, 2, 4, 6]), wave(2, &[1, 2, 4, 6])];
    check("KvCache", &inputs, |x| {
        let mut cache = kv_cache::KvCache::new(2, 3);
        let ([k0, k1], [v0, v1]) = (parts(&x[0], 2), parts(&x[1], 2));
        cache.append(&k0, &v0)?;
        let (k, v) = cache.append(&k1, &v1)?;
        assert_eq!((cache.current_seq_len(), values(&k)), (4, values(&x[0])));
        join(k, v)
    });
    check("ConcatKvCache", &inputs, |x| {
        let mut cache = kv_cache::ConcatKvCache::new(2);
        let ([k0, k1], [v0, v1]) = (parts(&x[0], 2), parts(&x[1], 2));
        cache.append(&k0, &v0)?;
        let (k, v) = cache.append(&k1, &v1)?;
        assert_eq!((cache.current_seq_len(), values(&k)), (4, values(&x[0])));
        join(k, v)
    });
    check("InterleavedKvCache", &inputs, |x| {
        let mut cache = kv_cache::InterleavedKvCache::new(6);
        let ([k0, k1], [v0, v1]) = (parts(&x[0], 2), parts(&x[1], 2));
        cache.append(&k0, &v0)?;
        cache.append(&k1, &v1)
    });
    // Nothing tracked before, and nothing left after a reset.
    let mut cache = kv_cache::Cache::new(0, 8);
    cache.append(&wave(1, &[2, 3])).unwrap();
    let var = Var::from_tensor(&wave(2, &[2, 3])).unwrap();
    cache.append(&var).unwrap();
    let held = cache.current_data().unwrap().unwrap();
    let expected = Tensor::cat(&[&wave(1, &[2, 3]), &wave(2, &[2, 3])], 0).unwrap();
    assert_eq!(values(&held), values(&expected));
    assert!(
        held.sum_all()
            .unwrap()
            .backward()
            .unwrap()
            .get(&var)
            .is_some()
    );
    cache.reset();
    assert!(cache.current_data().unwrap().is_none());
}

#[test]
fn rotating() {
    // Every way of running into the end of a buffer of 5 positions, against candle-nn's.
    for lengths in [
        &[2, 2, 2, 2][..],
        &[3, 4, 1],
        &[5, 1],
        &[1, 7, 2],
        &[4, 4, 4],
        &[2, 3, 5],
    ] {
        let total = lengths.iter().sum();
        let input = [wave(5, &[1, total, 3])];
        check(&format!("RotatingCache, {lengths:?}"), &input, |x| {
            let mut ours = kv_cache::RotatingKvCache::new(1, 5);
            let mut candles = candle_nn::kv_cache::RotatingKvCache::new(1, 5);
            let (mut at, mut all) = (0, vec![]);
            for &len in lengths {
                let part = x[0].narrow(1, at, len)?.contiguous()?;
                at += len;
                assert_eq!(ours.positions(len), candles.positions(len));
                let (k, v) = ours.append(&part, &part)?;
                let (expected, _) = candles.append(&part.detach(), &part.detach())?;
                assert_eq!(values(&k), values(&expected), "{lengths:?} at {at}");
                let held = ours.k()?.unwrap();
                assert_eq!(values(&held), values(&candles.k()?.unwrap()));
                assert_eq!(ours.offset(), candles.offset());
                // candle-nn's buffer is written again.
                all.extend([k.copy()?, v.copy()?]);
            }
            Tensor::cat(&all, 1)
        });
    }
}

#[test]
fn scattered() {
    let mut builder = kv_cache::ScatteredCacheBuilder::new(1, 4, DType::F32, &Device::Cpu).unwrap();
    let mut cache = builder.make_cache(2, 3).unwrap();
    let short = wave(1, &[1, 2, 2, 3]);
    let at = builder.indices_and_mask(2, &[true]).unwrap();
    cache.append(&short, &short, &at).unwrap();
    let var = Var::from_tensor(&short).unwrap();
    let error = cache.append(&var, &short, &at).unwrap_err().to_string();
    assert!(error.contains("ScatteredKvCache::append"), "{error}");
    // What is not written anywhere keeps its gradient.
    let var = Var::from_tensor(&wave(1, &[1, 2, 4, 3])).unwrap();
    let (k, _) = cache.append(&var, &var, &at).unwrap();
    assert!(k.sum_all().unwrap().backward().unwrap().get(&var).is_some());
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

// ---- the rest --------------------------------------------------------------------------------

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
