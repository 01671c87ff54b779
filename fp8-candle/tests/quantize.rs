//! Where scales come from: current, delayed, static and fixed; the weight cache; fake quantization; slot updates.

#[path = "common/device.rs"]
mod device;

use candle_core::{DType, Result, Tensor, Var};
use device::{device, on_cuda, skipped_on_cuda};
use fp8_candle::delayed::update_slots;
use fp8_candle::{
    CastCounter, DelayedSlot, Quantized, Quantizer, ScalePolicy, ScaleSource, WeightCache,
    cast_values_and_gradient, fake_quantize, grad_cast,
};
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::{
    AmaxCompute, Cast, DelayedRule, Format, Granularity, ScaleRounding, delayed_quant_scale,
    dynamic_quant_scale, floor_to_power_of_two,
};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, (1, values.len()), &device()).unwrap()
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

fn codes(q: &fp8_candle::Fp8Tensor) -> Vec<u8> {
    q.codes().flatten_all().unwrap().to_vec1().unwrap()
}

fn quantizer(format: Format, source: ScaleSource) -> Quantizer {
    Quantizer {
        source,
        ..Quantizer::dynamic(format, Granularity::Tensorwise)
    }
}

fn delayed(slot: &Arc<DelayedSlot>, record: bool) -> Quantizer {
    let source = ScaleSource::Delayed {
        slot: slot.clone(),
        record,
        first_batch: None,
    };
    quantizer(Format::E4M3, source)
}

fn first_batch(slot: &Arc<DelayedSlot>, record: bool) -> Quantizer {
    let first_batch = Some(DelayedRule::default());
    quantizer(
        Format::E4M3,
        ScaleSource::Delayed {
            slot: slot.clone(),
            record,
            first_batch,
        },
    )
}

fn slot(name: &str, len: usize) -> Arc<DelayedSlot> {
    Arc::new(DelayedSlot::new(name, len, &device()).unwrap())
}

fn scale(slot: &DelayedSlot) -> f32 {
    flat(&slot.tensors().quant_scale)[0]
}

fn history(slot: &DelayedSlot) -> Vec<f32> {
    flat(&slot.tensors().amax_history)
}

/// One update with the default rule and histories of `len`.
fn update(slots: &[&Arc<DelayedSlot>], len: usize) {
    let slots: Vec<_> = slots
        .iter()
        .map(|slot| (Arc::clone(slot), Format::E4M3))
        .collect();
    update_slots(&slots, &DelayedRule::default(), len, &|amaxes| {
        Ok(amaxes.clone())
    })
    .unwrap();
}

fn record(slot: &DelayedSlot, amax: f32) {
    slot.record(Tensor::from_slice(&[amax], 1, &device()).unwrap());
}

/// The scales belong together and the codes follow from them.
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
    let slot = slot("l.input", 3);
    let mut expected = 1f32;
    for (step, amax) in [2f32, 7., 0.5, 0.25, 0.125].into_iter().enumerate() {
        let x = tensor(&[amax, -amax / 3., 0.]);
        let q = delayed(&slot, true).quantize(&x, Cols)?;
        check_quantized(&q, &x, expected);
        assert_eq!(flat(q.amax.as_ref().unwrap()), [amax]);
        // Evaluation in between: the same scale, nothing recorded.
        let eval = tensor(&[1e6]);
        let q = delayed(&slot, false).quantize(&eval, Cols)?;
        check_quantized(&q, &eval, expected);
        assert!(q.amax.is_none());
        update(&[&slot], 3);
        let window = [
            [2., 0., 0.],
            [7., 2., 0.],
            [0.5, 7., 2.],
            [0.25, 0.5, 7.],
            [0.125, 0.25, 0.5],
        ];
        assert_eq!(history(&slot), window[step]);
        let largest = window[step].into_iter().fold(0f32, f32::max);
        expected = delayed_quant_scale(largest, Format::E4M3, 0, expected);
        assert_eq!(scale(&slot), expected);
        assert_eq!(flat(&slot.tensors().dequant_scale), [1. / expected]);
        assert_eq!(slot.version(), (step as u64 + 1, 0));
    }
    Ok(())
}

