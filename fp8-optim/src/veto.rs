//! The veto of non-finite casts: a step in which a cast of the model has seen Inf or NaN is skipped, and the cast is named.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Tensor, TensorId};
use fp8_candle::state::{Judged, NonFinite, NonFiniteCounts};
use fp8_candle::weight_version::WeightVersion;

use super::error::{OptimError, Result};

/// What one reader of vetoes has judged: a step of FP8 that it has skipped or taken does not count again for later ones, which may compute
/// in high precision or with another model.
#[derive(Clone, Debug, Default)]
pub(crate) struct JudgedCasts(Vec<Judged>);

/// What the casts of the latest step have seen, in the models whose parameters an optimizer changes.
///
/// A saturating cast turns Inf into the largest finite code, so gradients may look clean although the step has overflowed.
#[derive(Clone, Debug, Default)]
pub(crate) struct CastVeto(Vec<NonFiniteCounts>);

impl CastVeto {
    /// Collects the state tables of the models that have these variables: what their casts have seen that a reader has not `judged` before.
    /// Returns the counts and the reader's new record; while a device records, the record stays as it was.
    pub(crate) fn of<'a>(
        versions: impl Iterator<Item = &'a WeightVersion>,
        judged: &JudgedCasts,
    ) -> Result<(Self, JudgedCasts)> {
        let mut found: Vec<NonFiniteCounts> = vec![];
        let (mut now, mut is_recorded) = (vec![], false);
        for table in versions.flat_map(WeightVersion::tables) {
            if !found.iter().any(|known| Arc::ptr_eq(known.table(), &table)) {
                let (counts, known) = NonFiniteCounts::since(table, &judged.0)?;
                found.push(counts);
                is_recorded |= known.is_none();
                now.extend(known);
            }
        }
        let judged = match is_recorded {
            true => judged.clone(),
            false => JudgedCasts(now),
        };
        Ok((Self(found), judged))
    }

    /// Per table an f64 scalar on its device: 0, or NaN if a cast has seen Inf or NaN. Waits for no device.
    pub(crate) fn marks(&self) -> Result<Vec<Tensor>> {
        let marks = self.0.iter().map(NonFiniteCounts::veto);
        Ok(marks.collect::<fp8_candle::Result<_>>()?)
    }

    /// Makes one of these gradients NaN if a cast has seen Inf or NaN. Waits for no accelerator.
    #[cfg(feature = "cuda")]
    pub(crate) fn poison<'a>(&self, grads: impl Iterator<Item = &'a mut Tensor>) -> Result<()> {
        poison_smallest(grads, &self.marks()?)
    }

    /// The casts that saw Inf or NaN, oldest first. Waits for devices.
    pub(super) fn casts(&self) -> Result<Vec<NonFinite>> {
        Ok(NonFiniteCounts::list(&self.0)?)
    }

    /// The tensor in which Inf or NaN was first seen.
    pub(super) fn first(&self) -> Result<Option<String>> {
        Ok(NonFiniteCounts::first(&self.0)?)
    }
}

/// [`JudgedCasts`] of the sets of variables that one loss scaler drives, each known by its first one: two optimizers of a model both skip a
/// step. No part of a scaler's state, so all are equal.
#[derive(Debug, Default)]
pub(super) struct JudgedSets(Mutex<HashMap<Option<TensorId>, JudgedCasts>>);

impl JudgedSets {
    /// What casts have seen in the models of the set of the variable `first` since it was last judged.
    pub(super) fn veto<'a>(
        &self,
        first: Option<TensorId>,
        versions: impl Iterator<Item = &'a WeightVersion>,
    ) -> Result<CastVeto> {
        let mut sets = self.lock();
        // Sets of models that are gone, as in a sweep.
        sets.retain(|_, judged| judged.0.iter().any(Judged::is_current));
        let judged = sets.entry(first).or_default();
        let (veto, now) = CastVeto::of(versions, judged)?;
        *judged = now;
        Ok(veto)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Option<TensorId>, JudgedCasts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for JudgedSets {
    fn clone(&self) -> Self {
        Self(Mutex::new(self.lock().clone()))
    }
}

impl PartialEq for JudgedSets {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// Makes one of these gradients NaN if one of `marks` (f64 scalars) is: the smallest one, since the change copies it. Waits for no
/// accelerator.
pub(crate) fn poison_smallest<'a>(
    grads: impl Iterator<Item = &'a mut Tensor>,
    marks: &[Tensor],
) -> Result<()> {
    let smallest = grads.min_by_key(|grad| match grad.elem_count() {
        0 => usize::MAX,
        count => count,
    });
    let Some(grad) = smallest else { return Ok(()) };
    for mark in marks {
        if !mark.device().is_cpu() || mark.to_scalar::<f64>()?.is_nan() {
            let mark = mark.to_device(grad.device())?.to_dtype(grad.dtype())?;
            *grad = grad.broadcast_add(&mark)?;
        }
    }
    Ok(())
}

/// Counts skipped steps in a row, as far as the host knows: the reports of a device's steps add theirs when they are read.
#[derive(Clone, Debug, Default)]
pub(super) struct SkipStreak(Arc<AtomicU64>);

impl SkipStreak {
    pub(super) fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Fails once `limit` steps in a row were skipped.
    pub(super) fn check<'a>(
        &self,
        limit: Option<u64>,
        veto: &CastVeto,
        vars: impl Iterator<Item = (&'a str, &'a Tensor)>,
    ) -> Result<()> {
        check_skips(self.0.load(Ordering::Relaxed), limit, veto, vars)
    }
}

/// Fails if `steps` skipped in a row are `limit` or more. Only then are `vars` searched for Inf and NaN.
pub(super) fn check_skips<'a>(
    steps: u64,
    limit: Option<u64>,
    veto: &CastVeto,
    mut vars: impl Iterator<Item = (&'a str, &'a Tensor)>,
) -> Result<()> {
    let Some(limit) = limit.filter(|limit| steps >= *limit) else {
        return Ok(());
    };
    let variable = vars.find_map(|(name, var)| match is_finite(var) {
        Ok(true) => None,
        Ok(false) => Some(Ok(name.to_string())),
        Err(error) => Some(Err(error)),
    });
    Err(OptimError::TooManySkipped {
        steps,
        limit,
        first: veto.first()?,
        variable: variable.transpose()?,
    })
}

fn is_finite(x: &Tensor) -> Result<bool> {
    // 0 times Inf or NaN is NaN, which the sum propagates.
    let zero = x.detach().affine(0., 0.)?.sum_all()?;
    Ok(zero.to_dtype(DType::F32)?.to_scalar::<f32>()?.is_finite())
}
