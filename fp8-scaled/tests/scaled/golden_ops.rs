//! The golden cases computed with this crate.

use crate::golden_data::{Array, Case, Value};
use candle_core::{DType, Device, Tensor};
use fp8_core::{Cast, Format};
use fp8_scaled::Result;
use fp8_scaled::{Norm, Scaled, ScaledVar};

/// The cases that use another cast than [`Cast::new`], and why.
pub const OTHER_CASTS: [(&str, &str); 4] = [
    ("convert_roundtrip.f32.sf32.float8_e4m3fn", VIA_F16),
    ("convert_roundtrip.f32.sf16.float8_e4m3fn", VIA_F16),
    ("cast_on_forward.f32.sf32.float8_e4m3fn", VIA_F16),
    (
        "reduce_precision.*",
        "an IEEE-like format: the top exponent is Inf's, subnormals are flushed",
    ),
];
pub const VIA_F16: &str = "XLA rounds f32 to f16 first; one element differs";

/// The result of an operation.
pub enum Got {
    Scaled(Vec<Scaled>),
    Plain(Tensor),
}

pub fn axes(key: &str) -> Option<Vec<usize>> {
    let (_, axes) = key.split_once("ax(")?;
    let axes = axes.trim_end_matches(')').split(',').map(str::trim);
    axes.filter(|axis| !axis.is_empty())
        .map(|axis| axis.parse().ok())
        .collect()
}

pub fn without(x: Scaled, axes: &[usize]) -> Result<Scaled> {
    let kept: Vec<usize> = (0..x.rank())
        .filter(|axis| !axes.contains(axis))
        .map(|axis| x.dims()[axis])
        .collect();
    x.reshape(&kept)
}

pub fn format(case: &Case) -> Option<Format> {
    match case.to.as_deref() {
        Some("float8_e4m3fn") => Some(Format::E4M3),
        Some("float8_e5m2") => Some(Format::E5M2),
        _ => None,
    }
}

/// `x` cast to FP8 and back by another cast than the library's.
pub fn cast_through(x: &Scaled, cast: impl Fn(f32) -> f32) -> Result<Scaled> {
    let data = x.data()?;
    let wide = data.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let cast: Vec<f32> = wide.into_iter().map(cast).collect();
    let cast = Tensor::from_vec(cast, data.dims(), data.device())?;
    Scaled::from_parts(&cast.to_dtype(data.dtype())?, x.scale().to_f32())
}

/// `jax.lax.reduce_precision`: an IEEE-like format with these bits, without subnormals.
pub fn reduced_precision(x: f32, format: Format) -> f32 {
    let (bits, mantissa) = match format {
        Format::E5M2 => (5, 2),
        _ => (4, 3),
    };
    let bias = (1 << (bits - 1)) - 1;
    if x == 0.0 {
        return x;
    }
    let x = f64::from(x);
    let step = 2f64.powi(x.abs().log2().floor() as i32 - mantissa);
    let rounded = (x / step).round_ties_even() * step;
    let max = (2.0 - 2f64.powi(-mantissa)) * 2f64.powi(bias);
    if rounded.abs() > max {
        f32::INFINITY.copysign(x as f32)
    } else if rounded.abs() < 2f64.powi(1 - bias) {
        0f32.copysign(x as f32)
    } else {
        rounded as f32
    }
}