#[test]
fn evaluation_alone_changes_nothing() -> Result<()> {
    let slot = slot("l.input", 3);
    delayed(&slot, false).quantize(&tensor(&[5.]), Cols)?;
    first_batch(&slot, false).quantize(&tensor(&[5.]), Cols)?;
    update(&[&slot], 3);
    assert_eq!((scale(&slot), history(&slot)), (1., vec![0.; 3]));
    assert_eq!(slot.version(), (0, 0));
    Ok(())
}

#[test]
fn the_first_batch_makes_its_own_scale() -> Result<()> {
    let slot = slot("l.input", 3);
    let x = tensor(&[3.5, -1.]);
    check_quantized(&first_batch(&slot, true).quantize(&x, Cols)?, &x, 128.);
    assert_eq!(history(&slot), [0.; 3], "the history waits for the update");
    // A second micro-batch of the step finds the scale made.
    let large = tensor(&[100.]);
    check_quantized(
        &first_batch(&slot, true).quantize(&large, Cols)?,
        &large,
        128.,
    );
    update(&[&slot], 3);
    assert_eq!(history(&slot), [100., 0., 0.]);
    assert_eq!(scale(&slot), 4.48);
    Ok(())
}

/// Nothing usable in the first batches: the first amax that makes a scale counts.
#[test]
fn the_first_batch_is_the_first_with_an_amax() -> Result<()> {
    for useless in [0., f32::INFINITY, f32::NAN] {
        let slot = slot("l.grad_output", 3);
        let x = tensor(&[useless]);
        assert_eq!(
            flat(&first_batch(&slot, true).quantize(&x, Cols)?.quant_scale),
            [1.],
            "{useless}"
        );
        update(&[&slot], 3);
        assert_eq!(
            (scale(&slot), history(&slot)),
            (1., vec![0.; 3]),
            "{useless}"
        );
        if !on_cuda() {
            // A GPU counts every update: which ones set the scale stays with it.
            assert_eq!(slot.version(), (0, 0), "{useless}");
        }
        let x = tensor(&[3.5]);
        check_quantized(&first_batch(&slot, true).quantize(&x, Cols)?, &x, 128.);
    }
    Ok(())
}

