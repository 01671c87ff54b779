//! The quantized weight, kept until the weight changes.

mod scales;

use crate::row::{Row, codes};
use candle_core::{DType, Tensor, Var};
use fp8_candle::weight_version::announce_change;
use fp8_candle::{CastCounter, Quantizer, Result, Role, ScalePolicy, ScaleSource, WeightCache};
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::{Format, Granularity};
use fp8_test_support::{device, flat, skipped_on_cuda};
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

    /// The codes. `made`: whether they must be computed.
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
        // Setting the same bits again is not a change.
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
        assert_eq!(got.granularity(), other.spec.granularity);
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
    // Gradient accumulation continues past the update: the codes and their scale stay.
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
