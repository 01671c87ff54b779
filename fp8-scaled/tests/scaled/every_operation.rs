//! What holds for every operation: inputs and cotangents in FP8, views, empty tensors, extreme scales, scopes, threads.

use crate::operations::{ALL, Op, matrix};
use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use fp8_scaled::Result;
use fp8_scaled::{
    ScaleCheck, Scaled, ScaledDType, ScaledOptions, ScaledVar, as_scaled, scaled_scope,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a check of every operation and lists all that fail, panics included.
fn each(check: impl Fn(&Op) -> Result<std::result::Result<(), String>>) {
    let failures: Vec<String> = ALL
        .iter()
        .filter_map(|op| {
            let message = match catch_unwind(AssertUnwindSafe(|| check(op))) {
                Ok(Ok(Ok(()))) => return None,
                Ok(Ok(Err(message))) => message,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "panicked".into(),
            };
            Some(format!("{}: {message}", op.0))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn same<T: PartialEq + std::fmt::Debug>(
    what: &str,
    a: &T,
    b: &T,
) -> std::result::Result<(), String> {
    match a == b {
        true => Ok(()),
        false => Err(format!("{what}: {a:?} and {b:?}")),
    }
}

/// Shape, scale, and data bits.
type Bits = (Vec<usize>, f32, Vec<u64>);

fn bits(x: &Scaled) -> Result<Bits> {
    let data = x.data()?.to_dtype(DType::F64)?.flatten_all()?;
    let data = data.to_vec1::<f64>()?.into_iter().map(f64::to_bits);
    Ok((x.dims().to_vec(), x.scale().to_f32(), data.collect()))
}

/// The result of an operation, and the gradients of its weighted sum.
fn run(
    op: &Op,
    vars: [&ScaledVar; 2],
    prepare: impl Fn(Scaled) -> Result<Scaled>,
) -> Result<(Scaled, Vec<Option<Scaled>>)> {
    let [a, b] = vars.map(|var| prepare(var.value()));
    let y = op.1(&a?, &b?)?;
    let weights = (0..y.elem_count()).map(|i| 1.0 + (i % 7) as f32 / 8.0);
    let weights = Tensor::from_iter(weights, &Device::Cpu)?.reshape(y.dims())?;
    let weights = as_scaled(&weights, None)?.astype(DType::F16)?;
    let grads = y.mul(&weights)?.sum_all()?.backward()?;
    Ok((y, vars.map(|var| grads.get(var).cloned()).into()))
}

fn var(x: &Tensor, dtype: DType, scale: f32) -> Result<ScaledVar> {
    ScaledVar::from_scaled("x", &as_scaled(x, scale)?.astype(dtype)?)
}

#[test]
fn fp8_operands_equal_their_decoded_values() -> Result<()> {
    let vars = [
        var(&matrix(4, 1)?, DType::F16, 2.0)?,
        var(&matrix(4, 2)?, DType::F16, 0.5)?,
    ];
    let vars = [&vars[0], &vars[1]];
    each(|op| {
        let (y, grads) = run(op, vars, |x| x.astype(Format::E4M3))?;
        let decode = |x: Scaled| x.astype(Format::E4M3)?.astype(DType::F16);
        let (expected, expected_grads) = run(op, vars, decode)?;
        let products = ["matmul", "linear", "conv2d"];
        let close = |a: &Scaled, b: &Scaled| -> Result<std::result::Result<(), String>> {
            if !products.iter().any(|product| op.0.starts_with(product)) {
                return Ok(same("bits", &bits(a)?, &bits(b)?));
            }
            let of = |x: &Scaled| x.to_tensor(DType::F64)?.flatten_all()?.to_vec1::<f64>();
            let (a, b) = (of(a)?, of(b)?);
            let mut pairs = a.iter().zip(&b);
            let near = pairs.all(|(a, b)| (a - b).abs() <= 2e-3 * b.abs());
            Ok(if near && a.len() == b.len() {
                Ok(())
            } else {
                Err(format!("{a:?} {b:?}"))
            })
        };
        if let Err(message) = close(&y, &expected)? {
            return Ok(Err(message));
        }
        for (grad, expected) in grads.iter().zip(&expected_grads) {
            match (grad, expected) {
                (Some(grad), Some(expected)) => {
                    // A cotangent that was cast stays in FP8.
                    if op.0 != "cast_on_backward" && grad.dtype() != ScaledDType::Float(DType::F16)
                    {
                        return Ok(Err(format!("a gradient of {}", grad.dtype())));
                    }
                    if let Err(message) = close(grad, expected)? {
                        return Ok(Err(format!("gradient: {message}")));
                    }
                }
                (None, None) => {}
                _ => return Ok(Err("a gradient is missing".into())),
            }
        }
        Ok(Ok(()))
    });
    Ok(())
}

#[test]
fn fp8_beside_a_float_takes_its_dtype() -> Result<()> {
    let x = as_scaled(&matrix(4, 1)?, None)?.astype(Format::E5M2)?;
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let y = as_scaled(&matrix(4, 2)?, None)?.astype(dtype)?;
        let decoded = x.astype(DType::F16)?.astype(dtype)?;
        each(|op| {
            for (a, b, c, d) in [(&x, &y, &decoded, &y), (&y, &x, &y, &decoded)] {
                let (got, expected) = (op.1(a, b)?, op.1(c, d)?);
                // Where the FP8 operand is the input, the result has the dtype of FP8 data.
                if got.dtype() == expected.dtype()
                    && let Err(message) = same("bits", &bits(&got)?, &bits(&expected)?)
                {
                    return Ok(Err(message));
                }
            }
            Ok(Ok(()))
        });
    }
    Ok(())
}

#[test]
fn fp8_cotangents_reach_the_inputs() -> Result<()> {
    let vars = [
        var(&matrix(4, 1)?, DType::F32, 2.0)?,
        var(&matrix(4, 2)?, DType::F32, 0.5)?,
    ];
    each(|op| {
        let [a, b] = &vars;
        let y = op.1(&a.value(), &b.value())?;
        if !y.is_tracked() {
            return Ok(Ok(()));
        }
        let ones = Tensor::ones(y.dims(), DType::F32, &Device::Cpu)?;
        let cotangent = as_scaled(&ones, None)?;
        let expected = op.1(&a.value(), &b.value())?.backward_with(&cotangent)?;
        let grads = y.backward_with(&cotangent.astype(Format::E5M2)?)?;
        for var in &vars {
            let (grad, expected) = match (grads.get(var), expected.get(var)) {
                (Some(grad), Some(expected)) => (grad, expected),
                (None, None) => continue,
                _ => return Ok(Err("a gradient is missing".into())),
            };
            let of = |x: &Scaled| x.to_tensor(DType::F64)?.flatten_all()?.to_vec1::<f64>();
            let (got, expected) = (of(grad)?, of(expected)?);
            if got.len() != expected.len() {
                return Ok(Err(format!("{got:?} instead of {expected:?}")));
            }
            let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
            let near = (got.iter().zip(&expected)).all(|(a, b)| (a - b).abs() <= 2e-3 * largest);
            if !near {
                return Ok(Err(format!("{got:?} instead of {expected:?}")));
            }
        }
        Ok(Ok(()))
    });
    Ok(())
}

#[test]
fn views_equal_their_copies() -> Result<()> {
    for dtype in [DType::F32, DType::F16] {
        let views = [matrix(6, 1)?, matrix(6, 2)?];
        let vars = [var(&views[0], dtype, 2.0)?, var(&views[1], dtype, 0.5)?];
        let vars = [&vars[0], &vars[1]];
        let view = |x: Scaled| x.transpose(0, 1)?.narrow(0, 1, 4)?.narrow(1, 2, 4);
        each(|op| {
            let (y, grads) = run(op, vars, view)?;
            let (expected, expected_grads) = run(op, vars, |x| view(x)?.contiguous())?;
            let all = |y: &Scaled, grads: &[Option<Scaled>]| -> Result<Vec<Bits>> {
                std::iter::once(y)
                    .chain(grads.iter().flatten())
                    .map(bits)
                    .collect()
            };
            Ok(same(
                "bits",
                &all(&y, &grads)?,
                &all(&expected, &expected_grads)?,
            ))
        });
    }
    Ok(())
}

#[test]
fn empty_tensors_do_not_panic() -> Result<()> {
    for dims in [&[0usize, 4][..], &[4, 0], &[0, 0]] {
        for dtype in [ScaledDType::Float(DType::F16), Format::E4M3.into()] {
            let vars = [1, 2].map(|i| {
                let x = Tensor::zeros(dims, DType::F16, &Device::Cpu)?;
                ScaledVar::new(format!("{i}"), &x)
            });
            let [a, b] = vars;
            let (a, b) = (a?, b?);
            each(|op| {
                // Errors are allowed: there may be no largest value, or no row.
                let y = op.1(&a.value().astype(dtype)?, &b.value().astype(dtype)?);
                if let Ok(y) = y {
                    y.data()?;
                    if y.is_tracked() {
                        let grads = y.sum_all()?.backward()?;
                        for var in [&a, &b] {
                            if let Some(grad) = grads.get(var) {
                                assert_eq!(grad.dims(), dims);
                            }
                        }
                    }
                }
                Ok(Ok(()))
            });
        }
    }
    Ok(())
}

#[test]
fn matrices_of_one_element() -> Result<()> {
    let vars = [
        var(&matrix(1, 1)?, DType::F16, 2.0)?,
        var(&matrix(1, 2)?, DType::F16, 0.5)?,
    ];
    let vars = [&vars[0], &vars[1]];
    each(|op| {
        // Windows of 2 x 2 do not fit, and neither do two halves.
        if [
            "conv2d",
            "max_pool2d",
            "avg_pool2d",
            "rope",
            "cross_entropy_with",
        ]
        .contains(&op.0)
        {
            return Ok(Ok(()));
        }
        for format in [None, Some(Format::E4M3)] {
            let (_, grads) = run(op, vars, |x| match format {
                Some(format) => x.astype(format),
                None => Ok(x),
            })?;
            for grad in grads.iter().flatten() {
                if grad.dims() != [1, 1] || !grad.to_scalar()?.is_finite() {
                    return Ok(Err(format!("gradient {grad:?}")));
                }
            }
        }
        Ok(Ok(()))
    });
    Ok(())
}

#[test]
fn zeros_at_extreme_scales_are_not_nan() -> Result<()> {
    let zeros = Tensor::zeros((4, 4), DType::F32, &Device::Cpu)?;
    let ends = [
        2f32.powi(-126),
        2f32.powi(-60),
        2f32.powi(60),
        2f32.powi(127),
    ];
    for a in ends {
        for b in ends {
            let make = |scale: f32| -> Result<ScaledVar> {
                ScaledVar::from_scaled("x", &Scaled::from_parts(&zeros, scale)?)
            };
            let vars = [make(a)?, make(b)?];
            each(|op| {
                // These have poles at 0.
                if ["div", "log", "rsqrt", "recip", "powi below 0", "sqrt"].contains(&op.0) {
                    return Ok(Ok(()));
                }
                let (y, grads) = run(op, [&vars[0], &vars[1]], Ok)?;
                for x in std::iter::once(&y).chain(grads.iter().flatten()) {
                    let data = x.data()?.to_dtype(DType::F64)?.flatten_all()?;
                    if data.to_vec1::<f64>()?.iter().any(|x| x.is_nan()) {
                        return Ok(Err(format!("NaN at {a:e} and {b:e}: {x:?}")));
                    }
                }
                Ok(Ok(()))
            });
        }
    }
    Ok(())
}

#[test]
fn data_under_a_zero_scale_are_ignored() -> Result<()> {
    let _scope = scaled_scope(ScaledOptions::default().with_check(ScaleCheck::Lenient));
    let nan = Tensor::full(f32::NAN, (4, 4), &Device::Cpu)?;
    let some = var(&matrix(4, 1)?, DType::F32, 2.0)?;
    let none = ScaledVar::from_scaled("none", &Scaled::from_parts(&nan, 0.0)?)?;
    for vars in [[&none, &some], [&some, &none], [&none, &none]] {
        each(|op| {
            let (y, grads) = match run(op, vars, Ok) {
                Ok(done) => done,
                Err(fp8_scaled::Error::Scaled(_)) => return Ok(Ok(())),
                Err(error) => return Err(error),
            };
            for x in std::iter::once(&y).chain(grads.iter().flatten()) {
                let value = x.to_tensor(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                if value.iter().any(|x| x.is_nan()) {
                    return Ok(Err(format!("NaN: {x:?}")));
                }
            }
            Ok(Ok(()))
        });
    }
    Ok(())
}

#[test]
fn without_gradients_nothing_is_tracked_and_values_are_the_same() -> Result<()> {
    let vars = [
        var(&matrix(4, 1)?, DType::F16, 2.0)?,
        var(&matrix(4, 2)?, DType::F16, 0.5)?,
    ];
    let results = |expect_tracked: bool| -> Result<Vec<Bits>> {
        ALL.iter()
            .map(|op| {
                let y = op.1(&vars[0].value(), &vars[1].value())?;
                if !expect_tracked {
                    assert!(!y.is_tracked(), "{}", op.0);
                }
                bits(&y)
            })
            .collect()
    };
    let expected = results(true)?;
    let _scope = scaled_scope(ScaledOptions::default().with_gradients(false));
    assert_eq!(results(false)?, expected);
    Ok(())
}

#[test]
fn no_bit_depends_on_the_number_of_threads() -> Result<()> {
    let vars = [
        var(&matrix(192, 1)?, DType::F16, 2.0)?,
        var(&matrix(192, 2)?, DType::F16, 0.5)?,
    ];
    each(|op| {
        let on = |threads: usize| -> Result<Vec<Bits>> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let pool = pool.map_err(candle_core::Error::wrap)?;
            pool.install(|| {
                let (y, grads) = run(op, [&vars[0], &vars[1]], Ok)?;
                std::iter::once(&y)
                    .chain(grads.iter().flatten())
                    .map(bits)
                    .collect()
            })
        };
        let (one, three) = (on(1)?, on(3)?);
        Ok(if one == three {
            Ok(())
        } else {
            Err("other bits".into())
        })
    });
    Ok(())
}