#[test]
fn static_scales() -> Result<()> {
    let slot = slot("blocks.0.fc.input", 3);
    let quantizer = quantizer(Format::E4M3, ScaleSource::Static(slot.clone()));
    let x = tensor(&[2., -3.5]);
    let error = quantizer
        .quantize(&x, Cols)
        .expect_err("not calibrated")
        .to_string();
    assert!(
        error.contains("blocks.0.fc.input") && error.contains("calibrate"),
        "{error}"
    );
    slot.finish_calibration(Format::E4M3, true)?;
    assert!(!slot.is_calibrated(), "calibrated by nothing");

    for amax in [1f32, 7., 3.] {
        slot.record_calibration(Tensor::from_slice(&[amax], 1, &device())?);
    }
    slot.finish_calibration(Format::E4M3, true)?;
    assert!(slot.is_calibrated());
    let q = quantizer.quantize(&x, Cols)?;
    check_quantized(&q, &x, 64.);
    assert!(q.amax.is_none());
    // More batches extend it; a bad one is an error and leaves it.
    slot.record_calibration(Tensor::from_slice(&[14f32], 1, &device())?);
    slot.finish_calibration(Format::E4M3, true)?;
    check_quantized(&quantizer.quantize(&x, Cols)?, &x, 32.);
    for bad in [f32::INFINITY, f32::NAN] {
        slot.record_calibration(Tensor::from_slice(&[bad], 1, &device())?);
        let error = slot
            .finish_calibration(Format::E4M3, true)
            .unwrap_err()
            .to_string();
        assert!(error.contains("blocks.0.fc.input"), "{error}");
        check_quantized(&quantizer.quantize(&x, Cols)?, &x, 32.);
    }
    slot.reset_calibration();
    assert!(quantizer.quantize(&x, Cols).is_err());
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
    let rowwise = |scales| Quantizer {
        granularity: Granularity::Rowwise,
        ..quantizer(Format::E4M3, source(scales))
    };
    let q = rowwise(&[0.5, 0.25]).quantize(&x, Cols)?;
    assert_eq!(flat(&q.tensor.dequantize(DType::F32)?), flat(&x));
    assert_eq!(flat(q.tensor.dequant_scale()), [0.5, 0.25]);
    let q = rowwise(&[1., 2., 4.]).quantize(&x, Rows)?;
    assert_eq!(flat(q.tensor.dequant_scale()), [1., 2., 4.]);
    assert_eq!(flat(&q.quant_scale), [1., 0.5, 0.25]);
    // Too few scales are an error, not a panic.
    for quantizer in [
        rowwise(&[1., 2.]),
        Quantizer {
            granularity: Granularity::Rowwise,
            ..delayed(&slot("l", 1), false)
        },
        Quantizer {
            granularity: Granularity::Rowwise,
            ..delayed(&slot("l", 1), true)
        },
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
    let slot = slot("l.input", 1);
    let uncalibrated = quantizer(Format::E4M3, ScaleSource::Static(slot.clone()));
    for (source, casts) in [
        (Quantizer::dynamic(Format::E4M3, Granularity::Rowwise), 1),
        (delayed(&slot, true), 1),
        (delayed(&slot, false), 1),
        (first_batch(&slot, true), 1),
        (uncalibrated, 0),
    ] {
        let before = counter.load(Ordering::Relaxed);
        let quantizer = Quantizer {
            counter: Some(counter.clone()),
            ..source
        };
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

const NO_CACHE: &str = "a change of the weight is not known without a copy to the host";

/// A cache with its counter and the weight it is asked for.
struct Cached {
    cache: WeightCache,
    weight: Var,
    counter: CastCounter,
}

impl Cached {
    fn new() -> Self {
        let values: Vec<f32> = (0..24).map(|i| (i as f32).sin()).collect();
        let weight = Tensor::from_vec(values, (4, 6), &device()).unwrap();
        Self {
            cache: WeightCache::default(),
            weight: Var::from_tensor(&weight).unwrap(),
            counter: CastCounter::default(),
        }
    }

    /// Multiplies the weight, as an optimizer step would.
    fn step(&self, factor: f64) {
        self.weight
            .set(&(self.weight.as_tensor() * factor).unwrap())
            .unwrap();
    }

    /// The cached codes, and whether they had to be made.
    #[track_caller]
    fn get(&self, quantizer: &Quantizer, made: bool) -> fp8_candle::Fp8Tensor {
        self.get_for(quantizer, Cols, made)
    }

    #[track_caller]
    fn get_for(
        &self,
        quantizer: &Quantizer,
        contraction: fp8_core::Contraction,
        made: bool,
    ) -> fp8_candle::Fp8Tensor {
        let before = self.counter.load(Ordering::Relaxed);
        let quantizer = Quantizer {
            counter: Some(self.counter.clone()),
            ..quantizer.clone()
        };
        let q = self
            .cache
            .quantize(&self.weight, &quantizer, contraction)
            .unwrap();
        let casts = self.counter.load(Ordering::Relaxed) - before;
        assert_eq!(casts, u64::from(made), "casts made");
        q
    }
}

#[test]
fn the_cache_holds_while_the_weight_does() {
    if skipped_on_cuda(NO_CACHE) {
        return;
    }
    let tensorwise = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let rowwise = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    for quantizer in [&tensorwise, &rowwise] {
        let cached = Cached::new();
        let first = cached.get(quantizer, true);
        assert_eq!(codes(&cached.get(quantizer, false)), codes(&first));
        cached.step(1.5);
        let second = cached.get(quantizer, true);
        let direct = quantizer.quantize(&cached.weight, Cols).unwrap().tensor;
        assert_eq!(codes(&second), codes(&direct));
        assert_eq!(flat(second.dequant_scale()), flat(direct.dequant_scale()));
        assert_ne!(flat(second.dequant_scale()), flat(first.dequant_scale()));
        cached.get(quantizer, false);
        // The same bits set again are no change.
        let copy = cached.weight.copy().unwrap();
        cached.weight.set(&copy).unwrap();
        cached.get(quantizer, false);
        cached.cache.clear();
        cached.get(quantizer, true);
    }
}

#[test]
fn the_cache_is_for_one_cast() {
    if skipped_on_cuda(NO_CACHE) {
        return;
    }
    let base = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    let others = [
        Quantizer::dynamic(Format::E5M2, Granularity::Rowwise),
        Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise),
        base.clone().with_power_of_two(true),
        Quantizer {
            source: ScaleSource::Current {
                policy: ScalePolicy::Current { eps: 0. },
                power_of_two: false,
            },
            ..base.clone()
        },
    ];
    for other in &others {
        let cached = Cached::new();
        cached.get(&base, true);
        let got = cached.get(other, true);
        let direct = other.quantize(&cached.weight, Cols).unwrap().tensor;
        assert_eq!(codes(&got), codes(&direct), "{other:?}");
        assert_eq!(got.granularity(), other.granularity);
    }
    let cached = Cached::new();
    cached.get_for(&base, Cols, true);
    let other_axis = cached.get_for(&base, Rows, true);
    assert_eq!(other_axis.dequant_scale().dims(), [1, 6]);
    // Another weight with the same values is another weight.
    let twin = Var::from_tensor(&cached.weight.copy().unwrap()).unwrap();
    cached.get_for(&base, Rows, false);
    let counted = Quantizer {
        counter: Some(cached.counter.clone()),
        ..base
    };
    let before = cached.counter.load(Ordering::Relaxed);
    cached.cache.quantize(&twin, &counted, Rows).unwrap();
    assert_eq!(cached.counter.load(Ordering::Relaxed), before + 1);
}

#[test]
fn a_delayed_weight_records_once_per_change() {
    if skipped_on_cuda(NO_CACHE) {
        return;
    }
    let cached = Cached::new();
    let slot = slot("l.weight", 4);
    let train = delayed(&slot, true);
    let amax = |cached: &Cached| {
        flat(&cached.weight)
            .iter()
            .fold(0f32, |m, x| m.max(x.abs()))
    };
    let first = amax(&cached);

    // Step 1, two micro-batches: the initial scale.
    assert_eq!(flat(cached.get(&train, true).dequant_scale()), [1.]);
    cached.get(&train, false);
    update(&[&slot], 4);
    assert_eq!(history(&slot), [first, 0., 0., 0.]);
    // Still the same weight: codes made with the initial scale are renewed, nothing is recorded again.
    let real = 448. / first;
    assert_eq!(flat(cached.get(&train, true).dequant_scale()), [1. / real]);
    cached.get(&train, false);
    update(&[&slot], 4);
    assert_eq!(history(&slot), [first, 0., 0., 0.]);
    cached.get(&train, false);

    // An optimizer step: one record, with the scale from before it.
    cached.step(2.);
    assert_eq!(flat(cached.get(&train, true).dequant_scale()), [1. / real]);
    cached.get(&train, false);
    update(&[&slot], 4);
    assert_eq!(history(&slot), [2. * first, first, 0., 0.]);
    assert_eq!(scale(&slot), 448. / (2. * first));
    // Gradient accumulation goes on over the update: the codes and their scale stay.
    for _ in 0..3 {
        assert_eq!(flat(cached.get(&train, false).dequant_scale()), [1. / real]);
        update(&[&slot], 4);
    }
    assert_eq!(history(&slot), [2. * first, first, 0., 0.]);
    // The next change takes the new scale.
    cached.step(0.5);
    assert_eq!(
        flat(cached.get(&train, true).dequant_scale()),
        [1. / scale(&slot)]
    );
}

#[test]
fn evaluation_does_not_disturb_the_cache() {
    if skipped_on_cuda(NO_CACHE) {
        return;
    }
    let cached = Cached::new();
    let slot = slot("l.weight", 4);
    let (train, eval) = (delayed(&slot, true), delayed(&slot, false));
    // Evaluation before any training: cached, nothing recorded.
    cached.get(&eval, true);
    cached.get(&eval, false);
    update(&[&slot], 4);
    assert_eq!(slot.version(), (0, 0));
    // Training then records, although the codes are there.
    cached.get(&train, true);
    update(&[&slot], 4);
    assert_ne!(history(&slot)[0], 0.);
    cached.step(2.);
    let in_step = cached.get(&train, true);
    cached.get(&eval, false);
    update(&[&slot], 4);
    // The scale has moved on: evaluation uses the new one, the step in progress keeps its codes.
    let fresh = cached.get(&eval, true);
    assert_eq!(flat(fresh.dequant_scale()), [1. / scale(&slot)]);
    assert_ne!(flat(fresh.dequant_scale()), flat(in_step.dequant_scale()));
    let kept = cached.get(&train, false);
    assert_eq!(flat(kept.dequant_scale()), flat(in_step.dequant_scale()));
    let before = history(&slot);
    update(&[&slot], 4);
    assert_eq!(history(&slot), before);
}

/// A checkpoint between two micro-batches: the codes are made again with the scale they had.
#[test]
fn a_kept_scale_goes_on_elsewhere() -> Result<()> {
    if skipped_on_cuda(NO_CACHE) {
        return Ok(());
    }
    let cached = Cached::new();
    let slot = slot("l.weight", 4);
    let train = delayed(&slot, true);
    let kept = |cached: &Cached| -> Result<Option<Vec<f32>>> {
        Ok(cached
            .cache
            .kept_quant_scale(&cached.weight)?
            .map(|scale| flat(&scale)))
    };
    assert_eq!(kept(&cached)?, None, "nothing cast yet");
    cached.get(&delayed(&slot, false), true);
    assert_eq!(kept(&cached)?, None, "nothing recorded yet");
    cached.get(&train, true);
    update(&[&slot], 4);
    let first = scale(&slot);
    assert_eq!(
        kept(&cached)?,
        Some(vec![first]),
        "codes of the initial scale are renewed"
    );
    cached.step(2.);
    assert_eq!(kept(&cached)?, None, "the next cast records");
    let codes_in_step = codes(&cached.get(&train, true));
    update(&[&slot], 4);
    assert_ne!(scale(&slot), first);
    assert_eq!(kept(&cached)?, Some(vec![first]));

    let resumed = Cached {
        weight: cached.weight.clone(),
        ..Cached::new()
    };
    let scale_tensor = Tensor::from_slice(&[first], 1, &device())?;
    resumed
        .cache
        .restore(&resumed.weight, scale_tensor.clone())?;
    // An evaluation in between uses the newest scale.
    let eval = resumed
        .cache
        .quantize(&resumed.weight, &delayed(&slot, false), Cols)?;
    assert_eq!(flat(eval.dequant_scale()), [1. / scale(&slot)]);
    let again = resumed.get(&train, false);
    assert_eq!(codes(&again), codes_in_step);
    assert_eq!(flat(again.dequant_scale()), [1. / first]);
    let before = history(&slot);
    update(&[&slot], 4);
    assert_eq!(history(&slot), before, "recorded twice");
    resumed.step(0.5);
    assert_eq!(
        flat(resumed.get(&train, true).dequant_scale()),
        [1. / scale(&slot)]
    );

    // For another weight the kept scale means nothing.
    let other = Cached::new();
    other.cache.restore(&other.weight, scale_tensor)?;
    other.step(3.);
    assert_eq!(
        flat(other.get(&train, true).dequant_scale()),
        [1. / scale(&slot)]
    );
    // Nor has a dynamic cast one.
    let dynamic = Cached::new();
    dynamic.get(
        &Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise),
        true,
    );
    assert_eq!(kept(&dynamic)?, None);
    Ok(())
}

#[test]
fn restored_scales_renew_the_cache() -> Result<()> {
    if skipped_on_cuda(NO_CACHE) {
        return Ok(());
    }
    let cached = Cached::new();
    let slot = slot("l.weight", 2);
    let train = delayed(&slot, true);
    cached.get(&train, true);
    update(&[&slot], 2);
    cached.get(&train, true);
    slot.restore(
        &Tensor::from_slice(&[32f32], 1, &device())?,
        &Tensor::from_slice(&[14f32, 3.], 2, &device())?,
    )?;
    assert_eq!(flat(cached.get(&train, true).dequant_scale()), [1. / 32.]);
    cached.get(&train, false);
    for (quant_scale, history, part) in [
        (
            Tensor::ones(2, DType::F32, &device())?,
            Tensor::ones(2, DType::F32, &device())?,
            "quant_scale",
        ),
        (
            Tensor::ones(1, DType::F64, &device())?,
            Tensor::ones(2, DType::F32, &device())?,
            "F64",
        ),
        (
            Tensor::ones(1, DType::F32, &device())?,
            Tensor::ones((2, 1), DType::F32, &device())?,
            "amax_history",
        ),
    ] {
        let error = slot
            .restore(&quant_scale, &history)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
        assert_eq!(scale(&slot), 32., "a failed restore changed the scale");
    }
    Ok(())
}

#[test]
fn fake_quantization_passes_gradients_straight_through() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for granularity in [Granularity::Tensorwise, Granularity::Rowwise] {
            let values: Vec<f32> = (0..60).map(|i| (i as f32 * 0.7).sin() * 3.).collect();
            let x = Var::from_tensor(
                &Tensor::from_vec(values, (3, 4, 5), &device())?.to_dtype(dtype)?,
            )?;
            let g = (x.as_tensor() * 0.37)?.detach();
            let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
            let expected = quantizer.quantize(&x, Cols)?.tensor.dequantize(dtype)?;

            let y = fake_quantize(&x, &quantizer, Cols)?;
            assert_eq!((y.dtype(), y.dims()), (dtype, x.dims()));
            assert_eq!(flat(&y), flat(&expected), "{dtype:?} {granularity}");
            assert_ne!(
                flat(&y),
                flat(&x),
                "{dtype:?} {granularity}: nothing was cast"
            );
            let grads = (&y * &g)?.sum_all()?.backward()?;
            assert_eq!(
                flat(grads.get(&x).unwrap()),
                flat(&g),
                "{dtype:?} {granularity}"
            );

            // The other direction: values untouched, the gradient cast.
            let counter = CastCounter::default();
            let counting = Quantizer {
                counter: Some(counter.clone()),
                ..quantizer.clone()
            };
            let y = grad_cast(&x, &counting, Cols)?;
            assert_eq!(flat(&y), flat(&x), "{dtype:?} {granularity}");
            assert_eq!(counter.load(Ordering::Relaxed), 0);
            let grads = (&y * &g)?.sum_all()?.backward()?;
            let expected_g = quantizer.quantize(&g, Cols)?.tensor.dequantize(dtype)?;
            assert_eq!(
                flat(grads.get(&x).unwrap()),
                flat(&expected_g),
                "{dtype:?} {granularity}"
            );
            assert_ne!(flat(&expected_g), flat(&g));
            assert_eq!(counter.load(Ordering::Relaxed), 1);

            // Both, with two formats.
            let e5m2 = Quantizer::dynamic(Format::E5M2, granularity);
            let y = cast_values_and_gradient(&x, Some((&quantizer, Cols)), Some((&e5m2, Rows)))?;
            assert_eq!(flat(&y), flat(&expected));
            let grads = (&y * &g)?.sum_all()?.backward()?;
            let expected_g = e5m2.quantize(&g, Rows)?.tensor.dequantize(dtype)?;
            assert_eq!(flat(grads.get(&x).unwrap()), flat(&expected_g));
        }
    }
    Ok(())
}

