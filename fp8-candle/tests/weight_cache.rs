//! The quantized weight, kept until the weight changes.

#[path = "common/row.rs"]
mod row;

use candle_core::{DType, Tensor, Var};
use fp8_candle::weight_version::announce_change;
use fp8_candle::{CastCounter, Quantizer, Result, Role, ScalePolicy, ScaleSource, WeightCache};
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::{Format, Granularity};
use fp8_test_support::{device, flat, skipped_on_cuda};
use row::{Row, codes};
use std::sync::atomic::Ordering;

const NO_CACHE: &str = "a change of the weight is not known without a copy to the host";

/// A cache with its counter and its weight.
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

    /// Scales the weight, as an optimizer step might.
    fn step(&self, factor: f64) {
        self.weight
            .set(&(self.weight.as_tensor() * factor).unwrap())
            .unwrap();
    }

    /// The codes; `made`: whether they have to be made.
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
        let quantizer = quantizer.clone().with_counter(self.counter.clone());
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
        base.clone().with_source(ScaleSource::Current {
            policy: ScalePolicy::Current { eps: 0. },
            power_of_two: false,
        }),
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
    let counted = base.with_counter(cached.counter.clone());
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
    let row = Row::new("l", Role::Weight, 4);
    let train = row.train();
    let amax = |cached: &Cached| {
        flat(&cached.weight)
            .iter()
            .fold(0f32, |m, x| m.max(x.abs()))
    };
    let first = amax(&cached);

    // Step 1, two micro-batches: the initial scale.
    assert_eq!(flat(cached.get(&train, true).dequant_scale()), [1.]);
    cached.get(&train, false);
    row.update();
    assert_eq!(row.history(), [first, 0., 0., 0.]);
    // Still the same weight: codes made with the initial scale are replaced, and nothing is recorded again.
    let real = 448. / first;
    assert_eq!(flat(cached.get(&train, true).dequant_scale()), [1. / real]);
    cached.get(&train, false);
    row.update();
    assert_eq!(row.history(), [first, 0., 0., 0.]);
    cached.get(&train, false);

    // An optimizer step: one record, with the scale from before it.
    cached.step(2.);
    assert_eq!(flat(cached.get(&train, true).dequant_scale()), [1. / real]);
    cached.get(&train, false);
    row.update();
    assert_eq!(row.history(), [2. * first, first, 0., 0.]);
    assert_eq!(row.scale(), 448. / (2. * first));
    // Gradient accumulation continues over the update: the codes and their scale stay.
    for _ in 0..3 {
        assert_eq!(flat(cached.get(&train, false).dequant_scale()), [1. / real]);
        row.update();
    }
    assert_eq!(row.history(), [2. * first, first, 0., 0.]);
    // The next change uses the new scale.
    cached.step(0.5);
    assert_eq!(
        flat(cached.get(&train, true).dequant_scale()),
        [1. / row.scale()]
    );
}

#[test]
fn evaluation_does_not_disturb_the_cache() {
    if skipped_on_cuda(NO_CACHE) {
        return;
    }
    let cached = Cached::new();
    let row = Row::new("l", Role::Weight, 4);
    let (train, eval) = (row.train(), row.eval());
    // Evaluation before any training: cached, nothing recorded.
    cached.get(&eval, true);
    cached.get(&eval, false);
    row.update();
    assert_eq!(row.slot.version(), (0, 0));
    // Training then records, although the codes exist.
    cached.get(&train, true);
    row.update();
    assert_ne!(row.history()[0], 0.);
    cached.step(2.);
    let in_step = cached.get(&train, true);
    cached.get(&eval, false);
    row.update();
    // The scale has changed: evaluation uses the new one, the step in progress keeps its codes.
    let fresh = cached.get(&eval, true);
    assert_eq!(flat(fresh.dequant_scale()), [1. / row.scale()]);
    assert_ne!(flat(fresh.dequant_scale()), flat(in_step.dequant_scale()));
    let kept = cached.get(&train, false);
    assert_eq!(flat(kept.dequant_scale()), flat(in_step.dequant_scale()));
    let before = row.history();
    row.update();
    assert_eq!(row.history(), before);
}

