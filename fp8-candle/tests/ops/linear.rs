//! Linear layers in high precision: each row is what it is alone.

use candle_core::{DType, Tensor, Var};
use fp8_candle::ops::{LinearOptions, linear, linear_with};
use fp8_candle::{Error, Result};
use fp8_test_support::{apart, flat, flat64, wave_f32};
use rand::{Rng, SeedableRng, rngs::StdRng};

const EPS: f64 = f32::EPSILON as f64;

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

#[test]
fn equals_matmul_within_its_roundings() -> Result<()> {
    for (rows, inputs, outputs) in [
        (1, 1, 1),
        (1, 33, 700),
        (3, 64, 257),
        (8, 100, 5),
        (300, 90, 130),
    ] {
        let x = wave_f32(&[rows, inputs], 1);
        let bias = wave_f32(&[outputs], 3);
        for dtype in DTYPES {
            let weight = wave_f32(&[outputs, inputs], 2).to_dtype(dtype)?;
            let expected = x.matmul(&weight.to_dtype(DType::F32)?.t()?)?;
            // Two orders of a sum of products below 1.
            let bound = EPS * (inputs * (inputs + 8)) as f64;
            let case = format!("{rows} {inputs} {outputs} {dtype:?}");
            assert!(
                apart(&linear(&x, &weight, None)?, &expected) <= bound,
                "{case}"
            );
            let y = linear(&x, &weight, Some(&bias))?;
            assert!(
                apart(&y, &expected.broadcast_add(&bias)?) <= bound,
                "{case}"
            );
        }
    }
    Ok(())
}

#[test]
fn sums_of_f64_are_in_f64() -> Result<()> {
    let of = |shape: &[usize], seed| wave_f32(shape, seed).to_dtype(DType::F64);
    let (x, weight) = (of(&[40, 333], 1)?, of(&[21, 333], 2)?);
    let expected = x.matmul(&weight.t()?)?;
    let y = linear(&x, &weight, None)?;
    assert_eq!(y.dtype(), DType::F64);
    assert!(apart(&y, &expected) <= f64::EPSILON * 333. * 341.);
    Ok(())
}

/// The bias comes after the rounding to the dtype of the result, as in `candle_nn`.
#[test]
fn the_bias_is_added_in_the_dtype_of_the_result() -> Result<()> {
    let bias = wave_f32(&[130], 3);
    for dtype in DTYPES {
        let (x, weight) = (
            wave_f32(&[7, 50], 1).to_dtype(dtype)?,
            wave_f32(&[130, 50], 2),
        );
        let expected = linear(&x, &weight, None)?.broadcast_add(&bias.to_dtype(dtype)?)?;
        let y = linear(&x, &weight, Some(&bias))?;
        assert_eq!(y.dtype(), dtype);
        assert_eq!(flat64(&y), flat64(&expected), "{dtype:?}");
    }
    Ok(())
}

#[test]
fn each_row_has_the_bits_that_it_has_alone() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(1);
    let (mut pairs, mut case) = (0, 0);
    while pairs < 10_000 {
        case += 1;
        let k = match case % 4 {
            0 => rng.random_range(1..2200),
            1 => 16 * rng.random_range(1..20),
            _ => rng.random_range(1..150),
        };
        let (n, m) = (rng.random_range(1..40), rng.random_range(1..80));
        let dtype = DTYPES[rng.random_range(0..4)];
        let weight = wave_f32(&[n, k], case).to_dtype(DTYPES[rng.random_range(0..4)])?;
        let bias = rng.random::<bool>().then(|| wave_f32(&[n], case + 1));
        let x = wave_f32(&[m, k], case + 2).to_dtype(dtype)?;
        let all = flat64(&linear(&x, &weight, bias.as_ref())?);
        for row in 0..m {
            let alone = linear(&x.narrow(0, row, 1)?, &weight, bias.as_ref())?;
            let bits = |values: &[f64]| values.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
            assert_eq!(
                bits(&flat64(&alone)),
                bits(&all[row * n..][..n]),
                "row {row} of {m}, {n} x {k}, {dtype:?} {:?}",
                weight.dtype()
            );
            pairs += 1;
        }
    }
    Ok(())
}

#[test]
fn the_number_of_threads_changes_nothing() -> Result<()> {
    for (m, n, k) in [(1, 3000, 700), (200, 500, 300), (900, 40, 1500)] {
        let (x, weight) = (wave_f32(&[m, k], 1), wave_f32(&[n, k], 2));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(|| linear(&x, &weight, None))
        };
        let one = flat(&run(1)?);
        for threads in [2, 3, 8] {
            assert!(
                flat(&run(threads)?) == one,
                "{m} {n} {k}, {threads} threads"
            );
        }
    }
    Ok(())
}