#[test]
fn fake_quantization_of_views_and_constants() -> Result<()> {
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    let base = Var::from_tensor(&Tensor::arange(0f32, 24., &device())?.reshape((4, 6))?)?;
    for view in [base.t()?, base.narrow(1, 1, 3)?, base.narrow(0, 2, 2)?] {
        for y in [
            fake_quantize(&view, &quantizer, Cols)?,
            grad_cast(&view, &quantizer, Cols)?,
        ] {
            assert_eq!(y.dims(), view.dims());
            let error: f32 = flat(&y)
                .iter()
                .zip(flat(&view))
                .map(|(a, b)| (a - b).abs())
                .sum();
            assert!(error <= 24., "{:?}: {error}", view.dims());
            let grads = y.t()?.sqr()?.sum_all()?.backward()?;
            assert_eq!(grads.get(&base).unwrap().dims(), [4, 6]);
        }
        assert_eq!(flat(&grad_cast(&view, &quantizer, Cols)?), flat(&view));
    }
    let constant = base.detach();
    assert!(!fake_quantize(&constant, &quantizer, Cols)?.track_op());
    assert!(!grad_cast(&constant, &quantizer, Cols)?.track_op());
    let integers = constant.to_dtype(DType::U32)?;
    assert!(fake_quantize(&integers, &quantizer, Cols).is_err());
    Ok(())
}

