//! Attention against a reference in f64: results and gradients, on the device named by `FP8_TEST_DEVICE`.

mod arguments;
mod cached;
mod fp8;
mod fp8_kernels;
mod model;
mod options;

use candle_core::{DType, Device, Tensor, Var};
use fp8_candle::Result;
use fp8_candle::ops::{AttentionOptions, AttentionProducts, attention, attention_tokens_first};
use fp8_test_support::approx::{Approx, assert_within};
use fp8_test_support::{cpu_tensor, device, flat64};
use model::Attention;

/// Values in [-2, 2), rounded to `dtype`, in f64 on the CPU.
fn noise(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let noise = cpu_tensor(seed, shape) * 2.;
    noise
        .and_then(|x| x.to_dtype(dtype)?.to_dtype(DType::F64))
        .unwrap()
}

#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    tq: usize,
    tk: usize,
    d: usize,
    causal: bool,
    softmax_scale: Option<f64>,
}

impl Case {
    fn new(tq: usize, tk: usize, d: usize, causal: bool) -> Self {
        Self {
            batch: 1,
            heads: 2,
            kv_heads: 2,
            tq,
            tk,
            d,
            causal,
            softmax_scale: None,
        }
    }

    fn heads(self, batch: usize, heads: usize, kv_heads: usize) -> Self {
        Self {
            batch,
            heads,
            kv_heads,
            ..self
        }
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions::default()
            .with_causal(self.causal)
            .with_softmax_scale(self.softmax_scale)
    }

    /// q, k, v and the gradient of the result, heads first.
    fn values(&self, dtype: DType) -> [Tensor; 4] {
        let Self {
            batch,
            heads,
            kv_heads,
            tq,
            tk,
            d,
            ..
        } = *self;
        [
            noise(&[batch, heads, tq, d], 1, dtype),
            noise(&[batch, kv_heads, tk, d], 2, dtype),
            noise(&[batch, kv_heads, tk, d], 3, dtype),
            noise(&[batch, heads, tq, d], 4, dtype),
        ]
    }

    /// Result and gradients of q, k and v, heads first, with their bounds.
    fn expected(&self, dtype: DType) -> [Vec<Approx>; 4] {
        let values = self.values(dtype);
        self.model(dtype).run(values.each_ref().map(flat64))
    }

    fn model(&self, dtype: DType) -> Attention {
        let &Self { tq, tk, d, .. } = self;
        Attention {
            sizes: [tq, tk, d],
            group: self.heads / self.kv_heads,
            causal: self.causal,
            softmax_scale: self.softmax_scale.unwrap_or(1.0 / (d as f64).sqrt()),
            dtype,
            random: true,
            products: AttentionProducts::none(),
        }
    }
}

/// `y` and the gradients of `vars`, where `weights` is the gradient of `y`.
fn results(y: &Tensor, weights: &Tensor, vars: &[&Var]) -> Result<Vec<Tensor>> {
    let grads = (y * weights)?.sum_all()?.backward()?;
    let mut out = vec![y.clone()];
    for var in vars {
        let grad = grads.get(var).expect("every argument has a gradient");
        assert_eq!((grad.dtype(), grad.dims()), (var.dtype(), var.dims()));
        out.push(grad.clone());
    }
    Ok(out)
}

#[track_caller]
fn assert_close(got: &[Tensor], expected: &[Vec<Approx>], dtype: DType, case: &str) {
    assert_eq!(got.len(), expected.len(), "{case}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        // The result, dq, dk, dv.
        assert_within(&flat64(got), expected, dtype, &format!("{case}, {i}"));
    }
}

/// `case` in `dtype` on the device under test, from contiguous tensors with heads first.
fn run(case: &Case, dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
    let [q, k, v, weights] = case.values(dtype);
    let here = |x: &Tensor| x.to_dtype(dtype)?.to_device(device);
    let [q, k, v] = [
        Var::from_tensor(&here(&q)?)?,
        Var::from_tensor(&here(&k)?)?,
        Var::from_tensor(&here(&v)?)?,
    ];
    let y = attention(&q, &k, &v, case.options())?;
    assert_eq!((y.dtype(), y.dims()), (dtype, q.dims()));
    results(&y, &here(&weights)?, &[&q, &k, &v])
}

