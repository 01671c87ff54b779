//! Weights packed for their device.

use candle_core::{DType, Tensor};
use fp8_candle::state::StepCells;
use fp8_candle::{
    AmaxRecorder, FirstScale, Fp8Tensor, GemmPlan, LinearPlan, LinearWeight, PackedWeight,
    Quantizer, Result, Role, ScaleSource, Slot, WeightCache, fp8_linear,
};
use fp8_core::{Contraction, DelayedRule, Format, Granularity};
use fp8_test_support::{device, tensor};

fn plan(granularity: Granularity, emulate: bool) -> LinearPlan {
    let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
    LinearPlan::new("layer")
        .with_output(GemmPlan::new(quantizer.clone(), quantizer))
        .with_emulate(emulate)
}

#[test]
fn codes_come_back_and_are_held_once() -> Result<()> {
    for (n, k) in [(1, 1), (64, 96), (33, 70)] {
        for granularity in [Granularity::Tensorwise, Granularity::Rowwise] {
            let quantizer = Quantizer::dynamic(Format::E5M2, granularity);
            let codes = Fp8Tensor::quantize(&tensor(1, &[n, k]), &quantizer, Contraction::Cols)?;
            let weight = PackedWeight::new(&codes)?;
            assert_eq!(weight.dims(), [n, k]);
            assert_eq!(weight.format(), Format::E5M2);
            let padded = n.next_multiple_of(32) * k.next_multiple_of(32);
            let scales = 4 * codes.dequant_scale().elem_count();
            let one_copy = n * k + scales..=padded + scales;
            assert!(one_copy.contains(&weight.size_in_bytes()), "{n} {k}");
            let back = weight.unpack()?;
            assert!(one_copy.contains(&weight.size_in_bytes()), "{n} {k}");
            assert_eq!(
                back.codes().to_vec2::<u8>()?,
                codes.codes().to_vec2::<u8>()?
            );
            let values = |x: &Tensor| x.to_vec2::<f32>();
            assert_eq!(
                values(&weight.dequantize(DType::F32)?)?,
                values(&codes.dequantize(DType::F32)?)?
            );
            assert_eq!(
                weight.codes().codes().to_vec2::<u8>()?,
                codes.codes().to_vec2::<u8>()?
            );
        }
    }
    Ok(())
}

#[test]
fn only_matrices_are_packed() -> Result<()> {
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let x = tensor(1, &[2, 3, 4]);
    let codes = Fp8Tensor::quantize(&x, &quantizer, Contraction::Cols)?;
    let error = PackedWeight::new(&codes).unwrap_err().to_string();
    assert!(error.contains("[2, 3, 4]"), "{error}");
    Ok(())
}

/// A packed weight, plain codes, and a cached weight on its first and later uses give the same bits.
#[test]
fn every_form_of_a_weight_gives_the_same_bits() -> Result<()> {
    let (n, k) = (70, 600);
    for granularity in [Granularity::Tensorwise, Granularity::Rowwise] {
        let plan = plan(granularity, false);
        let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
        let w = tensor(2, &[n, k]);
        let codes = Fp8Tensor::quantize(&w, &quantizer, Contraction::Cols)?;
        let packed = PackedWeight::new(&codes)?;
        for m in [1, 2, 3, 7, 12, 13, 16, 17, 32, 33, 200] {
            let x = tensor(3, &[m, k]);
            let run = |weight: LinearWeight<'_>| -> Result<Vec<Vec<f32>>> {
                Ok(fp8_linear(&x, weight, None, &plan)?.to_vec2()?)
            };
            let expected = run(LinearWeight::Fp8(&codes))?;
            assert_eq!(
                run(LinearWeight::Packed(&packed))?,
                expected,
                "packed, {m} rows"
            );
            let cache = WeightCache::default();
            for call in 0..12 {
                let y = run(LinearWeight::HighPrecision(&w, Some(&cache)))?;
                assert_eq!(y, expected, "call {call}, {m} rows");
            }
        }
    }
    Ok(())
}

/// Where kernels do not read NaN, Inf or FNUZ in packed codes, such codes stay as they are.
#[test]
fn a_weight_with_any_codes_gives_the_same_bits() -> Result<()> {
    let (n, k, granularity) = (70, 96, Granularity::Rowwise);
    let plan = plan(granularity, false);
    for (format, code) in [
        (Format::E4M3, 0x7F),
        (Format::E4M3, 0xFF),
        (Format::E5M2, 0x7C),
        (Format::E5M2, 0xFE),
        (Format::E4M3Fnuz, 0x38),
        (Format::E4M3Fnuz, 0x80),
        (Format::E5M2Fnuz, 0x80),
    ] {
        let quantizer = Quantizer::dynamic(format, granularity);
        let codes = Fp8Tensor::quantize(&tensor(2, &[n, k]), &quantizer, Contraction::Cols)?;
        let scales = codes.dequant_scale().clone();
        let mut codes = codes.codes().flatten_all()?.to_vec1::<u8>()?;
        codes[5 * k + 7] = code;
        let codes = Tensor::from_vec(codes, (n, k), &device())?;
        let codes = Fp8Tensor::from_parts(codes, format, granularity, Contraction::Cols, scales)?;
        let packed = PackedWeight::new(&codes)?;
        let is_finite = format.decode(code).is_finite();
        for m in [1, 3, 13, 33, 200] {
            let x = tensor(3, &[m, k]);
            let run = |weight: LinearWeight<'_>| -> Result<Vec<Vec<f32>>> {
                Ok(fp8_linear(&x, weight, None, &plan)?.to_vec2()?)
            };
            let expected = run(LinearWeight::Fp8(&codes))?;
            let got = run(LinearWeight::Packed(&packed))?;
            let case = format!("{format} {code:#x}, {m} rows");
            assert_eq!((expected.len(), got.len()), (m, m), "{case}");
            for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
                let same = got == expected || got.is_nan() && expected.is_nan();
                assert!(same, "{case}: {got}, expected {expected}");
            }
            for row in &got {
                for (col, y) in row.iter().enumerate() {
                    assert_eq!(y.is_finite(), is_finite || col != 5, "{case}: {y} in {col}");
                }
            }
        }
    }
    Ok(())
}