#[test]
fn a_delayed_gradient_cast_records_in_backward() -> Result<()> {
    let slot = slot("grad_output", 2);
    let x = Var::from_tensor(&tensor(&[1., 2.]))?;
    let y = grad_cast(&x, &delayed(&slot, true), Cols)?;
    update(&[&slot], 2);
    assert_eq!(history(&slot), [0., 0.], "recorded before backward");
    (&y * &tensor(&[3., -7.]))?.sum_all()?.backward()?;
    update(&[&slot], 2);
    assert_eq!(history(&slot), [7., 0.]);
    assert_eq!(scale(&slot), 64.);
    Ok(())
}

#[test]
fn updates_merge_by_maximum_and_roll_once() {
    let (shared, unused) = (slot("shared", 3), slot("unused", 3));
    for amax in [1., 3.5, 2.] {
        record(&shared, amax);
    }
    // Named twice: updated once.
    update(&[&shared, &unused, &shared], 3);
    assert_eq!(history(&shared), [3.5, 0., 0.]);
    assert_eq!(scale(&shared), 128.);
    assert_eq!((history(&unused), scale(&unused)), (vec![0.; 3], 1.));
    assert_eq!((shared.version(), unused.version()), ((1, 0), (0, 0)));
    // Nothing new: nothing happens.
    update(&[&shared, &unused], 3);
    assert_eq!(history(&shared), [3.5, 0., 0.]);
    assert_eq!(shared.version(), (1, 0));
}