/// A checkpoint between two micro-batches: the codes are made again with the scale they had.
#[test]
fn a_kept_scale_goes_on_elsewhere() -> Result<()> {
    if skipped_on_cuda(NO_CACHE) {
        return Ok(());
    }
    let cached = Cached::new();
    let row = Row::new("l", Role::Weight, 4);
    let train = row.train();
    let kept = |cached: &Cached| -> Result<Option<Vec<f32>>> {
        Ok(cached
            .cache
            .kept_quant_scale(&cached.weight)?
            .map(|scale| flat(&scale)))
    };
    assert_eq!(kept(&cached)?, None, "nothing cast yet");
    cached.get(&row.eval(), true);
    assert_eq!(kept(&cached)?, None, "nothing recorded yet");
    cached.get(&train, true);
    row.update();
    let first = row.scale();
    assert_eq!(
        kept(&cached)?,
        Some(vec![first]),
        "codes of the initial scale are renewed"
    );
    cached.step(2.);
    assert_eq!(kept(&cached)?, None, "the next cast records");
    let codes_in_step = codes(&cached.get(&train, true));
    row.update();
    assert_ne!(row.scale(), first);
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
    let eval = resumed.cache.quantize(&resumed.weight, &row.eval(), Cols)?;
    assert_eq!(flat(eval.dequant_scale()), [1. / row.scale()]);
    let again = resumed.get(&train, false);
    assert_eq!(codes(&again), codes_in_step);
    assert_eq!(flat(again.dequant_scale()), [1. / first]);
    let before = row.history();
    row.update();
    assert_eq!(row.history(), before, "recorded twice");
    resumed.step(0.5);
    assert_eq!(
        flat(resumed.get(&train, true).dequant_scale()),
        [1. / row.scale()]
    );

    // For another weight the kept scale means nothing.
    let other = Cached::new();
    other.cache.restore(&other.weight, scale_tensor)?;
    other.step(3.);
    assert_eq!(
        flat(other.get(&train, true).dequant_scale()),
        [1. / row.scale()]
    );
    // A dynamic cast has none either.
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
    let row = Row::new("l", Role::Weight, 2);
    let train = row.train();
    cached.get(&train, true);
    row.update();
    cached.get(&train, true);
    row.slot.restore(
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
        let error = row
            .slot
            .restore(&quant_scale, &history)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
        assert_eq!(row.scale(), 32., "a failed restore changed the scale");
    }
    Ok(())
}

/// Evaluation under another recipe does not replace the codes of training, and has its own.
#[test]
fn every_cast_has_an_entry_of_its_own() {
    if skipped_on_cuda(NO_CACHE) {
        return;
    }
    let cached = Cached::new();
    let row = Row::new("l", Role::Weight, 4);
    let rowwise = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    let tensorwise = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    cached.get(&row.train(), true);
    for quantizer in [&rowwise, &tensorwise] {
        cached.get(quantizer, true);
    }
    for quantizer in [&rowwise, &tensorwise, &row.train()] {
        cached.get(quantizer, false);
    }
    cached.step(2.);
    for quantizer in [&rowwise, &tensorwise, &row.train()] {
        cached.get(quantizer, true);
    }
}

/// An amax recorded by an aborted step is recorded again, although the codes are still there.
#[test]
fn an_aborted_step_did_not_record() {
    if skipped_on_cuda(NO_CACHE) {
        return;
    }
    let cached = Cached::new();
    let row = Row::new("l", Role::Weight, 4);
    cached.get(&row.train(), true);
    row.step().abort();
    row.update();
    assert_eq!(row.history(), [0.; 4]);
    cached.get(&row.train(), true);
    row.update();
    assert_ne!(row.history()[0], 0.);
}

/// On a device without fingerprints, codes are kept for weights whose changes are announced. On every device, an announced
/// change is noticed.
#[test]
fn announced_changes_are_seen() {
    let cached = Cached::new();
    let tensorwise = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
    cached.get(&tensorwise, true);
    cached.step(2.);
    announce_change(&cached.weight);
    let first = cached.get(&tensorwise, true);
    assert_eq!(codes(&cached.get(&tensorwise, false)), codes(&first));
    cached.step(-1.);
    announce_change(&cached.weight);
    assert_ne!(codes(&cached.get(&tensorwise, true)), codes(&first));
}

/// A checkpoint keeps the scale of training, not that of an evaluation in another format.
#[test]
fn the_kept_scale_is_that_of_training() -> Result<()> {
    if skipped_on_cuda(NO_CACHE) {
        return Ok(());
    }
    let cached = Cached::new();
    let mut row = Row::new("l", Role::Weight, 4);
    for _ in 0..2 {
        cached.get(&row.train(), true);
        row.update();
    }
    let trained = flat(cached.get(&row.train(), false).dequant_scale());
    row.rule.format = Format::E5M2;
    let eval = cached.cache.quantize(&cached.weight, &row.eval(), Cols)?;
    assert_ne!(flat(eval.dequant_scale()), trained);
    let kept = cached.cache.kept_quant_scale(&cached.weight)?;
    assert_eq!(kept.map(|scale| 1. / flat(&scale)[0]), Some(trained[0]));
    Ok(())
}
