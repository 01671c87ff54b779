//! `scaled_mm`, with results in high precision and in FP8, and casts with a given scale.

use super::{COMBINATIONS, FORMATS, Operand, assert_same, check, multiply};
use candle_core::{DType, Device, Tensor};
use fp8_candle::device::GemmOutput;
use fp8_candle::{Error, Fp8Tensor, Quantizer, Result, scaled_mm, scaled_mm_fp8};
use fp8_core::Contraction::{self, Cols, Rows};
use fp8_core::{
    Cast, DelayedRule, Format, Granularity, Overflow, Rounding, SlotUpdate, StochasticKey,
    update_slot,
};
use fp8_test_support::{device, flat, on_cuda};

fn codes(x: &Fp8Tensor) -> Vec<u8> {
    x.codes().flatten_all().unwrap().to_vec1().unwrap()
}

fn scale(quant_scale: f32) -> Tensor {
    Tensor::new(&[quant_scale], &device()).unwrap()
}

/// Values of many magnitudes, both signs, none of them special.
fn values(dims: &[usize], seed: u32) -> Tensor {
    let len: usize = dims.iter().product();
    let value = |i: usize| {
        let angle = (i as f32 + 1.) * 0.37 + seed as f32;
        angle.sin() * (angle * 0.11).cos().abs().max(1e-3)
    };
    Tensor::from_vec((0..len).map(value).collect::<Vec<_>>(), dims, &device()).unwrap()
}

#[test]
fn products_over_either_dimension() -> Result<()> {
    let (m, n, k) = (17, 33, 70);
    for (a_format, b_format) in FORMATS {
        for (a_contraction, b_contraction) in COMBINATIONS {
            for granularity in [Granularity::Tensorwise, Granularity::Rowwise] {
                let a = Operand::new(1, (m, k), (a_format, granularity, a_contraction))?;
                let b = Operand::new(2, (n, k), (b_format, granularity, b_contraction))?;
                let operands = ((&a.tensor, a.contraction), (&b.tensor, b.contraction));
                let y = scaled_mm(operands.0, operands.1, &GemmOutput::new(DType::F32))?;
                assert_eq!((y.dims(), y.dtype()), (&[m, n][..], DType::F32));
                // This holds what the backend computes for these operands against f64.
                let case = format!(
                    "{a_format} {b_format} {granularity} {a_contraction:?} {b_contraction:?}"
                );
                check(&case, &a, &b)?;
                assert_same(&case, &y, &multiply(&a, &b, DType::F32, None)?);
                let bias = values(&[n], 3);
                let out = GemmOutput::new(DType::BF16).with_bias(&bias);
                let with_bias = scaled_mm(operands.0, operands.1, &out)?;
                assert_eq!(with_bias.dtype(), DType::BF16);
                let wide = |x: &Tensor| x.to_dtype(DType::BF16)?.to_dtype(DType::F32);
                let sum = wide(&y)?.broadcast_add(&wide(&bias)?)?;
                assert_same("with bias", &with_bias, &sum.to_dtype(DType::BF16)?);
            }
        }
    }
    Ok(())
}

#[test]
fn leading_dims_are_rows() -> Result<()> {
    let cast = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let x = values(&[2, 3, 32], 1);
    let w = values(&[16, 32], 2);
    let (x8, w8) = (
        Fp8Tensor::quantize(&x, &cast, Cols)?,
        Fp8Tensor::quantize(&w, &cast, Cols)?,
    );
    let flat_x8 = Fp8Tensor::quantize(&x.reshape((6, 32))?, &cast, Cols)?;
    let out = GemmOutput::new(DType::F32);
    let y = scaled_mm((&x8, Cols), (&w8, Cols), &out)?;
    assert_eq!(y.dims(), [6, 16]);
    let same = scaled_mm((&flat_x8, Cols), (&w8, Cols), &out)?;
    assert_eq!(flat(&y), flat(&same));
    Ok(())
}

