//! One backward pass: gradients are sent while it runs, as far as a plan says when they are complete.

use super::plan::{Learned, Plan, Width};
use super::travel::{GradientTravel, Sum};
use super::variables::Variables;
use crate::error::{OptimError, Result};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use fp8_candle::wide::GradientListener;
use fp8_ranks::ProcessGroup;
use std::cell::RefCell;
use std::sync::Arc;

/// A pass of one rank. Buckets leave in the order of the plan, so that all ranks make the same calls, whichever gradients are complete
/// first or missing here.
pub(super) struct Pass {
    group: ProcessGroup,
    variables: Arc<Variables>,
    plan: Option<Arc<Plan>>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// By variable: how many gradients there were, and their sum.
    seen: Vec<(u32, Option<Tensor>)>,
    /// Variables by the time of their last gradient.
    order: Vec<usize>,
    sent: Vec<Sum>,
    /// By variable in a bucket that has left: the gradient that it had.
    left: Vec<Option<TensorId>>,
    /// What has ended the backward pass.
    failed: Option<OptimError>,
}

impl State {
    /// Keeps `error` for [`Pass::failed`], and returns one of the backward pass with its message.
    fn fail(&mut self, error: OptimError) -> fp8_candle::Error {
        let message = error.to_string();
        self.failed = Some(error);
        fp8_candle::Error::Group(message.into())
    }
}

impl Pass {
    /// Without a plan, nothing leaves before the end.
    pub(super) fn new(
        group: &ProcessGroup,
        variables: &Arc<Variables>,
        plan: Option<Arc<Plan>>,
    ) -> Self {
        let state = State {
            seen: vec![(0, None); variables.len()],
            left: vec![None; variables.len()],
            ..State::default()
        };
        Self {
            group: group.clone(),
            variables: variables.clone(),
            plan,
            state: RefCell::new(state),
        }
    }

    /// What the pass has shown; `grads` is its result.
    pub(super) fn learned(&self, grads: &GradStore) -> Learned {
        let state = self.state.borrow();
        // Where candle's own operations use a variable too, its gradient is another tensor at the end.
        let complete = |index: usize| match &state.seen[index] {
            (0, _) | (_, None) => false,
            (_, Some(sum)) => {
                let end = grads.get(self.variables.var(index));
                end.is_some_and(|end| end.id() == sum.id())
            }
        };
        let (mut order, mut late): (Vec<usize>, Vec<usize>) =
            state.order.iter().partition(|&&index| complete(index));
        late.extend((0..self.variables.len()).filter(|index| !state.order.contains(index)));
        late.sort_unstable();
        let mut times = vec![0; self.variables.len()];
        for &index in &order {
            times[index] = state.seen[index].0;
        }
        order.extend(late);
        Learned { order, times }
    }

    /// The error of this listener that has ended the backward pass.
    pub(super) fn failed(&self) -> Option<OptimError> {
        self.state.borrow_mut().failed.take()
    }

    /// Starts the sums of the buckets that have not left, and gives all of them in order.
    ///
    /// # Errors
    /// [`OptimError::LateGradient`] if a gradient has changed after it has left, and errors of the group.
    pub(super) fn send_rest(
        &self,
        plan: &Plan,
        grads: &GradStore,
        travel: GradientTravel,
        width: Width,
    ) -> Result<Vec<Sum>> {
        let mut state = self.state.borrow_mut();
        for (index, left) in state.left.iter().enumerate() {
            let end = grads.get(self.variables.var(index)).map(Tensor::id);
            if left.is_some() && *left != end {
                return Err(self.late(index));
            }
        }
        let mut sent = std::mem::take(&mut state.sent);
        for bucket in sent.len()..plan.buckets.len() {
            let gradient = |index| grads.get(self.variables.var(index)).cloned();
            let flat = plan.flat(bucket, &self.variables, width, gradient)?;
            sent.push(Sum::start(&flat, travel, &self.group)?);
        }
        Ok(sent)
    }

    fn late(&self, index: usize) -> OptimError {
        OptimError::LateGradient {
            name: self.variables.name(index).into(),
        }
    }

    /// Starts the sums of the next buckets, as far as they are complete.
    fn send_complete(&self, plan: &Plan, state: &mut State) -> Result<()> {
        while let Some(bucket) = plan.buckets.get(state.sent.len()) {
            if !(bucket.iter()).all(|&index| plan.is_complete(index, state.seen[index].0)) {
                return Ok(());
            }
            let gradient = |index: usize| state.seen[index].1.clone();
            let sent = state.sent.len();
            let flat = plan.flat(sent, &self.variables, Width::Variable, gradient)?;
            for &index in bucket {
                state.left[index] = state.seen[index].1.as_ref().map(Tensor::id);
            }
            let sum = Sum::start(&flat, GradientTravel::Unchanged, &self.group)?;
            state.sent.push(sum);
        }
        Ok(())
    }
}

impl GradientListener for Pass {
    fn collected(&self, variable: &Tensor, sum: &Tensor) -> fp8_candle::Result<()> {
        let Some(index) = self.variables.index_of(variable.id()) else {
            return Ok(());
        };
        let mut state = self.state.borrow_mut();
        let (seen, last) = &mut state.seen[index];
        *seen += 1;
        *last = Some(sum.clone());
        match &self.plan {
            None => {
                state.order.retain(|&other| other != index);
                state.order.push(index);
                Ok(())
            }
            Some(plan) if plan.bucket_of[index] < state.sent.len() => {
                Err(state.fail(self.late(index)))
            }
            Some(plan) => {
                let done = self.send_complete(plan, &mut state);
                done.map_err(|error| state.fail(error))
            }
        }
    }
}
