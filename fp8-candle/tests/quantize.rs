//! Where scales come from: current, delayed, static and fixed; fake quantization.

#[path = "common/row.rs"]
mod row;

use candle_core::{DType, Tensor};
use fp8_candle::state::{CalibrationRow, StepCells};
use fp8_candle::{CastCounter, Quantized, Quantizer, Result, Role, ScalePolicy, ScaleSource};
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::{
    Cast, Format, Granularity, delayed_quant_scale, dynamic_quant_scale, floor_to_power_of_two,
};
use fp8_test_support::{device, flat, on_cuda};
use row::{Row, codes, quantizer, tensor};
use std::sync::atomic::Ordering;

/// The two scales fit together, and the codes follow from them.
#[track_caller]
fn check_quantized(q: &Quantized, x: &Tensor, quant_scale: f32) {
    assert_eq!(flat(&q.quant_scale), [quant_scale]);
    assert_eq!(flat(q.tensor.dequant_scale()), [1. / quant_scale]);
    let cast = Cast::new(q.tensor.format());
    let expected: Vec<u8> = flat(x)
        .iter()
        .map(|x| cast.encode(x * quant_scale, 0))
        .collect();
    assert_eq!(codes(&q.tensor), expected);
}

#[test]
fn dynamic_scales() -> Result<()> {
    for format in [Format::E4M3, Format::E5M2] {
        for (values, amax) in [
            (vec![0.5, -3., 1.5], 3f32),
            (vec![0., -0.], 0.),
            (vec![1e-20, 2e-13], 2e-13),
            (vec![3e38, -1.], 3e38),
        ] {
            for power_of_two in [false, true] {
                let x = tensor(&values);
                let q = Quantizer::dynamic(format, Granularity::Tensorwise)
                    .with_power_of_two(power_of_two)
                    .quantize(&x, Cols)?;
                let exact = dynamic_quant_scale(amax, format);
                let expected = if power_of_two {
                    floor_to_power_of_two(exact)
                } else {
                    exact
                };
                check_quantized(&q, &x, expected);
                assert_eq!(flat(q.amax.as_ref().unwrap()), [amax]);
            }
        }
        let q = Quantizer::dynamic(format, Granularity::Tensorwise)
            .quantize(&tensor(&[1., f32::INFINITY]), Cols)?;
        assert_eq!(flat(&q.quant_scale), [0.]);
        assert!(
            flat(&q.tensor.dequantize(DType::F32)?)
                .iter()
                .all(|x| x.is_nan())
        );
        let q = Quantizer::dynamic(format, Granularity::Tensorwise)
            .quantize(&tensor(&[1., f32::NAN]), Cols)?;
        assert!(flat(&q.quant_scale)[0].is_nan());
        assert!(
            flat(&q.tensor.dequantize(DType::F32)?)
                .iter()
                .all(|x| x.is_nan())
        );
    }
    Ok(())
}

#[test]
fn current_scales() -> Result<()> {
    let source = |eps, power_of_two| ScaleSource::Current {
        policy: ScalePolicy::Current { eps },
        power_of_two,
    };
    for (values, eps, expected) in [
        (vec![0.5, -3.5], 0., 128.),
        (vec![0.5, -3.5], 7., 64.),
        (vec![0., 0.], 0., 1.),
        (vec![0., 0.], 3.5, 128.),
        (vec![1e-40, 0.], 0., f32::MAX),
    ] {
        let x = tensor(&values);
        let q = quantizer(Format::E4M3, source(eps, false)).quantize(&x, Cols)?;
        check_quantized(&q, &x, expected);
    }
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let q = quantizer(Format::E4M3, source(0., false)).quantize(&tensor(&[2., bad]), Cols)?;
        assert_eq!(flat(&q.quant_scale), [1.], "{bad}");
        let back = flat(&q.tensor.dequantize(DType::F32)?);
        let expected = if bad.is_nan() {
            f32::NAN
        } else {
            448f32.copysign(bad)
        };
        assert!(
            back[0] == 2. && (back[1] == expected || bad.is_nan() && back[1].is_nan()),
            "{back:?}"
        );
    }
    let x = tensor(&[3., 1.]);
    let q = quantizer(Format::E4M3, source(0., true)).quantize(&x, Cols)?;
    check_quantized(&q, &x, 128.);
    Ok(())
}

