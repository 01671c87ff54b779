//! Inf and NaN that casts of the optimizer's model have seen: they veto its step, and are named.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Tensor};
use fp8_candle::weight_version::WeightVersion;

use super::error::{OptimError, Result};
use super::params::check;
use crate::autocast::{Counts, NonFinite, culprit, non_finite};

/// What the casts of the latest step have seen, in the models whose parameters an optimizer changes.
///
/// A saturating cast turns Inf into the largest finite code, so that gradients look clean; under scales made from the tensor itself they
/// would not be finite.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen(Vec<Counts>);

impl Seen {
    /// By the variables of an optimizer.
    pub(crate) fn by<'a>(versions: impl Iterator<Item = &'a WeightVersion>) -> Result<Self> {
        let mut found: Vec<Counts> = vec![];
        for table in versions.flat_map(WeightVersion::tables) {
            let known = |counts: &Counts| Arc::ptr_eq(counts.table(), &table);
            if !found.iter().any(known) {
                let (before, now) = table.seen_in_step()?;
                found.push(Counts::between(table, before, now));
            }
        }
        Ok(Self(found))
    }

    /// Per table an f64 scalar on its device: 0, or NaN if a cast has seen Inf or NaN. Waits for no device.
    pub(super) fn marks(&self) -> Result<Vec<Tensor>> {
        let mark = |counts: &Counts| -> Result<Tensor> {
            let (before, now) = (counts.before(), counts.after().map_err(other)?);
            let more = now.to_dtype(DType::F64)?;
            let more = (more - before.to_dtype(DType::F64)?)?.relu()?.sum_all()?;
            // The root of a negative number is none; that of -0 is -0, which changes no sum.
            Ok(more.neg()?.sqrt()?)
        };
        self.0.iter().map(mark).collect()
    }

    /// Makes one of these gradients NaN if a cast has seen Inf or NaN: the smallest one, since it costs a copy. Waits for no device but
    /// the CPU.
    pub(crate) fn mark<'a>(&self, grads: impl Iterator<Item = &'a mut Tensor>) -> Result<()> {
        let smallest = grads.min_by_key(|grad| match grad.elem_count() {
            0 => usize::MAX,
            count => count,
        });
        let Some(grad) = smallest else { return Ok(()) };
        for mark in self.marks()? {
            if !mark.device().is_cpu() || mark.to_scalar::<f64>()?.is_nan() {
                let mark = mark.to_device(grad.device())?.to_dtype(grad.dtype())?;
                *grad = grad.broadcast_add(&mark)?;
            }
        }
        Ok(())
    }

    /// The casts, the first one in time first. Waits for devices.
    pub(super) fn casts(&self) -> Result<Vec<NonFinite>> {
        non_finite(&self.0).map_err(other)
    }

    /// Where the trouble came from.
    pub(super) fn culprit(&self) -> Result<Option<String>> {
        Ok(culprit(&self.0, &self.casts()?))
    }
}

fn other(error: crate::Error) -> OptimError {
    match error {
        crate::Error::Candle(error) => OptimError::Candle(error),
        crate::Error::Optim(error) => error,
        other => OptimError::Other(Box::new(other)),
    }
}

/// Steps left out in a row, as far as the host knows. Reports of a device's steps tell it when they are read.
#[derive(Clone, Debug, Default)]
pub(super) struct Streak(Arc<AtomicU64>);

impl Streak {
    pub(super) fn end(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// One more; how many there are.
    pub(super) fn add(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Fails after `limit` steps left out in a row.
    pub(super) fn check<'a>(
        &self,
        limit: Option<u64>,
        seen: &Seen,
        vars: impl Iterator<Item = (&'a str, &'a Tensor)>,
    ) -> Result<()> {
        too_many(self.0.load(Ordering::Relaxed), limit, seen, vars)
    }
}

/// Fails if `steps` left out in a row are `limit` or more. `vars` are looked through for Inf and NaN then.
pub(super) fn too_many<'a>(
    steps: u64,
    limit: Option<u64>,
    seen: &Seen,
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
        first: seen.culprit()?,
        variable: variable.transpose()?,
    })
}

fn is_finite(x: &Tensor) -> Result<bool> {
    // 0 times Inf or NaN is NaN, which a sum keeps.
    let zero = x.detach().affine(0., 0.)?.sum_all()?;
    Ok(zero.to_dtype(DType::F32)?.to_scalar::<f32>()?.is_finite())
}

/// Checks the limit of [`too_many`].
pub(super) fn check_limit(limit: Option<u64>) -> Result<()> {
    let steps = limit.unwrap_or(1) as f64;
    check(
        "max_skipped_steps",
        steps,
        steps > 0.,
        "it must be at least 1 step",
    )
}