/// Gradients are those of candle's matmul, to the bit.
#[test]
fn gradients_are_those_of_matmul() -> Result<()> {
    let x = Var::from_tensor(&wave_f32(&[2, 5, 30], 1))?;
    let weight = Var::from_tensor(&wave_f32(&[7, 30], 2))?;
    let bias = Var::from_tensor(&wave_f32(&[7], 3))?;
    let factor = wave_f32(&[2, 5, 7], 4);
    let plain = x.reshape((10, 30))?.matmul(&weight.t()?)?;
    let plain = plain.reshape((2, 5, 7))?.broadcast_add(&bias)?;
    let expected = (plain * &factor)?.sum_all()?.backward()?;
    let grads = (linear(&x, &weight, Some(&bias))? * &factor)?
        .sum_all()?
        .backward()?;
    for (i, var) in [&x, &weight].into_iter().enumerate() {
        let [got, expected] = [&grads, &expected].map(|grads| flat(grads.get(var).unwrap()));
        assert_eq!(got, expected, "argument {i}");
    }
    // Two orders of ten terms below 1.
    let far = apart(grads.get(&bias).unwrap(), expected.get(&bias).unwrap());
    assert!(far <= 10. * 10. * EPS, "{far:e}");
    // Of a frozen weight and without a bias, in 16 bits.
    let x = Var::from_tensor(&x.to_dtype(DType::BF16)?)?;
    let y = linear(&x, &weight.detach(), None)?;
    let grads = y.to_dtype(DType::F32)?.sum_all()?.backward()?;
    let grad = grads.get(&x).unwrap();
    assert_eq!((grad.dtype(), grad.dims()), (DType::BF16, x.dims()));
    assert!(grads.get(&weight).is_none());
    Ok(())
}

/// As all sums of f64.
#[test]
fn the_gradient_of_a_bias_in_f64_is_summed_in_f64() -> Result<()> {
    let of = |shape: &[usize], seed| wave_f32(shape, seed).to_dtype(DType::F64);
    let (x, weight) = (of(&[40, 30], 1)?, of(&[7, 30], 2)?);
    let bias = Var::from_tensor(&of(&[7], 3)?)?;
    // Numbers that f32 does not have.
    let factor = (of(&[40, 7], 4)? / 3.)?;
    let y = (linear(&x, &weight, Some(&bias))? * &factor)?;
    let grads = y.sum_all()?.backward()?;
    let far = apart(grads.get(&bias).unwrap(), &factor.sum(0)?);
    // Two orders of 40 terms below 1.
    assert!(far <= 40. * 40. * f64::EPSILON, "{far:e}");
    Ok(())
}

