//! Every operation of the original library, case by case: scales are equal as numbers, data within an ulp.

use crate::golden_data::{Array, Case, Golden, Pair, Value};
use candle_core::{DType, Device, Tensor};
use fp8_candle::Result;
use fp8_candle::scaled::{
    Norm, Pow2Rounding, ScaleCheck, Scaled, ScaledOptions, ScaledVar, scaled_scope,
};
use fp8_core::{Cast, Format};
use std::collections::BTreeMap;

/// What an operation gave.
enum Got {
    Scaled(Vec<Scaled>),
    Plain(Tensor),
}

/// How the data of a case have to agree.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Agreement {
    /// Scales equal, data within so many ulp.
    Ulp(u64),
    /// Scales equal, data within this share of the largest: f32 sums in another order.
    OfLargest(f64),
    /// Scales equal and 0: the data have no meaning, and are 0 here.
    Zeros,
    /// The contract has another scale than the original: the value within this share of itself.
    Value(f64),
}

/// The cases that do not agree as the rest of their operation, and why.
const EXCEPTIONS: [(&str, Agreement, &str); 8] = [
    (
        "reduce_prod.f32.sf16.ax(0, 1)",
        Agreement::Value(f64::INFINITY),
        "the original's f16 scale overflows to Inf at 2^60; the data agree to 7 ulp, the order of 60 factors",
    ),
    (
        "log.bf16.sf16",
        Agreement::OfLargest(1.0 / 128.0),
        "the original rounds log(scale) to f16, the dtype of its scale",
    ),
    (
        "set_scaling.f32.sf16.3.0",
        Agreement::OfLargest(5e-4),
        "the original rounds the factor 8/3 to f16, the dtype of its scale",
    ),
    ("mul.f32.sf32.s0.0_2.0", Agreement::Zeros, NO_SIZE),
    ("mul.f32.sf16.s0.0_2.0", Agreement::Zeros, NO_SIZE),
    ("mul.f16.sf16.s0.0_2.0", Agreement::Zeros, NO_SIZE),
    ("mul.bf16.sf32.s0.0_2.0", Agreement::Zeros, NO_SIZE),
    (
        "mean.f32.sf16",
        Agreement::OfLargest(3e-7),
        "f32 sums in another order",
    ),
];
const NO_SIZE: &str = "the data of a tensor of zero scale are 0 here, whatever the operands held";

/// The cases that are computed with another cast than [`Cast::new`], and why.
const OTHER_CASTS: [(&str, &str); 4] = [
    ("convert_roundtrip.f32.sf32.float8_e4m3fn", VIA_F16),
    ("convert_roundtrip.f32.sf16.float8_e4m3fn", VIA_F16),
    ("cast_on_forward.f32.sf32.float8_e4m3fn", VIA_F16),
    (
        "reduce_precision.*",
        "an IEEE-like format: the top exponent is Inf's, subnormals are flushed",
    ),
];
const VIA_F16: &str = "XLA rounds f32 to f16 first; one element differs";

fn agreement(case: &Case) -> Agreement {
    let exception = EXCEPTIONS.iter().find(|(key, ..)| *key == case.key);
    exception.map_or_else(|| usual(case), |(_, agreement, _)| *agreement)
}

/// The agreement of the cases of an operation.
fn usual(case: &Case) -> Agreement {
    let f32_data = case.inputs.first().is_some_and(|x| x.dtype() == DType::F32);
    match case.op.as_str() {
        // Roots of scales that are no squares; f16 scales are rounded on top of that.
        "sqrt" => Agreement::Value(match case.inputs.first().map(Value::dtype) {
            Some(DType::BF16) => 1.0 / 128.0,
            Some(DType::F16) => 1.0 / 1024.0,
            _ if case.key.contains("sf16") => 2e-4,
            _ => 2e-7,
        }),
        "softmax" => Agreement::Value(1e-6),
        "exp" | "sin" | "cos" | "ipow3" | "reduce_prod" => Agreement::Ulp(1),
        // log(data) and log(scale) cancel.
        "log" if f32_data => Agreement::OfLargest(2e-7),
        "reduce_sum" | "dot" | "dot_tn" if f32_data => Agreement::OfLargest(3e-7),
        _ => Agreement::Ulp(0),
    }
}

fn axes(key: &str) -> Option<Vec<usize>> {
    let (_, axes) = key.split_once("ax(")?;
    let axes = axes.trim_end_matches(')').split(',').map(str::trim);
    axes.filter(|axis| !axis.is_empty())
        .map(|axis| axis.parse().ok())
        .collect()
}