#[test]
fn delayed_scales_come_from_earlier_steps() -> Result<()> {
    let row = Row::new("l", Role::Input, 3);
    let mut expected = 1f32;
    for (step, amax) in [2f32, 7., 0.5, 0.25, 0.125].into_iter().enumerate() {
        let x = tensor(&[amax, -amax / 3., 0.]);
        let q = row.train().quantize(&x, Cols)?;
        check_quantized(&q, &x, expected);
        assert_eq!(flat(q.amax.as_ref().unwrap()), [amax]);
        // Evaluation in between: the same scale, nothing recorded.
        let eval = tensor(&[1e6]);
        let q = row.eval().quantize(&eval, Cols)?;
        let in_use = if step == 0 { 448. / 1e6 } else { expected };
        check_quantized(&q, &eval, in_use);
        assert!(q.amax.is_none());
        row.update();
        let window = [
            [2., 0., 0.],
            [7., 2., 0.],
            [0.5, 7., 2.],
            [0.25, 0.5, 7.],
            [0.125, 0.25, 0.5],
        ];
        assert_eq!(row.history(), window[step]);
        let largest = window[step].into_iter().fold(0f32, f32::max);
        expected = delayed_quant_scale(largest, Format::E4M3, 0, expected);
        assert_eq!(row.scale(), expected);
        assert_eq!([row.dequant_scale()], [1. / expected]);
        assert_eq!(row.slot.version(), (step as u64 + 1, 0));
    }
    Ok(())
}

#[test]
fn evaluation_alone_changes_nothing() -> Result<()> {
    let row = Row::new("l", Role::Input, 3);
    row.eval().quantize(&tensor(&[5.]), Cols)?;
    row.eval().quantize(&tensor(&[5.]), Cols)?;
    row.update();
    assert_eq!((row.scale(), row.history()), (1., vec![0.; 3]));
    assert_eq!(row.slot.version(), (0, 0));
    Ok(())
}

#[test]
fn the_first_batches_make_their_own_scales() -> Result<()> {
    let row = Row::new("l", Role::Input, 3);
    let x = tensor(&[3.5, -1.]);
    check_quantized(&row.first_batch().quantize(&x, Cols)?, &x, 128.);
    assert_eq!(row.history(), [0.; 3], "the history waits for the update");
    // A second micro-batch of the step has its own scale, so the order of the two does not matter.
    let large = tensor(&[100.]);
    check_quantized(&row.first_batch().quantize(&large, Cols)?, &large, 4.48);
    row.update();
    assert_eq!(row.history(), [100., 0., 0.]);
    assert_eq!(row.scale(), 4.48);
    check_quantized(&row.first_batch().quantize(&x, Cols)?, &x, 4.48);
    Ok(())
}

/// Evaluation before any training does not use the initial scale of 1.
#[test]
fn evaluation_before_the_first_step_scales_by_what_it_sees() -> Result<()> {
    let row = Row::new("l", Role::Input, 3);
    let x = tensor(&[3.5e-4, -1e-5]);
    let expected = 448. / 3.5e-4;
    check_quantized(&row.eval().quantize(&x, Cols)?, &x, expected);
    row.update();
    assert_eq!((row.scale(), row.slot.version()), (1., (0, 0)));
    Ok(())
}

/// If the first batches have no usable amax, the first usable one sets the scale.
#[test]
fn the_first_batch_is_the_first_with_an_amax() -> Result<()> {
    for useless in [0., f32::INFINITY, f32::NAN] {
        let row = Row::new("l", Role::GradOutput, 3);
        let x = tensor(&[useless]);
        assert_eq!(
            flat(&row.first_batch().quantize(&x, Cols)?.quant_scale),
            [1.],
            "{useless}"
        );
        row.update();
        assert_eq!((row.scale(), row.history()), (1., vec![0.; 3]), "{useless}");
        if !on_cuda() {
            // On a GPU every update counts, since only the device knows which ones set the scale.
            assert_eq!(row.slot.version(), (0, 0), "{useless}");
        }
        let x = tensor(&[3.5]);
        check_quantized(&row.first_batch().quantize(&x, Cols)?, &x, 128.);
    }
    Ok(())
}