#[test]
fn fp8_results_are_the_cast_of_the_f32_ones() -> Result<()> {
    let a = Operand::new(1, (9, 40), (Format::E4M3, Granularity::Tensorwise, Cols))?;
    let b = Operand::new(2, (21, 40), (Format::E4M3, Granularity::Tensorwise, Rows))?;
    let operands = ((&a.tensor, Cols), (&b.tensor, Rows));
    let bias = values(&[21], 4);
    for bias in [None, Some(&bias)] {
        let out = GemmOutput::new(DType::F32).with_bias(bias);
        let y = flat(&scaled_mm(operands.0, operands.1, &out)?);
        let amax = y.iter().fold(0f32, |amax, y| amax.max(y.abs()));
        let key = StochasticKey {
            seed: 3,
            step: 1,
            tensor: 2,
        };
        for cast in [
            Cast::new(Format::E4M3),
            Cast::new(Format::E5M2),
            Cast::new(Format::E5M2).with_overflow(Overflow::NonFinite),
            Cast::new(Format::E4M3).with_rounding(Rounding::Stochastic(key)),
        ] {
            // One that fits the amax, one that saturates, one that loses small values.
            for quant_scale in [448. / amax, 1e4 / amax, 1e-3 / amax] {
                let y8 = scaled_mm_fp8(operands.0, operands.1, bias, &cast, &scale(quant_scale))?;
                let expected: Vec<u8> = y
                    .iter()
                    .enumerate()
                    .map(|(i, y)| cast.encode(y * quant_scale, i as u64))
                    .collect();
                assert_eq!(codes(&y8.tensor), expected, "{cast:?} {quant_scale}");
                assert_eq!(y8.tensor.dims(), [9, 21]);
                assert_eq!(flat(y8.amax.as_ref().unwrap()), [amax]);
                assert_eq!(flat(&y8.quant_scale), [quant_scale]);
                assert_eq!(flat(y8.tensor.dequant_scale()), [1. / quant_scale]);
                assert_eq!(y8.cast, cast);
            }
        }
    }
    Ok(())
}

#[test]
fn a_given_scale_gives_the_codes_of_a_dynamic_cast_with_the_same_scale() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for contraction in [Cols, Rows] {
            let x = values(&[5, 48], 7).to_dtype(dtype)?;
            let dynamic = Quantizer::dynamic(Format::E5M2, Granularity::Tensorwise)
                .quantize(&x, contraction)?;
            let given = Fp8Tensor::quantize_with_scale(
                &x,
                &Cast::new(Format::E5M2),
                &dynamic.quant_scale,
                contraction,
            )?;
            assert_eq!(codes(&given.tensor), codes(&dynamic.tensor), "{dtype:?}");
            assert_eq!(flat(&given.amax.unwrap()), flat(&dynamic.amax.unwrap()));
            assert_eq!(
                flat(given.tensor.dequant_scale()),
                flat(dynamic.tensor.dequant_scale())
            );
            assert_eq!(given.tensor.contraction(), contraction);
        }
    }
    // A view, and no values at all.
    let wide = values(&[6, 20], 1);
    let cast = Cast::new(Format::E4M3);
    let quantize = |x: &Tensor| Fp8Tensor::quantize_with_scale(x, &cast, &scale(8.), Cols);
    let view = quantize(&wide.t()?)?;
    let copy = quantize(&wide.t()?.contiguous()?)?;
    assert_eq!(codes(&view.tensor), codes(&copy.tensor));
    let none = quantize(&Tensor::zeros((0, 4), DType::F32, &device())?)?;
    assert_eq!(
        (none.tensor.dims(), flat(&none.amax.unwrap())),
        (&[0, 4][..], vec![0.])
    );
    Ok(())
}

