//! Casts with the scales of served models divide: on every device, from every source of such scales, and when they are done again.

use crate::row::{Row, codes};
use candle_core::{DType, Tensor};
use fp8_candle::state::{CalibrationRow, StepCells};
use fp8_candle::{
    InputScaling, Quantizer, Recording, Replay, Result, Role, ScalePolicy, ScaleSource, Slot,
    WeightCache,
};
use fp8_core::Contraction::Cols;
use fp8_core::{Cast, Format, Granularity};
use fp8_test_support::{device, flat};

/// The largest number in every 64 neighbours, and the scale that it gives: a quotient without a rounding.
const AMAX: f32 = 3.0625;
const SCALE: f32 = 0.0068359375;

const CAST: Cast = Cast::new(Format::E4M3);

/// Numbers halfway between two codes under [`SCALE`]; a product with its reciprocal is beside the middle for some of them.
fn ties(cols: usize, dtype: DType) -> Result<Tensor> {
    let rows = 6;
    let value = |i: usize| {
        let odd = (17 + 2 * (i % 8)) as f32;
        let size = match i % 64 {
            5 => AMAX,
            _ => odd * 7. / (256 << (i / 8 % 6)) as f32,
        };
        if i.is_multiple_of(3) { -size } else { size }
    };
    let values: Vec<f32> = (0..rows * cols).map(value).collect();
    let x = Tensor::from_slice(&values, (rows, cols), &device())?;
    assert_ne!(expected(&x), multiplied(&x, 1. / SCALE), "the rules differ");
    Ok(x.to_dtype(dtype)?)
}

/// The codes of the quotients.
fn expected(x: &Tensor) -> Vec<u8> {
    let code = |x: &f32| CAST.encode_divided(*x, SCALE, 0);
    flat(x).iter().map(code).collect()
}

/// The codes of products with this scale.
fn multiplied(x: &Tensor, quant_scale: f32) -> Vec<u8> {
    let code = |x: &f32| CAST.encode_scaled(*x, quant_scale, 0);
    flat(x).iter().map(code).collect()
}

/// A slot with this scale, from calibration.
fn calibrated() -> Result<Slot> {
    let slot = Row::new("fc", Role::Input, 1).slot;
    let step = StepCells::new(slot.table())?;
    step.record(0, &Tensor::from_slice(&[AMAX], 1, &device())?, true)?;
    let row = CalibrationRow::new(0, Format::E4M3);
    let errors = slot.table().finish_calibration(&step, &[row], None)?;
    assert!(errors.is_empty());
    Ok(slot)
}

fn fixed(count: usize) -> Result<ScaleSource> {
    let dequant_scale = Tensor::full(SCALE, count, &device())?;
    Ok(ScaleSource::Fixed { dequant_scale })
}

/// Casts that divide by [`SCALE`], each with a name.
fn quantizers() -> Result<Vec<(&'static str, Quantizer)>> {
    let dynamic = || ScaleSource::Current {
        policy: ScalePolicy::Inference,
        power_of_two: false,
    };
    let blocks = |rows, cols| Granularity::Blockwise { rows, cols };
    let bounded = |granularity| Quantizer::new(CAST, granularity, dynamic()).with_amax_bound(5f32);
    let new = |granularity, source| Quantizer::new(CAST, granularity, source);
    Ok(vec![
        ("fixed", new(Granularity::Tensorwise, fixed(1)?)),
        ("fixed, by rows", new(Granularity::Rowwise, fixed(6)?)),
        (
            "static",
            new(Granularity::Tensorwise, ScaleSource::Static(calibrated()?)),
        ),
        ("tensor", new(Granularity::Tensorwise, dynamic())),
        ("token", new(Granularity::Rowwise, dynamic())),
        ("group", new(blocks(1, 64), dynamic())),
        ("block", new(blocks(4, 64), dynamic())),
        ("bounded tensor", bounded(Granularity::Tensorwise)),
        ("bounded token", bounded(Granularity::Rowwise)),
    ])
}