#[test]
fn static_scales() -> Result<()> {
    let row = Row::new("blocks.0.fc", Role::Input, 3);
    let quantizer = quantizer(Format::E4M3, ScaleSource::Static(row.slot.clone()));
    let x = tensor(&[2., -3.5]);
    let error = quantizer
        .quantize(&x, Cols)
        .expect_err("not calibrated")
        .to_string();
    assert!(
        error.contains("blocks.0.fc.input") && error.contains("calibrate"),
        "{error}"
    );
    let calibrate = |amaxes: &[f32], with_earlier| -> Result<Vec<fp8_candle::Error>> {
        let step = StepCells::new(row.slot.table())?;
        for &amax in amaxes {
            step.record(0, &Tensor::from_slice(&[amax], 1, &device())?, true)?;
        }
        let wanted = CalibrationRow::new(0, Format::E4M3).with_earlier(with_earlier);
        row.slot.table().finish_calibration(&step, &[wanted], None)
    };
    assert!(calibrate(&[], true)?.is_empty());
    assert!(!row.slot.is_calibrated(), "calibrated by nothing");

    assert!(calibrate(&[1., 7., 3.], true)?.is_empty());
    assert!(row.slot.is_calibrated());
    let q = quantizer.quantize(&x, Cols)?;
    check_quantized(&q, &x, 64.);
    assert!(q.amax.is_none());
    // More batches extend it; a bad one is an error and changes nothing.
    assert!(calibrate(&[14.], true)?.is_empty());
    check_quantized(&quantizer.quantize(&x, Cols)?, &x, 32.);
    for bad in [&[f32::INFINITY][..], &[1., f32::NAN], &[0.]] {
        let errors = calibrate(bad, true)?;
        assert_eq!(errors.len(), 1, "{bad:?}");
        let error = errors[0].to_string();
        assert!(error.contains("blocks.0.fc.input"), "{error}");
        check_quantized(&quantizer.quantize(&x, Cols)?, &x, 32.);
    }
    // A smaller amax is used if earlier ones are not included.
    assert!(calibrate(&[7.], true)?.is_empty());
    check_quantized(&quantizer.quantize(&x, Cols)?, &x, 32.);
    assert!(calibrate(&[7.], false)?.is_empty());
    check_quantized(&quantizer.quantize(&x, Cols)?, &x, 64.);
    // Another format than the calibrated one has its own scale from the same amax.
    let e5m2 = row::quantizer(Format::E5M2, ScaleSource::Static(row.slot.clone()));
    check_quantized(&e5m2.quantize(&x, Cols)?, &x, 8192.);
    row.slot.reset_calibration();
    let error = quantizer.quantize(&x, Cols).unwrap_err().to_string();
    assert!(error.contains("blocks.0.fc.input"), "{error}");
    Ok(())
}