#[test]
fn nan_and_infinity_reach_the_amax() -> Result<()> {
    let x = Tensor::new(&[1f32, f32::INFINITY, -2.], &device())?;
    let cast = Cast::new(Format::E4M3);
    let q = Fp8Tensor::quantize_with_scale(&x, &cast, &scale(1.), Cols)?;
    let amax = flat(&q.amax.unwrap())[0];
    assert_eq!(amax, f32::INFINITY);
    // A history made by hand refuses it.
    let (mut history, mut quant_scale) = ([1., 0.], 448.);
    let update = update_slot(
        &DelayedRule::default(),
        Format::E4M3,
        amax,
        &mut history,
        &mut quant_scale,
    );
    assert_eq!(update, SlotUpdate::NonFinite);
    assert_eq!((history, quant_scale), ([1., 0.], 448.));
    let nan = Tensor::new(&[1f32, f32::NAN], &device())?;
    let q = Fp8Tensor::quantize_with_scale(&nan, &cast, &scale(1.), Cols)?;
    assert!(flat(&q.amax.unwrap())[0].is_nan());
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error_with_the_values() -> Result<()> {
    let tensor = |rows, cols, contraction: Contraction| {
        let kind = (Format::E4M3, Granularity::Tensorwise, contraction);
        let (kept, contracted) = match contraction {
            Cols => (rows, cols),
            Rows => (cols, rows),
        };
        Ok::<_, Error>(Operand::new(1, (kept, contracted), kind)?.tensor)
    };
    let (a, b) = (tensor(3, 40, Cols)?, tensor(5, 41, Cols)?);
    let out = GemmOutput::new(DType::F32);
    let message = |result: Result<Tensor>| match result {
        Ok(y) => panic!("{:?}", y.dims()),
        Err(error) => error.to_string(),
    };
    let text = message(scaled_mm((&a, Cols), (&b, Cols), &out));
    assert!(
        text.contains("scaled_mm") && text.contains("[5, 41]") && text.contains("40"),
        "{text}"
    );
    // The dimension counts, not the number of values.
    let text = message(scaled_mm((&a, Cols), (&a, Rows), &out));
    assert!(text.contains("[40, 3]"), "{text}");
    let bias = Tensor::zeros(4, DType::F32, &device())?;
    let text = message(scaled_mm((&a, Cols), (&a, Cols), &out.with_bias(&bias)));
    assert!(
        text.contains("bias") && text.contains("[4]") && text.contains("[3]"),
        "{text}"
    );
    let bias = Tensor::zeros(3, DType::U8, &device())?;
    let text = message(scaled_mm((&a, Cols), (&a, Cols), &out.with_bias(&bias)));
    assert!(text.contains("bias") && text.contains("U8"), "{text}");
    let text = message(scaled_mm(
        (&a, Cols),
        (&a, Cols),
        &GemmOutput::new(DType::U32),
    ));
    assert!(text.contains("U32"), "{text}");

    let cast = Cast::new(Format::E4M3);
    let x = values(&[2, 4], 1);
    let two = Tensor::ones(2, DType::F32, &device())?;
    let wrong_dtype = Tensor::ones(1, DType::BF16, &device())?;
    for (x, quant_scale, expected) in [
        (&x, &two, "one element"),
        (&x, &wrong_dtype, "BF16"),
        (&x.to_dtype(DType::U32)?, &scale(1.), "U32"),
    ] {
        let result = Fp8Tensor::quantize_with_scale(x, &cast, quant_scale, Cols);
        let text = result.expect_err(expected).to_string();
        assert!(text.contains(expected), "{text}");
    }
    let result = Fp8Tensor::quantize_with_scale(&x, &cast.with_division(true), &scale(1.), Cols);
    assert!(matches!(result, Err(Error::Division { .. })), "{result:?}");
    if on_cuda() {
        let here = Tensor::ones(1, DType::F32, &Device::Cpu)?;
        let result = Fp8Tensor::quantize_with_scale(&x, &cast, &here, Cols);
        assert!(matches!(result, Err(Error::DeviceMismatch { .. })));
    }
    Ok(())
}
