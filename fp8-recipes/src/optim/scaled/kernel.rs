//! The pass over a variable, its moments and its gradient: pieces are widened to f32, updated, rounded, and written back.

use super::grad::{Grad, PIECE, Slice};
use super::slot::Rounded;
use super::value::Value;
use crate::optim::masters::HostMaster;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Var, bail};
use fp8_candle::parallel::vectorized;
use half::{bf16, f16};
use std::cell::RefCell;

/// Elements that one task updates. The update is elementwise, so the split never changes a bit.
const BLOCK: usize = 1 << 14;

/// What became of the data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome<const N: usize> {
    /// Bits of the largest magnitudes, the parameter first.
    parameter: u32,
    moments: [u32; N],
    pub(super) saturated: u64,
}

impl<const N: usize> Outcome<N> {
    const NONE: Self = Self {
        parameter: 0,
        moments: [0; N],
        saturated: 0,
    };

    fn and(mut self, other: Self) -> Self {
        self.parameter = self.parameter.max(other.parameter);
        for (max, other) in self.moments.iter_mut().zip(other.moments) {
            *max = (*max).max(other);
        }
        self.saturated += other.saturated;
        self
    }
}

/// The largest magnitudes after a pass, and how many elements saturated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed<const N: usize> {
    pub(super) parameter: f32,
    pub(super) moments: [f32; N],
    pub(super) saturated: u64,
}

/// Changes pieces of parameter and moments, given that of the gradient.
pub(super) trait Step<const N: usize>:
    Fn(&mut [f32], [&mut [f32]; N], &[f32]) + Sync
{
}
impl<const N: usize, F: Fn(&mut [f32], [&mut [f32]; N], &[f32]) + Sync> Step<N> for F {}

struct Pass<'a, F, const N: usize> {
    step: F,
    grad: Slice<'a>,
    rounded: Rounded,
    moments: RefCell<[&'a mut HostMaster; N]>,
    passed: RefCell<Option<Passed<N>>>,
}

/// Runs `step` over a variable in place.
pub(super) fn pass<const N: usize>(
    var: &Var,
    moments: [&mut HostMaster; N],
    grad: &Grad,
    rounded: Rounded,
    step: impl Step<N>,
) -> Result<Passed<N>> {
    grad.with(|grad| {
        let op = Pass {
            step,
            grad,
            rounded,
            moments: RefCell::new(moments),
            passed: RefCell::new(None),
        };
        if var.elem_count() > 0 {
            var.inplace_op1(&op)?;
        }
        Ok(op.passed.into_inner().unwrap_or(Passed {
            parameter: 0.0,
            moments: [0.0; N],
            saturated: 0,
        }))
    })?
}

impl<F: Step<N>, const N: usize> InplaceOp1 for Pass<'_, F, N> {
    fn name(&self) -> &'static str {
        "scaled-optimizer"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("{}: the variable must be contiguous", self.name())
        };
        let passed = match storage {
            CpuStorage::F16(_) => self.run::<f16>(storage, start..end),
            CpuStorage::BF16(_) => self.run::<bf16>(storage, start..end),
            _ => self.run::<f32>(storage, start..end),
        };
        match passed {
            None => bail!(
                "{}: parameter, moments and gradient do not fit",
                self.name()
            ),
            passed => *self.passed.borrow_mut() = passed,
        }
        Ok(())
    }
}

impl<F: Step<N>, const N: usize> Pass<'_, F, N> {
    fn run<T: Value>(
        &self,
        storage: &mut CpuStorage,
        range: std::ops::Range<usize>,
    ) -> Option<Passed<N>> {
        let parameter = T::of_storage(storage)?.get_mut(range)?;
        let len = parameter.len();
        let mut all = self.moments.borrow_mut();
        let mut rests = Vec::with_capacity(N);
        for moment in all.iter_mut() {
            rests.push(T::of_moment(moment)?);
        }
        if self.grad.len() != len || rests.iter().any(|moment| moment.len() != len) {
            return None;
        }
        let mut rests = rests.into_iter().map(|moment| moment.chunks_mut(BLOCK));
        let mut chunks: [_; N] = std::array::from_fn(|_| rests.next());
        let tasks = parameter.chunks_mut(BLOCK).enumerate();
        let mut tasks: Vec<_> = tasks
            .map(|(block, parameter)| {
                let moments: [&mut [T]; N] = std::array::from_fn(|i| {
                    let chunks = chunks[i].as_mut();
                    chunks.and_then(Iterator::next).unwrap_or_default()
                });
                (block * BLOCK, parameter, moments)
            })
            .collect();
        let (step, grad, rounded) = (&self.step, self.grad, self.rounded);
        let block = |(start, parameter, moments): &mut (usize, &mut [T], [&mut [T]; N])| {
            update_block(step, grad, rounded, *start, parameter, moments)
        };
        let outcome = match tasks.as_mut_slice() {
            // Without the way through the thread pool.
            [only] => block(only),
            tasks => (fp8_candle::parallel::map(tasks, block).into_iter())
                .fold(Outcome::NONE, Outcome::and),
        };
        Some(Passed {
            parameter: T::of_magnitude(outcome.parameter),
            moments: outcome.moments.map(T::of_magnitude),
            saturated: outcome.saturated,
        })
    }
}

/// The block that begins at element `start`.
fn update_block<T: Value, const N: usize>(
    step: &impl Step<N>,
    grad: Slice<'_>,
    rounded: Rounded,
    start: usize,
    parameter: &mut [T],
    moments: &mut [&mut [T]; N],
) -> Outcome<N> {
    let (mut grads, mut wide, mut wides) = ([0f32; PIECE], [0f32; PIECE], [[0f32; PIECE]; N]);
    let mut outcome = Outcome::NONE;
    let len = parameter.len();
    for from in (0..len).step_by(PIECE) {
        let to = (from + PIECE).min(len);
        let (first, count) = (start + from, to - from);
        let (grads, wide) = (&mut grads[..count], &mut wide[..count]);
        grad.widen(first, grads);
        T::widen_all(&parameter[from..to], wide);
        for (moment, wide) in moments.iter().zip(&mut wides) {
            T::widen_all(&moment[from..to], &mut wide[..count]);
        }
        let wide_moments = wides.each_mut().map(|wide| &mut wide[..count]);
        vectorized(
            #[inline(always)]
            || step(wide, wide_moments, grads),
        );
        let narrow = |tensor, wide: &[f32], out: &mut [T]| {
            T::round(rounded.key(tensor), first as u64, wide, out);
            vectorized(
                #[inline(always)]
                || {
                    let saturated = |x: &f32| u32::from(x.abs() > T::LARGEST);
                    let saturated: u32 = wide.iter().map(saturated).sum();
                    (T::largest(out), u64::from(saturated))
                },
            )
        };
        let (largest, saturated) = narrow(0, wide, &mut parameter[from..to]);
        let mut this = Outcome {
            parameter: largest,
            saturated,
            ..Outcome::NONE
        };
        for (i, (moment, wide)) in moments.iter_mut().zip(&wides).enumerate() {
            let tensor = i as u32 + 1;
            let (largest, saturated) = narrow(tensor, &wide[..count], &mut moment[from..to]);
            this.moments[i] = largest;
            this.saturated += saturated;
        }
        outcome = outcome.and(this);
    }
    outcome
}