#[test]
fn served_scales_divide() -> Result<()> {
    // Rows of 128 and of 192 have kernels of their own on a GPU.
    for cols in [128, 192] {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let x = ties(cols, dtype)?;
            let expected = expected(&x);
            for (name, quantizer) in quantizers()? {
                let what = format!("{name} {cols} {dtype:?}");
                let q = quantizer.quantize(&x, Cols)?;
                assert_eq!(codes(&q.tensor), expected, "{what}");
                let all =
                    |x: &Tensor, of: f32| x.elem_count() > 0 && flat(x).iter().all(|x| *x == of);
                assert!(all(q.tensor.dequant_scale(), SCALE), "{what}");
                assert!(all(&q.quant_scale, 1. / SCALE), "{what}");
                assert_eq!(q.cast, CAST.with_division(true), "{what}");
            }
        }
    }
    Ok(())
}

/// Recorded casts, cached codes and parts of a tensor.
#[test]
fn casts_that_are_done_again_divide_too() -> Result<()> {
    let x = ties(128, DType::BF16)?;
    let expected = expected(&x);
    for (name, quantizer) in quantizers()? {
        let recording = Recording::default();
        let run = |replay: Replay| quantizer.clone().with_replay(replay).quantize(&x, Cols);
        run(recording.recorder())?;
        let again = run(recording.player())?;
        assert_eq!(codes(&again.tensor), expected, "{name} replayed");
        assert_eq!(again.cast, CAST.with_division(true), "{name}");

        let cache = WeightCache::default();
        for _ in 0..2 {
            let cached = cache.quantize(&x, &quantizer, Cols)?;
            assert_eq!(codes(&cached), expected, "{name} cached");
        }
        if !quantizer.casts_parts() {
            continue;
        }
        let (whole, recording) = (x.flatten_all()?, Recording::default());
        for replay in [recording.recorder(), recording.player()] {
            let quantizer = quantizer.clone().with_replay(replay);
            for range in [0..300, 300..768] {
                let part = whole.narrow(0, range.start, range.len())?;
                let amax = || -> Result<Tensor> { Ok(Tensor::full(AMAX, 1, &device())?) };
                let part = quantizer.quantize_part(&part, amax)?;
                assert_eq!(codes(&part.tensor), expected[range], "{name} in parts");
            }
        }
    }
    Ok(())
}

#[test]
fn layers_multiply_what_was_divided() -> Result<()> {
    let x = ties(192, DType::BF16)?;
    let decoded = expected(&x).into_iter();
    let expected: Vec<f32> = decoded
        .map(|code| Format::E4M3.decode(code) * SCALE)
        .collect();
    let scale = Tensor::full(SCALE, 1, &device())?;
    for input in [
        InputScaling::Static(scale),
        InputScaling::per_tensor(),
        InputScaling::per_token(),
        InputScaling::per_group(64),
    ] {
        assert_eq!(flat(&input.multiplied(&x)?), expected, "{input:?}");
    }
    Ok(())
}

/// Known scales are those of a cast of either kind. A power of two rounds nothing, and training multiplies.
#[test]
fn other_scales_multiply_unless_the_cast_divides() -> Result<()> {
    let x = ties(128, DType::BF16)?;
    let known = ScaleSource::Known {
        quant_scale: Tensor::full(1. / SCALE, 1, &device())?,
        dequant_scale: Tensor::full(SCALE, 1, &device())?,
    };
    let of = |cast| Quantizer::new(cast, Granularity::Tensorwise, known.clone());
    let q = of(CAST).quantize(&x, Cols)?;
    assert_eq!(codes(&q.tensor), multiplied(&x, 1. / SCALE));
    let q = of(CAST.with_division(true)).quantize(&x, Cols)?;
    assert_eq!(codes(&q.tensor), expected(&x));
    // So a source with another dequant_scale is another one.
    assert_eq!(known, known.clone());
    if let ScaleSource::Known { quant_scale, .. } = &known {
        let other = ScaleSource::Known {
            quant_scale: quant_scale.clone(),
            dequant_scale: Tensor::full(2. * SCALE, 1, &device())?,
        };
        assert_ne!(known, other);
    }

    let inference = ScaleSource::Current {
        policy: ScalePolicy::Inference,
        power_of_two: true,
    };
    let q = Quantizer::new(CAST, Granularity::Tensorwise, inference).quantize(&x, Cols)?;
    assert_eq!(codes(&q.tensor), multiplied(&x, 128.));
    assert_eq!(q.cast, CAST);
    let q = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise).quantize(&x, Cols)?;
    assert_eq!(codes(&q.tensor), multiplied(&x, 448. / AMAX));
    assert_eq!(q.cast, CAST);
    Ok(())
}