/// A change of a weight takes effect at once, even after many uses.
#[test]
fn a_changed_weight_is_packed_anew() -> Result<()> {
    let (m, n, k) = (3, 40, 64);
    let plan = plan(Granularity::Rowwise, false);
    let x = tensor(1, &[m, k]);
    let w = candle_core::Var::from_tensor(&tensor(2, &[n, k]))?;
    let cache = WeightCache::default();
    for version in 0..3 {
        let value = tensor(10 + version, &[n, k]);
        w.set(&value)?;
        let run = |weight: LinearWeight<'_>| -> Result<Vec<Vec<f32>>> {
            Ok(fp8_linear(&x, weight, None, &plan)?.to_vec2()?)
        };
        let expected = run(LinearWeight::HighPrecision(&value, None))?;
        for call in 0..12 {
            let y = run(LinearWeight::HighPrecision(&w, Some(&cache)))?;
            assert_eq!(y, expected, "version {version}, call {call}");
        }
    }
    Ok(())
}

/// Codes kept by a training step are packed; evaluation, whose scale is newer, makes its own.
#[test]
fn evaluation_never_gets_the_packed_codes_of_an_older_scale() -> Result<()> {
    let (m, n, k) = (3, 40, 64);
    let (x, w) = (tensor(1, &[m, k]), tensor(2, &[n, k]));
    let slot = Slot::alone("layer", Role::Weight, 1, &device())?;
    let step = StepCells::new(slot.table())?;
    let scale = |value: f32| Tensor::full(value, 1, &device());
    slot.restore(&scale(64.)?, &scale(2.)?)?;
    let plan = |record| {
        let mut plan = plan(Granularity::Tensorwise, false);
        if let Some(gemm) = &mut plan.output {
            gemm.b.source = ScaleSource::Delayed {
                slot: slot.clone(),
                rule: DelayedRule::default(),
                first: FirstScale::One,
            };
            gemm.b.observers.recorder = Some(AmaxRecorder::new(step.clone(), 0, record));
        }
        plan
    };
    let run = |record, cache| -> Result<Vec<Vec<f32>>> {
        Ok(fp8_linear(
            &x,
            LinearWeight::HighPrecision(&w, cache),
            None,
            &plan(record),
        )?
        .to_vec2()?)
    };
    let cache = WeightCache::default();
    for call in 0..12 {
        assert_eq!(
            run(true, Some(&cache))?,
            run(false, None)?,
            "training, call {call}"
        );
    }
    let before = run(false, None)?;
    // Under this scale, values saturate sooner.
    slot.restore(&scale(3.)?, &scale(2.)?)?;
    let after = run(false, None)?;
    assert_ne!(before, after);
    for call in 0..12 {
        let y = run(false, Some(&cache))?;
        assert_eq!(y, after, "evaluation, call {call}");
    }
    Ok(())
}

#[test]
fn gradients_and_emulation_see_the_same_values() -> Result<()> {
    let (m, n, k) = (5, 40, 64);
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    let codes = Fp8Tensor::quantize(&tensor(2, &[n, k]), &quantizer, Contraction::Cols)?;
    let packed = PackedWeight::new(&codes)?;
    let x = candle_core::Var::from_tensor(&tensor(3, &[m, k]))?;
    let mut results = vec![];
    for weight in [LinearWeight::Fp8(&codes), LinearWeight::Packed(&packed)] {
        for emulate in [false, true] {
            let y = fp8_linear(&x, weight, None, &plan(Granularity::Rowwise, emulate))?;
            let grads = y.backward()?;
            let grad = grads.get(&x).expect("x has a gradient").to_vec2::<f32>()?;
            results.push((y.to_vec2::<f32>()?, grad));
        }
        let high_precision = plan(Granularity::Rowwise, false).with_output(None);
        let y = fp8_linear(&x, weight, None, &high_precision)?;
        let grads = y.backward()?;
        assert_eq!(
            grads.get(&x).expect("x has a gradient").to_vec2::<f32>()?,
            results[0].1
        );
    }
    assert_eq!(results[0], results[2]);
    assert_eq!(results[1], results[3]);
    Ok(())
}