#[test]
fn fixed_scales() -> Result<()> {
    let x = Tensor::from_slice(&[1f32, 2., 3., 4., 5., 6.], (2, 3), &device())?;
    let source = |scales: &[f32]| ScaleSource::Fixed {
        dequant_scale: Tensor::from_slice(scales, scales.len(), &device()).unwrap(),
    };
    check_quantized(
        &quantizer(Format::E4M3, source(&[0.25])).quantize(&x, Cols)?,
        &x,
        4.,
    );
    let rowwise =
        |scales| quantizer(Format::E4M3, source(scales)).with_granularity(Granularity::Rowwise);
    let q = rowwise(&[0.5, 0.25]).quantize(&x, Cols)?;
    assert_eq!(flat(&q.tensor.dequantize(DType::F32)?), flat(&x));
    assert_eq!(flat(q.tensor.dequant_scale()), [0.5, 0.25]);
    let q = rowwise(&[1., 2., 4.]).quantize(&x, Rows)?;
    assert_eq!(flat(q.tensor.dequant_scale()), [1., 2., 4.]);
    assert_eq!(flat(&q.quant_scale), [1., 0.5, 0.25]);
    // Too few scales are an error, not a panic.
    for quantizer in [
        rowwise(&[1., 2.]),
        Row::new("l", Role::Input, 1)
            .eval()
            .with_granularity(Granularity::Rowwise),
        Row::new("l", Role::Input, 1)
            .train()
            .with_granularity(Granularity::Rowwise),
    ] {
        let error = quantizer
            .quantize(&x, Rows)
            .expect_err("three columns")
            .to_string();
        assert!(
            error.contains("scale") && error.contains("3 elements"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn casts_are_counted() -> Result<()> {
    let counter = CastCounter::default();
    let row = Row::new("l", Role::Input, 1);
    let uncalibrated = quantizer(Format::E4M3, ScaleSource::Static(row.slot.clone()));
    for (source, casts) in [
        (Quantizer::dynamic(Format::E4M3, Granularity::Rowwise), 1),
        (row.train(), 1),
        (row.eval(), 1),
        (row.first_batch(), 1),
        (uncalibrated, 0),
    ] {
        let before = counter.load(Ordering::Relaxed);
        let quantizer = source.with_counter(counter.clone());
        let result = quantizer.quantize(&tensor(&[1., 2.]), Cols);
        assert_eq!(
            counter.load(Ordering::Relaxed) - before,
            casts,
            "{quantizer:?}"
        );
        assert_eq!(result.is_ok(), casts == 1);
    }
    Ok(())
}

/// Microscaling uses RCEIL, even right next to powers of two, where dividing by the reciprocal would round past them.
#[test]
fn mx_scales_are_those_of_rceil() -> Result<()> {
    let mut amaxes = vec![0f32, f32::MAX, f32::MIN_POSITIVE, 1e-45, 3.];
    for exponent in -120..120 {
        let edge = 448. * 2f32.powi(exponent);
        if edge.is_normal() {
            let bits = edge.to_bits();
            amaxes.extend([bits - 1, bits, bits + 1].map(f32::from_bits));
        }
    }
    let rows = amaxes.len();
    let mut values = vec![0f32; rows * 32];
    for (row, &amax) in amaxes.iter().enumerate() {
        values[row * 32 + row % 32] = if row % 2 == 0 { amax } else { -amax };
    }
    let x = Tensor::from_vec(values, (rows, 32), &device())?;
    for format in [Format::E4M3, Format::E5M2] {
        let q = Quantizer::dynamic(format, Granularity::Mx).quantize(&x, Cols)?;
        let scales = flat(q.tensor.dequant_scale());
        for (scale, &amax) in scales.iter().zip(&amaxes) {
            let expected = fp8_core::mx_dequant_scale_rceil(amax, format).to_f32();
            assert_eq!(*scale, expected, "{format} {amax:e}");
        }
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let x = Tensor::full(bad, (1, 32), &device())?;
        let q = Quantizer::dynamic(Format::E4M3, Granularity::Mx).quantize(&x, Cols)?;
        assert!(flat(q.tensor.dequant_scale())[0].is_nan(), "{bad}");
    }
    Ok(())
}

/// A power of two changes no rounding: groups of 32 lose less than rows and blocks where values are small next to the largest of
/// their row, and never more.
#[test]
fn mx_rounds_as_rows_with_powers_of_two_do_and_small_values_better() -> Result<()> {
    let spread = Tensor::randn(0f32, 4., (64, 256), &device())?.exp()?;
    let x = (Tensor::randn(0f32, 1., (64, 256), &device())? * spread)?;
    let exact = flat(&x);
    for contraction in [Cols, Rows] {
        let mx = Quantizer::dynamic(Format::E4M3, Granularity::Mx).quantize(&x, contraction)?;
        let mx = flat(&mx.tensor.dequantize(DType::F32)?);
        for coarse in [
            Granularity::Rowwise,
            Granularity::Blockwise { rows: 1, cols: 128 },
        ] {
            let coarse = Quantizer::dynamic(Format::E4M3, coarse).with_power_of_two(true);
            let coarse = coarse.quantize(&x, contraction)?.tensor;
            let values = flat(&coarse.dequantize(DType::F32)?);
            let mut small = 0;
            for (i, code) in codes(&coarse).into_iter().enumerate() {
                let (x, mx, coarse) = (exact[i], mx[i], values[i]);
                assert!((mx - x).abs() <= (coarse - x).abs(), "{x}: {mx}, {coarse}");
                // Above the least normal value both have four significant bits.
                match code & 0x7F > 0x08 {
                    true => assert_eq!(mx, coarse, "{x}"),
                    false => small += usize::from(mx != coarse),
                }
            }
            assert!(small > 0, "no value is small");
        }
    }
    Ok(())
}