/// The gradient of x would be that of another weight; without it, nothing reads the weight again.
#[test]
fn a_weight_that_has_changed_is_an_error() -> Result<()> {
    let x = Var::from_tensor(&wave_f32(&[5, 30], 1))?;
    let weight = Var::from_tensor(&wave_f32(&[7, 30], 2))?;
    let bias = Var::from_tensor(&wave_f32(&[7], 3))?;
    let (before, after) = (weight.as_tensor().copy()?, wave_f32(&[7, 30], 5));
    for operands in [None, Some(DType::BF16)] {
        let options = LinearOptions::default().with_operands(operands);
        for bias in [None, Some(bias.as_tensor())] {
            let loss = |x: &Tensor| linear_with(x, &weight, bias, options)?.sum_all();
            let (of_both, of_weight) = (loss(&x)?, loss(&x.as_detached_tensor())?);
            weight.set(&after)?;
            let error = fp8_candle::wide::backward(&of_both).unwrap_err();
            assert!(
                matches!(&error, Error::ChangedValues { op, what: "weight", .. } if op == "linear"),
                "{error}"
            );
            let grads = fp8_candle::wide::backward(&of_weight)?;
            assert!(grads.get(&weight).is_some());
            weight.set(&before)?;
            let grads = fp8_candle::wide::backward(&of_both)?;
            assert!(grads.get(&x).is_some() && grads.get(&weight).is_some());
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let (x, weight) = (wave_f32(&[1, 4], 1), wave_f32(&[2, 4], 1));
    let shape = |weight: &Tensor, bias: Option<&Tensor>, of: &str| {
        let result = linear(&x, weight, bias);
        let is_shape = matches!(&result, Err(Error::Shape { what, .. }) if *what == of);
        assert!(is_shape, "{of}: {result:?}");
    };
    shape(&wave_f32(&[2, 5], 1), None, "weight");
    shape(&wave_f32(&[4], 1), None, "weight");
    shape(&weight, Some(&wave_f32(&[3], 1)), "bias");
    let result = linear(&x.to_dtype(DType::U32)?, &weight, None);
    assert!(
        matches!(&result, Err(Error::DType { what: "x", .. })),
        "{result:?}"
    );
    let result = linear(&x, &weight.to_dtype(DType::U8)?, None);
    assert!(
        matches!(&result, Err(Error::DType { what: "weight", .. })),
        "{result:?}"
    );
    let empty = Tensor::zeros((0, 4), DType::F32, x.device())?;
    assert_eq!(linear(&empty, &weight, None)?.dims(), [0, 2]);
    let none = Tensor::zeros((3, 0), DType::F32, x.device())?;
    let y = linear(
        &none,
        &Tensor::zeros((2, 0), DType::F32, x.device())?,
        Some(&wave_f32(&[2], 5)),
    )?;
    assert_eq!(flat(&y.narrow(0, 2, 1)?), flat(&wave_f32(&[2], 5)));
    Ok(())
}

/// Operands rounded to bf16: the product of rounded tensors, each row of which is what it is alone; gradients are products of rounded
/// tensors too.
#[test]
fn operands_in_bf16_are_rounded_tensors() -> Result<()> {
    let options = LinearOptions::default().with_operands(DType::BF16);
    let rounded = |x: &Tensor| x.to_dtype(DType::BF16)?.to_dtype(x.dtype());
    for (rows, inputs, outputs) in [(1, 33, 70), (7, 300, 130), (210, 90, 65), (300, 520, 33)] {
        let x = Var::from_tensor(&wave_f32(&[rows, inputs], 1))?;
        let weight = Var::from_tensor(&wave_f32(&[outputs, inputs], 2))?;
        let bias = Var::from_tensor(&wave_f32(&[outputs], 3))?;
        let factor = wave_f32(&[rows, outputs], 4);
        let y = linear_with(&x, &weight, Some(&bias), options)?;
        let (x16, weight16, factor16) = (rounded(&x)?, rounded(&weight)?, rounded(&factor)?);
        let of = |x: &Tensor, weight: &Tensor| x.matmul(&weight.t()?);
        // Two orders of a sum of products below 1.
        let bound = |terms: usize| EPS * (terms * (terms + 8)) as f64;
        let case = format!("{rows} {inputs} {outputs}");
        let expected = of(&x16, &weight16)?.broadcast_add(&bias)?;
        assert!(apart(&y, &expected) <= bound(inputs), "{case}");
        for row in [0, rows / 2, rows - 1] {
            let alone = linear_with(&x.narrow(0, row, 1)?, &weight, Some(&bias), options)?;
            assert_eq!(
                flat(&alone),
                flat(&y.narrow(0, row, 1)?),
                "{case}, row {row}"
            );
        }
        let grads = (y * &factor)?.sum_all()?.backward()?;
        let of_x = factor16.matmul(&weight16)?;
        assert!(
            apart(grads.get(&x).unwrap(), &of_x) <= bound(outputs),
            "{case}"
        );
        let of_weight = of(&factor16.t()?, &x16.t()?)?;
        assert!(
            apart(grads.get(&weight).unwrap(), &of_weight) <= bound(rows),
            "{case}"
        );
        let of_bias = factor.sum(0)?;
        assert!(
            apart(grads.get(&bias).unwrap(), &of_bias) <= bound(rows),
            "{case}"
        );
    }
    Ok(())
}

#[test]
fn operands_in_bf16_may_be_empty() -> Result<()> {
    let options = LinearOptions::default().with_operands(DType::BF16);
    for (rows, inputs, outputs) in [(0, 8, 3), (2, 0, 3), (2, 8, 0), (0, 0, 0)] {
        let x = Var::zeros((rows, inputs), DType::F32, &candle_core::Device::Cpu)?;
        let weight = Var::zeros((outputs, inputs), DType::F32, &candle_core::Device::Cpu)?;
        let y = linear_with(&x, &weight, None, options)?;
        assert_eq!(y.dims(), [rows, outputs]);
        assert!(flat(&y).iter().all(|&y| y == 0.));
        let grads = y.sum_all()?.backward()?;
        assert_eq!(grads.get(&x).unwrap().dims(), x.dims());
        assert_eq!(grads.get(&weight).unwrap().dims(), weight.dims());
    }
    Ok(())
}

#[test]
fn other_dtypes_of_operands_are_refused() {
    let (x, weight) = (wave_f32(&[2, 8], 1), wave_f32(&[3, 8], 2));
    let options = LinearOptions::default().with_operands(DType::F16);
    let error = linear_with(&x, &weight, None, options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("linear") && error.contains("bf16"),
        "{error}"
    );
}