fn without(x: Scaled, axes: &[usize]) -> Result<Scaled> {
    let kept: Vec<usize> = (0..x.rank())
        .filter(|axis| !axes.contains(axis))
        .map(|axis| x.dims()[axis])
        .collect();
    x.reshape(&kept)
}

fn format(case: &Case) -> Option<Format> {
    match case.to.as_deref() {
        Some("float8_e4m3fn") => Some(Format::E4M3),
        Some("float8_e5m2") => Some(Format::E5M2),
        _ => None,
    }
}

/// `x` cast to FP8 and back by another cast than the library's.
fn cast_through(x: &Scaled, cast: impl Fn(f32) -> f32) -> Result<Scaled> {
    let data = x.data()?;
    let wide = data.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let cast: Vec<f32> = wide.into_iter().map(cast).collect();
    let cast = Tensor::from_vec(cast, data.dims(), data.device())?;
    Scaled::from_parts(&cast.to_dtype(data.dtype())?, x.scale().to_f32())
}

/// `jax.lax.reduce_precision`: a format of these bits in the manner of IEEE, without subnormals.
fn reduced_precision(x: f32, format: Format) -> f32 {
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

/// The mask of `select_n` is not stored: it is where the second operand was taken, which each element shows.
fn select(case: &Case, a: &Scaled, b: &Scaled) -> Result<Scaled> {
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
fn mlp_grad(x: &Scaled, w1: &Scaled, w2: &Scaled) -> Result<Vec<Scaled>> {
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

fn run(case: &Case) -> Result<Got> {
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
        "softmax" => return softmax(x),
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
                // The key has the axes of reductions, the case is along the first one.
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

fn compare(got: &Scaled, expected: &Pair, agreement: Agreement) -> std::result::Result<(), String> {
    let Pair { data, scale } = expected;
    if got.dims() != data.dims {
        return Err(format!("shape {:?} instead of {:?}", got.dims(), data.dims));
    }
    let dtype = got.data().map_err(|e| e.to_string())?.dtype();
    if data.dtype != DType::U8 && dtype != data.dtype {
        return Err(format!("{dtype:?} instead of {:?}", data.dtype));
    }
    let numbers = || -> Result<Vec<f64>> {
        let wide = got.data()?.to_dtype(DType::F64)?;
        Ok(wide.flatten_all()?.to_vec1()?)
    };
    let numbers = numbers().map_err(|e| e.to_string())?;
    let got_scale = f64::from(got.scale().to_f32());
    let infinite = Agreement::Value(f64::INFINITY);
    if !matches!(agreement, Agreement::Value(_)) && got_scale != *scale {
        return Err(format!("scale {got_scale} instead of {scale}"));
    }
    let largest = data.numbers.iter().fold(0f64, |a, b| a.max(b.abs()));
    for (i, (&y, &expected)) in numbers.iter().zip(&data.numbers).enumerate() {
        let agrees = match agreement {
            Agreement::Zeros => y == 0.0 && got_scale == 0.0,
            Agreement::Ulp(0) => y == expected,
            Agreement::Ulp(ulp) => (y - expected).abs() <= ulp as f64 * spacing(expected, dtype),
            Agreement::OfLargest(share) => (y - expected).abs() <= share * largest,
            _ if agreement == infinite => {
                got_scale == 2f64.powi(60) && (y / expected - 1.0).abs() < 1e-6
            }
            Agreement::Value(share) => {
                let (y, expected) = (y * got_scale, expected * scale);
                (y - expected).abs() <= share * expected.abs()
            }
        };
        if !agrees {
            return Err(format!(
                "element {i}: {y} at {got_scale} instead of {expected} at {scale}, {agreement:?}"
            ));
        }
    }
    Ok(())
}

/// The distance of `x` to the next number of the dtype.
fn spacing(x: f64, dtype: DType) -> f64 {
    let (digits, min_exponent) = match dtype {
        DType::F16 => (10, -14),
        DType::BF16 => (7, -126),
        _ => (23, -126),
    };
    let exponent = if x == 0.0 {
        min_exponent
    } else {
        (x.abs().log2().floor() as i32).max(min_exponent)
    };
    2f64.powi(exponent - digits)
}

fn check(case: &Case, agreement: Agreement) -> std::result::Result<(), String> {
    let rounding = match case.key.as_str() {
        key if key.ends_with("round_NONE") => Pow2Rounding::None,
        key if key.ends_with("round_UP") => Pow2Rounding::Up,
        _ => Pow2Rounding::Down,
    };
    let options = ScaledOptions::default()
        .with_check(ScaleCheck::Lenient)
        .with_scale_rounding(rounding);
    let _scope = scaled_scope(options);
    match run(case).map_err(|e| e.to_string())? {
        Got::Plain(got) => {
            let wide =
                || -> Result<Vec<f64>> { Ok(got.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?) };
            let Some(Value::Plain(expected)) = case.outputs.first() else {
                return Err("a plain tensor instead of a pair".into());
            };
            if got.dims() != expected.dims || wide().map_err(|e| e.to_string())? != expected.numbers
            {
                return Err(format!("{got} instead of {:?}", expected.numbers));
            }
        }
        Got::Scaled(got) => {
            if got.len() != case.outputs.len() {
                return Err(format!("{} results", got.len()));
            }
            for (got, expected) in got.iter().zip(&case.outputs) {
                match expected {
                    Value::Pair(expected) => compare(got, expected, agreement)?,
                    Value::Plain(_) => return Err("a pair instead of a plain tensor".into()),
                }
            }
        }
    }
    Ok(())
}

#[test]
fn all_cases_of_the_original_library() {
    let golden = Golden::read();
    let mut counts = BTreeMap::<&str, usize>::new();
    let mut failures = Vec::new();
    for case in &golden.cases {
        *counts.entry(&case.op).or_default() += 1;
        if let Err(failure) = check(case, agreement(case)) {
            failures.push(format!("{}: {failure}", case.key));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(golden.cases.len(), 331);
    let expected = [
        ("abs", 3),
        ("add", 23),
        ("argmax", 4),
        ("argmin", 5),
        ("broadcast", 1),
        ("cast_on_forward", 5),
        ("convert", 13),
        ("convert_roundtrip", 9),
        ("cos", 2),
        ("div", 3),
        ("dot", 17),
        ("dot_tn", 3),
        ("dynamic_rescale_l1", 15),
        ("dynamic_rescale_l2", 16),
        ("dynamic_rescale_max", 9),
        ("eq", 8),
        ("exp", 5),
        ("fp8_dot_direct", 1),
        ("ge", 4),
        ("gt", 6),
        ("ipow3", 4),
        ("is_finite", 4),
        ("le", 4),
        ("log", 5),
        ("lt", 5),
        ("max", 4),
        ("mean", 2),
        ("min", 5),
        ("mlp_grad", 1),
        ("mul", 17),
        ("ne", 7),
        ("neg", 2),
        ("pad", 4),
        ("reduce_max", 9),
        ("reduce_min", 9),
        ("reduce_precision", 8),
        ("reduce_prod", 11),
        ("reduce_sum", 8),
        ("relu", 3),
        ("reshape", 3),
        ("rev", 2),
        ("scalar_add", 2),
        ("scalar_mul", 2),
        ("select_n", 3),
        ("set_scaling", 9),
        ("sign", 3),
        ("sin", 4),
        ("slice", 3),
        ("softmax", 2),
        ("sqrt", 5),
        ("square", 3),
        ("stop_gradient", 4),
        ("sub", 19),
        ("transpose", 3),
    ];
    assert_eq!(counts.into_iter().collect::<Vec<_>>(), expected);
}

/// An exception that a case does not need is none.
#[test]
fn every_exception_is_one() -> Result<()> {
    let golden = Golden::read();
    let of = |key: &str| {
        let case = golden.cases.iter().find(|case| case.key == key);
        case.unwrap_or_else(|| panic!("no case {key}"))
    };
    let _scope = scaled_scope(ScaledOptions::default().with_check(ScaleCheck::Lenient));
    for (key, _, why) in EXCEPTIONS {
        let case = of(key);
        assert!(
            check(case, usual(case)).is_err(),
            "{key} needs no exception: {why}"
        );
    }
    for (key, why) in OTHER_CASTS {
        if key.ends_with('*') {
            continue;
        }
        let case = of(key);
        let x = match &case.inputs[0] {
            Value::Pair(pair) => pair.scaled()?,
            Value::Plain(_) => panic!("{key}: no pair"),
        };
        let direct = x.astype(format(case).unwrap_or(Format::E4M3))?.data()?;
        let direct = direct
            .to_dtype(DType::F64)?
            .flatten_all()?
            .to_vec1::<f64>()?;
        let Value::Pair(expected) = &case.outputs[0] else {
            panic!("{key}: no pair");
        };
        let differ = direct
            .iter()
            .zip(&expected.data.numbers)
            .filter(|(a, b)| a != b);
        assert_eq!(differ.count(), 1, "{key}: {why}");
    }
    Ok(())
}

fn softmax(x: &Scaled) -> Result<Got> {
    let y = x.exp()?;
    Ok(Got::Scaled(vec![y.div(&y.sum_keepdim(&[1])?)?]))
}
