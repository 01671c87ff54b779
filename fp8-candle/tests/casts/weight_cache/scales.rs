//! The scale of a cached weight.

use super::*;

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

    // The kept scale does not apply to another weight.
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

/// Codes hide Inf, so each step that uses them is told, also of codes that a checkpoint's scale has made.
#[test]
fn a_kept_scale_hides_no_inf() -> Result<()> {
    if skipped_on_cuda(NO_CACHE) {
        return Ok(());
    }
    let cached = Cached::new();
    let row = Row::new("l", Role::Weight, 4);
    cached.get(&row.train(), true);
    row.update();
    let mut values = flat(&cached.weight);
    values[5] = f32::INFINITY;
    let values = Tensor::from_vec(values, (4, 6), &device())?;
    cached.weight.set(&values)?;
    for (made, told) in [(true, 1), (false, 2)] {
        cached.get(&row.train(), made);
        row.update();
        assert_eq!(row.slot.non_finite_count()?, told);
    }
    let kept = cached.cache.kept_quant_scale(&cached.weight)?;
    let kept = kept.expect("a weight that has not changed");
    for evaluates_first in [false, true] {
        let resumed = Cached {
            weight: cached.weight.clone(),
            ..Cached::new()
        };
        resumed.cache.restore(&resumed.weight, kept.clone())?;
        let (history, told) = (row.history(), row.slot.non_finite_count()?);
        if evaluates_first {
            resumed.cache.quantize(&resumed.weight, &row.eval(), Cols)?;
        }
        for step in 1..3 {
            let train = row.train();
            // Micro-batches of one step are told once.
            for _ in 0..2 {
                resumed.cache.quantize(&resumed.weight, &train, Cols)?;
            }
            row.update();
            assert_eq!(row.slot.non_finite_count()?, told + step);
        }
        assert_eq!(row.history(), history);
    }
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

/// A changed margin takes effect for an unchanged weight.
#[test]
fn another_rule_renews_a_frozen_weight() -> Result<()> {
    if skipped_on_cuda(NO_CACHE) {
        return Ok(());
    }
    let cached = Cached::new();
    let mut row = Row::new("l", Role::Weight, 4);
    for made in [true, true, false] {
        cached.get(&row.train(), made);
        row.update();
    }
    let before = row.scale();
    let history = row.history();
    row.rule.rule = row.rule.rule.clone().with_margin(3);
    // The step begins with the scale of the step before it, as without a cache.
    for _ in 0..2 {
        let codes = cached.get(&row.train(), false);
        assert_eq!(flat(codes.dequant_scale()), [1. / before]);
    }
    row.update();
    assert_eq!(row.scale(), before / 8.);
    assert_eq!(row.history(), history, "recorded again");
    for made in [true, false] {
        let codes = cached.get(&row.train(), made);
        assert_eq!(flat(codes.dequant_scale()), [8. / before]);
        row.update();
    }
    assert_eq!(row.scale(), before / 8.);
    Ok(())
}