#[test]
fn zero_and_non_finite_amaxes_keep_history_and_scale() -> Result<()> {
    let slot = slot("l.input", 3);
    record(&slot, 3.5);
    update(&[&slot], 3);
    let mut non_finite = 0;
    for recorded in [
        vec![0.],
        vec![f32::INFINITY],
        vec![f32::NAN],
        vec![f32::NAN, f32::INFINITY, f32::NAN],
        vec![0., f32::INFINITY],
    ] {
        non_finite += recorded.iter().filter(|amax| !amax.is_finite()).count() as u32;
        recorded.iter().for_each(|&amax| record(&slot, amax));
        update(&[&slot], 3);
        assert_eq!(history(&slot), [3.5, 0., 0.], "{recorded:?}");
        assert_eq!(scale(&slot), 128., "{recorded:?}");
        assert_eq!(slot.non_finite_count()?, non_finite, "{recorded:?}");
        if !on_cuda() {
            assert_eq!(slot.version(), (1, 0), "{recorded:?}");
        }
    }
    // A finite amax beside a bad one counts.
    record(&slot, f32::INFINITY);
    record(&slot, 7.);
    update(&[&slot], 3);
    assert_eq!(history(&slot), [7., 3.5, 0.]);
    assert_eq!(scale(&slot), 64.);
    assert_eq!(slot.non_finite_count()?, non_finite + 1);
    record(&slot, 9.);
    slot.discard_pending();
    update(&[&slot], 3);
    assert_eq!(history(&slot), [7., 3.5, 0.], "a discarded amax was used");
    Ok(())
}