fn check(case: Case, dtypes: &[DType]) -> Result<()> {
    let device = device();
    for &dtype in dtypes {
        let got = run(&case, dtype, &device)?;
        assert_close(&got, &case.expected(dtype), dtype, &format!("{case:?}"));
    }
    Ok(())
}

const ALL: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

#[test]
fn lengths() -> Result<()> {
    for causal in [false, true] {
        for t in [1, 17, 64, 128, 130] {
            check(Case::new(t, t, 64, causal), &ALL)?;
        }
    }
    Ok(())
}

#[test]
fn head_dims() -> Result<()> {
    for d in [8, 32, 96, 128] {
        check(Case::new(70, 70, d, d == 96), &ALL)?;
        check(Case::new(65, 129, d, d != 96), &ALL)?;
    }
    Ok(())
}

/// Odd and large head sizes have no kernel; attention is composed of other operations on every device.
#[test]
fn head_dims_without_kernels() -> Result<()> {
    for d in [7, 136] {
        check(Case::new(9, 12, d, true), &[DType::F32, DType::BF16])?;
    }
    Ok(())
}

#[test]
fn queries_behind_a_cache() -> Result<()> {
    for (tq, tk) in [(1, 33), (1, 200), (3, 131), (64, 192), (100, 163)] {
        check(Case::new(tq, tk, 64, true), &[DType::F32, DType::BF16])?;
    }
    Ok(())
}

/// Without a graph the CPU processes many queries in parts.
#[test]
fn long_prompts() -> Result<()> {
    let device = device();
    for (tq, tk) in [(256, 256), (257, 257), (300, 331), (384, 384)] {
        for causal in [true, false] {
            let case = Case::new(tq, tk, 16, causal).heads(1, 4, 2);
            for dtype in ALL {
                let [q, k, v, _] = case.values(dtype);
                let here = |x: &Tensor| x.to_dtype(dtype)?.to_device(&device);
                let y = attention(&here(&q)?, &here(&k)?, &here(&v)?, case.options())?;
                let expected = &case.expected(dtype)[..1];
                assert_close(&[y], expected, dtype, &format!("{case:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn fewer_keys_than_queries() -> Result<()> {
    for (tq, tk) in [(33, 1), (130, 65)] {
        check(Case::new(tq, tk, 64, false), &[DType::F32, DType::BF16])?;
    }
    Ok(())
}

#[test]
fn grouped_heads() -> Result<()> {
    for (heads, kv_heads) in [(4, 2), (3, 1), (5, 5)] {
        for causal in [false, true] {
            let case = Case::new(67, 70, 32, causal).heads(2, heads, kv_heads);
            check(case, &[DType::F32, DType::F16])?;
        }
    }
    check(
        Case::new(130, 130, 128, true).heads(1, 2, 1),
        &[DType::BF16],
    )
}

#[test]
fn multipliers() -> Result<()> {
    for softmax_scale in [0.01, -0.4, 0.9] {
        let case = Case {
            softmax_scale: Some(softmax_scale),
            ..Case::new(40, 70, 32, true)
        };
        check(case, &[DType::F32, DType::F16])?;
    }
    Ok(())
}

/// Logits whose exponentials overflow without the running maximum, increasing and decreasing along the keys.
#[test]
fn large_logits() -> Result<()> {
    let device = device();
    let (t, d) = (200, 64);
    for dtype in [DType::F32, DType::BF16] {
        for direction in [1.0, -1.0] {
            let ramp = Tensor::arange(0f64, t as f64, &Device::Cpu)?.reshape((1, 1, t, 1))?;
            let k = ((ramp * (direction * 0.05))?.broadcast_as((1, 1, t, d))? + 0.5)?;
            let k = k.to_dtype(dtype)?;
            let q = Tensor::full(4f64, (1, 1, t, d), &Device::Cpu)?.to_dtype(dtype)?;
            let v = noise(&[1, 1, t, d], 3, dtype).to_dtype(dtype)?;
            let case = Case::new(t, t, d, false).heads(1, 1, 1);
            let here = |x: &Tensor| x.to_device(&device);
            let got = attention(&here(&q)?, &here(&k)?, &here(&v)?, case.options())?;
            // The terms of a logit have one sign.
            let model = Attention {
                random: false,
                ..case.model(dtype)
            };
            let [expected, ..] = model.run([&q, &k, &v, &v].map(flat64));
            assert_close(&[got], &[expected], dtype, &format!("{direction}"));
        }
    }
    Ok(())
}