/// The mask of `select_n` is not stored: it follows from which operand each element equals.
pub fn select(case: &Case, a: &Scaled, b: &Scaled) -> Result<Scaled> {
    let Some(Value::Pair(expected)) = case.outputs.first() else {
        panic!("{}: no output", case.key);
    };
    let rescaled = |x: &Scaled| -> Result<Vec<f64>> {
        let x = x.set_scaling(expected.scale as f32)?.data()?;
        Ok(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
    };
    let (from_a, from_b) = (rescaled(a)?, rescaled(b)?);
    let mask = (expected.data.numbers.iter().zip(from_a).zip(from_b)).map(|((&y, a), b)| {
        assert!((y == a) != (y == b), "{}: {y} is one of {a}, {b}", case.key);
        u8::from(y == b)
    });
    let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape(a.dims())?;
    Scaled::where_cond(&mask, b, a)
}

/// The loss `mean((relu(x w1) w2)^2)` and its gradients of w1 and w2.
pub fn mlp_grad(x: &Scaled, w1: &Scaled, w2: &Scaled) -> Result<Vec<Scaled>> {
    let (w1, w2) = (
        ScaledVar::from_scaled("w1", w1)?,
        ScaledVar::from_scaled("w2", w2)?,
    );
    let y = x.matmul(&w1.value())?.relu()?.matmul(&w2.value())?;
    let mut grads = y.square()?.mean_all()?.backward()?;
    Ok([&w1, &w2]
        .into_iter()
        .filter_map(|w| grads.remove(w))
        .collect())
}

pub fn run(case: &Case) -> Result<Got> {
    let inputs: Vec<Scaled> = case
        .inputs
        .iter()
        .filter_map(|x| match x {
            Value::Pair(pair) => Some(pair.scaled()),
            Value::Plain(_) => None,
        })
        .collect::<Result<_>>()?;
    let x = &inputs[0];
    let other = || &inputs[1];
    let axes = axes(&case.key);
    let reduced = axes.clone().unwrap_or_default();
    let other_cast = OTHER_CASTS
        .iter()
        .any(|(key, why)| *key == case.key && *why == VIA_F16);
    let along = |f: fn(&Scaled, usize) -> Result<Scaled>| -> Result<Scaled> {
        let mut y = x.clone();
        for &axis in &reduced {
            y = f(&y, axis)?;
        }
        without(y, &reduced)
    };
    let y = match case.op.as_str() {
        "add" => x.add(other())?,
        "sub" => x.sub(other())?,
        "mul" => x.mul(other())?,
        "div" => x.div(other())?,
        "max" => x.maximum(other())?,
        "min" => x.minimum(other())?,
        "select_n" => select(case, x, other())?,
        "neg" => x.neg()?,
        "abs" => x.abs()?,
        "sign" => x.sign()?,
        "square" => x.square()?,
        "ipow3" => x.powi(3)?,
        "relu" => x.relu()?,
        "exp" => x.exp()?,
        "log" => x.log()?,
        "sin" => x.sin()?,
        "cos" => x.cos()?,
        "sqrt" => x.sqrt()?,
        "softmax" => x.softmax(1)?,
        "scalar_mul" => x.mul_constant(3.0)?,
        "scalar_add" => x.add_constant(3.0)?,
        "stop_gradient" => x.detach(),
        "transpose" => x.transpose(0, 1)?,
        "reshape" => x.reshape(&[10, 6])?,
        "broadcast" => x.broadcast_as(&[3, 6, 10])?,
        "rev" => x.reverse(0)?,
        "slice" => x.slice(0, 1, 5, 1)?.slice(1, 2, 9, 3)?,
        "pad" => x.pad(0, 1, 2)?.pad(1, 0, 1)?,
        "reduce_sum" => without(x.sum_keepdim(&reduced)?, &reduced)?,
        "mean" => without(x.mean_keepdim(&[1])?, &[1])?,
        "reduce_prod" => without(x.prod_keepdim(&reduced)?, &reduced)?,
        "reduce_max" => along(Scaled::max_keepdim)?,
        "reduce_min" => along(Scaled::min_keepdim)?,
        "dot" => x.matmul(other())?,
        "dot_tn" => x.transpose(0, 1)?.matmul(other())?,
        "dynamic_rescale_max" => x.dynamic_rescale(Norm::Max)?,
        "dynamic_rescale_l1" => x.dynamic_rescale(Norm::L1)?,
        "dynamic_rescale_l2" => x.dynamic_rescale(Norm::L2)?,
        "set_scaling" => match case.inputs.get(1) {
            Some(Value::Plain(Array { numbers, .. })) => x.set_scaling(numbers[0] as f32)?,
            _ => panic!("{}: no scale", case.key),
        },
        "convert" => match format(case) {
            Some(format) => x.astype(format)?,
            None => x.astype(case.outputs[0].dtype())?,
        },
        "convert_roundtrip" | "cast_on_forward" | "reduce_precision" => {
            let Some(format) = format(case) else {
                panic!("{}: no format", case.key);
            };
            let cast = Cast::new(format).with_via_f16(true);
            match case.op.as_str() {
                "reduce_precision" => cast_through(x, |x| reduced_precision(x, format))?,
                _ if other_cast => cast_through(x, |x| format.decode(cast.encode(x, 0)))?,
                "convert_roundtrip" => x.astype(format)?.astype(case.outputs[0].dtype())?,
                _ => x.cast_on_forward(format)?,
            }
        }
        "fp8_dot_direct" => {
            let e4m3 = |x: &Scaled| x.astype(Format::E4M3);
            e4m3(x)?.matmul_to(&e4m3(other())?, DType::F32)?
        }
        "mlp_grad" => return Ok(Got::Scaled(mlp_grad(x, other(), &inputs[2])?)),
        plain => {
            return Ok(Got::Plain(match plain {
                "eq" => x.eq(other())?,
                "ne" => x.ne(other())?,
                "lt" => x.lt(other())?,
                "le" => x.le(other())?,
                "gt" => x.gt(other())?,
                "ge" => x.ge(other())?,
                "is_finite" => x.is_finite()?,
                // The name lists the axes of a reduction; the case uses the first one.
                "argmax" if axes.is_some() => x.argmax(0)?,
                "argmin" if axes.is_some() => x.argmin(0)?,
                "argmax" => x.argmax_all()?,
                "argmin" => x.argmin_all()?,
                op => panic!("{}: no operation {op}", case.key),
            }));
        }
    };
    Ok(Got::Scaled(vec![y]))
}