#[test]
fn updates_reduce_over_ranks_and_follow_the_rule() -> Result<()> {
    let slots = [slot("a", 2), slot("b", 2), slot("c", 2)];
    record(&slots[0], 1.75);
    record(&slots[2], 7.);
    let formats = [Format::E4M3, Format::E4M3, Format::E5M2];
    let uses: Vec<_> = slots.iter().cloned().zip(formats).collect();
    let rule = DelayedRule {
        margin: 1,
        amax_compute: AmaxCompute::MostRecent,
        scale_rounding: ScaleRounding::PowerOfTwo,
    };
    let seen = RefCell::new(vec![]);
    update_slots(&uses, &rule, 2, &|amaxes| {
        seen.borrow_mut().push(flat(amaxes));
        amaxes * 2.
    })?;
    assert_eq!(
        *seen.borrow(),
        [vec![1.75, 7.]],
        "one call with the slots that were used"
    );
    assert_eq!(history(&slots[0]), [3.5, 0.]);
    assert_eq!(scale(&slots[0]), 64.);
    assert_eq!(history(&slots[1]), [0., 0.]);
    assert_eq!(history(&slots[2]), [14., 0.]);
    assert_eq!(scale(&slots[2]), 2048.);
    // Another length keeps the newest entries.
    record(&slots[0], 1.);
    update_slots(&uses, &rule, 4, &|amaxes| Ok(amaxes.clone()))?;
    assert_eq!(history(&slots[0]), [1., 3.5, 0., 0.]);
    record(&slots[0], 5.);
    update_slots(&uses, &rule, 1, &|amaxes| Ok(amaxes.clone()))?;
    assert_eq!(history(&slots[0]), [5.]);
    slots[2].set_history_len(3)?;
    assert_eq!(history(&slots[2]), [14., 0., 0.]);
    Ok(())
}

/// A reduction that fails must not lose the state of the slots.
#[test]
fn a_failed_reduction_keeps_the_slots() {
    let slot = slot("l.input", 2);
    record(&slot, 3.5);
    let fail = |_: &Tensor| candle_core::bail!("a rank is gone");
    let result = update_slots(
        &[(slot.clone(), Format::E4M3)],
        &DelayedRule::default(),
        2,
        &fail,
    );
    assert!(result.unwrap_err().to_string().contains("a rank is gone"));
    assert_eq!((history(&slot), scale(&slot)), (vec![0., 0.], 1.));
    record(&slot, 7.);
    update(&[&slot], 2);
    assert_eq!(history(&slot), [7., 0.]);
}
