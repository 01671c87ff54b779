//! Only ratios of scales matter: multiplying inputs by 2^20 changes no bit of data, forward or backward.

use crate::gradient_check::{positive, wave};
use candle_core::{DType, Device, Tensor};
use fp8_scaled::Result;
use fp8_scaled::{Norm, Scaled, ScaledVar};

type Op = (&'static str, fn(&Scaled, &Scaled) -> Result<Scaled>);

fn mask() -> Result<Tensor> {
    let mask = (0..12).map(|i| u8::from(i % 3 == 0));
    Ok(Tensor::from_iter(mask, &Device::Cpu)?.reshape((3, 4))?)
}

/// Every operation that turns a power of two on its input into a power of two on its result.
const OPS: &[Op] = &[
    ("add", |a, b| a.add(b)),
    ("sub", |a, b| a.sub(b)),
    ("mul", |a, b| a.mul(b)),
    ("div", |a, b| a.div(b)),
    ("mul_constant", |a, _| a.mul_constant(0.3)),
    ("div_constant", |a, _| a.div_constant(7.0)),
    ("neg", |a, _| a.neg()),
    ("abs", |a, _| a.abs()),
    ("relu", |a, _| a.relu()),
    ("maximum", |a, b| a.maximum(b)),
    ("minimum", |a, b| a.minimum(b)),
    ("where_cond", |a, b| Scaled::where_cond(&mask()?, a, b)),
    ("cat", |a, b| Scaled::cat(&[a, b], 1)),
    ("stack", |a, b| Scaled::stack(&[a, b], 0)),
    ("square", |a, _| a.square()),
    ("powi", |a, _| a.powi(3)),
    ("powi below 0", |a, _| a.powi(-2)),
    ("recip", |a, _| a.recip()),
    ("sqrt", |a, _| a.sqrt()),
    ("rsqrt", |a, _| a.rsqrt()),
    ("sum", |a, _| a.sum_keepdim(&[0])),
    ("sum_all", |a, _| a.sum_all()),
    ("mean", |a, _| a.mean_keepdim(&[1])),
    ("mean_all", |a, _| a.mean_all()),
    ("max", |a, _| a.max_keepdim(1)),
    ("min", |a, _| a.min_keepdim(0)),
    ("max_all", |a, _| a.max_all()),
    ("min_all", |a, _| a.min_all()),
    ("prod", |a, _| a.prod_keepdim(&[0])),
    ("reshape", |a, _| a.reshape(&[2, 6])),
    ("transpose", |a, _| a.transpose(0, 1)),
    ("narrow", |a, _| a.narrow(1, 1, 2)),
    ("slice", |a, _| a.slice(1, 0, 4, 3)),
    ("pad", |a, _| a.pad(0, 1, 2)),
    ("reverse", |a, _| a.reverse(1)),
    ("broadcast_as", |a, _| a.broadcast_as(&[2, 3, 4])),
    ("dynamic_rescale", |a, _| a.dynamic_rescale(Norm::L2)),
    ("rebalance", |a, _| a.rebalance(4.0)),
    ("astype", |a, _| a.astype(fp8_core::Format::E4M3)),
];

fn bits(x: &Scaled) -> Result<Vec<u64>> {
    let data = x.data()?.to_dtype(DType::F64)?.flatten_all()?;
    Ok(data
        .to_vec1::<f64>()?
        .into_iter()
        .map(f64::to_bits)
        .collect())
}

/// Data of the result and of the gradients, and the scales of the result and the first gradient.
fn run(op: &Op, dtype: DType, by: f32) -> Result<(Vec<Vec<u64>>, [f32; 2])> {
    let of = |x: Tensor, scale: f32| {
        let x = Scaled::from_parts(&x.to_dtype(dtype)?, scale * by)?;
        ScaledVar::from_scaled("x", &x)
    };
    // Roots need positive values.
    let a = match op.0.ends_with("sqrt") {
        true => positive(&[3, 4], 1),
        false => wave(&[3, 4], 1),
    };
    let (a, b) = (of(a, 4.0)?, of(wave(&[3, 4], 2), 0.5)?);
    let y = (op.1)(&a.value(), &b.value())?;
    let weights = Scaled::from_parts(&wave(y.dims(), 5).to_dtype(dtype)?, 1.0)?;
    let grads = y.mul(&weights)?.sum_all()?.backward()?;
    let mut data = vec![bits(&y)?];
    let mut scales = [y.scale().to_f32(), 0.0];
    for var in [&a, &b] {
        if let Some(grad) = grads.get(var) {
            data.push(bits(grad)?);
            scales[1] = grad.scale().to_f32();
        }
    }
    assert!(data.len() > 1, "{}: no gradient", op.0);
    Ok((data, scales))
}

#[test]
fn inputs_times_a_power_of_two() -> Result<()> {
    for op in OPS {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (plain, plain_scales) = run(op, dtype, 1.0)?;
            for by in [2f32.powi(20), 2f32.powi(-20)] {
                let (data, scales) = run(op, dtype, by)?;
                assert_eq!(data, plain, "{} in {dtype:?} by {by}", op.0);
                assert_ne!(scales, plain_scales, "{}: the size went nowhere", op.0);
            }
        }
    }
    Ok(())
}

#[test]
fn plain_results_depend_only_on_ratios() -> Result<()> {
    type Plain = fn(&Scaled, &Scaled) -> Result<Tensor>;
    let ops: [Plain; 9] = [
        |a, b| a.eq(b),
        |a, b| a.ne(b),
        |a, b| a.lt(b),
        |a, b| a.le(b),
        |a, b| a.gt(b),
        |a, b| a.ge(b),
        |a, _| a.is_finite(),
        |a, _| Ok(a.argmax(1)?.to_dtype(DType::U8)?),
        |a, _| Ok(a.sign()?.add_constant(1.0)?.data()?.to_dtype(DType::U8)?),
    ];
    for (i, op) in ops.iter().enumerate() {
        let run = |by: f32| -> Result<Vec<u8>> {
            let a = Scaled::from_parts(&wave(&[3, 4], 1), 0.5 * by)?;
            let b = Scaled::from_parts(&wave(&[3, 4], 2), by)?;
            Ok(op(&a, &b)?.flatten_all()?.to_vec1()?)
        };
        for by in [20, -20, 100, -100] {
            assert_eq!(run(2f32.powi(by))?, run(1.0)?, "{i} by 2^{by}");
        }
    }
    Ok(())
}
