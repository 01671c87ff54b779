//! Gradients between nodes of this crate, past candle's store.
//!
//! For every argument of a node candle's `backward` fills a tensor with zeros and adds the gradient to it, on threads of its own, and
//! in bf16 many times slower than in f32. So on the CPU a result stands in the graph behind a *link*, a tensor with a single number
//! that the node itself gives. A later node takes the link as its argument in place of the result: its backward pass puts the
//! gradient into the inbox of the link and returns 1. candle adds these numbers and visits the node of the link with their sum,
//! which says how many gradients there are. An operation of candle that reads the result finds it in the graph as usual: its
//! own node puts what candle has added into the inbox.

use crate::base::error::{Result, shape_error};
use crate::base::sync::lock;
use crate::device::{add, add_into};
use candle_core::{DType, Device, Shape, Tensor, TensorId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::thread::{self, ThreadId};

/// Where gradients of a result wait for its node, by the thread of the backward pass.
pub(super) struct Inbox {
    shape: Shape,
    dtype: DType,
    gradients: Mutex<HashMap<ThreadId, Vec<Tensor>>>,
}

impl Inbox {
    pub(super) fn new(shape: Shape, dtype: DType) -> Self {
        Self {
            shape,
            dtype,
            gradients: Mutex::default(),
        }
    }

    /// Leaves a gradient here; returns what to tell the link.
    pub(super) fn put(&self, gradient: Option<Tensor>) -> Result<Tensor> {
        let count = if gradient.is_some() { 1f32 } else { 0. };
        if let Some(gradient) = gradient {
            if (gradient.shape(), gradient.dtype()) != (&self.shape, self.dtype) {
                let expected = format!(
                    "the shape of its tensor, {:?}, in {:?} (this gradient is in {:?})",
                    self.shape,
                    self.dtype,
                    gradient.dtype()
                );
                return Err(shape_error(
                    "backward",
                    "a gradient",
                    expected,
                    gradient.dims(),
                ));
            }
            let mut gradients = lock(&self.gradients);
            let here = thread::current().id();
            gradients.entry(here).or_default().push(gradient);
        }
        Ok(Tensor::full(count, 1, &Device::Cpu)?)
    }

    /// The sum of the gradients that the link was told of, which are the last ones. Those before them are of a pass around this one, as
    /// recomputation begins passes of its own, or of one that has failed.
    pub(super) fn take(&self, told: &Tensor) -> Result<Tensor> {
        let count = told.to_vec1::<f32>()?.iter().sum::<f32>() as usize;
        let here = thread::current().id();
        let last = {
            let mut gradients = lock(&self.gradients);
            let mut all = gradients.remove(&here).unwrap_or_default();
            let last = all.split_off(all.len().saturating_sub(count));
            if !all.is_empty() {
                gradients.insert(here, all);
            }
            last
        };
        let mut last = last.into_iter();
        let Some(first) = last.next() else {
            return Ok(Tensor::zeros(&self.shape, self.dtype, &Device::Cpu)?);
        };
        // The first one may have other owners.
        match last.next() {
            None => Ok(first),
            Some(second) => last.try_fold(add(&first, &second)?, |sum, next| add_into(sum, &next)),
        }
    }
}

/// The link of a result.
#[derive(Clone)]
pub(super) struct Link {
    /// In the graph.
    pub(super) tensor: Tensor,
    pub(super) inbox: Arc<Inbox>,
}

static LINKS: LazyLock<Mutex<HashMap<TensorId, Link>>> = LazyLock::new(Mutex::default);

/// The link of `x`, if it is the result of a node of this crate.
pub(super) fn link_of(x: &Tensor) -> Option<Link> {
    lock(&LINKS).get(&x.id()).cloned()
}

/// Ends the link of a result when the result is dropped.
#[derive(Default)]
pub(super) struct Linked(Mutex<Option<TensorId>>);

impl Linked {
    pub(super) fn begin(&self, result: &Tensor, link: Link) {
        *lock(&self.0) = Some(result.id());
        lock(&LINKS).insert(result.id(), link);
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        let id = lock(&self.0).take();
        // Not dropped under the lock: nodes before this one may end their own links.
        let link = id.and_then(|id| lock(&LINKS).remove(&id));
        drop(link);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Ready, attach};
    use candle_core::Var;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// `x` times `factor`; its backward pass fails while `fails` is set.
    fn times(x: &Tensor, factor: f64, fails: &Arc<AtomicBool>) -> Result<Tensor> {
        let (result, fails) = (Ready::of(&(x.detach() * factor)?)?, fails.clone());
        attach("times", [x], result, move |_, _, grad| {
            if fails.load(Ordering::Relaxed) {
                return Err(shape_error("times", "x", "no failure", []));
            }
            Ok([Some((grad * factor)?)])
        })
    }

    fn gradient(loss: &Tensor, x: &Var) -> Result<Vec<f32>> {
        let ours = crate::graph::backward(loss)?.get(x).cloned().unwrap();
        let candles = loss.backward()?.get(x).cloned().unwrap();
        let values = ours.to_vec1::<f32>()?;
        assert_eq!(values, candles.to_vec1::<f32>()?);
        Ok(values)
    }

    #[test]
    fn nodes_and_operations_of_candle_may_read_one_result() -> Result<()> {
        let never = Arc::new(AtomicBool::new(false));
        let x = Var::new(&[1f32, -2.], &Device::Cpu)?;
        let y = times(&x, 3., &never)?;
        assert!(link_of(&y).is_some() && link_of(&x).is_none());
        // Twice by nodes, twice by candle, once through a view, and one node that nothing uses.
        let (a, b) = (times(&y, 5., &never)?, times(&y, 7., &never)?);
        let _unused = times(&y, 11., &never)?;
        let view = y.reshape((2, 1))?.squeeze(1)?;
        let sum = ((((a + b)? + y.sqr()?)? + &y)? + view)?;
        // d/dy = 5 + 7 + 2 y + 1 + 1, d/dx = 3 of that.
        assert_eq!(gradient(&sum.sum_all()?, &x)?, [60., 6.]);
        Ok(())
    }

    #[test]
    fn a_pass_that_fails_leaves_no_gradient_to_the_next() -> Result<()> {
        let (never, fails) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicBool::new(true)),
        );
        let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
        let y = times(&x, 3., &never)?;
        for first in [true, false] {
            // The node that fails is visited before or after another that reads y.
            let (one, other) = match first {
                true => (times(&y, 5., &fails)?, times(&y, 7., &never)?),
                false => (times(&y, 5., &never)?, times(&y, 7., &fails)?),
            };
            let loss = (one + other)?.sum_all()?;
            for _ in 0..3 {
                fails.store(true, Ordering::Relaxed);
                let error = loss.backward().unwrap_err().to_string();
                assert!(error.contains("no failure"), "{error}");
                fails.store(false, Ordering::Relaxed);
                assert_eq!(gradient(&loss, &x)?, [36., 36.]);
            }
        }
        Ok(())
    }

    #[test]
    fn a_gradient_of_another_shape_or_dtype_is_an_error() -> Result<()> {
        let never = Arc::new(AtomicBool::new(false));
        let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
        let y = times(&x, 3., &never)?;
        for wrong in [
            Tensor::ones(3, DType::F32, &Device::Cpu)?,
            Tensor::ones(2, DType::F64, &Device::Cpu)?,
        ] {
            let result = Ready::of(&y.detach())?;
            let z = attach("wrong", [&y], result, move |_, _, _| {
                Ok([Some(wrong.clone())])
            })?;
            let error = crate::graph::backward(&z.sum_all()?).unwrap_err();
            assert!(error.to_string().contains("gradient"), "{error}");
        }
        Ok(())
    }

    #[test]
    fn links_end_with_their_results() -> Result<()> {
        let never = Arc::new(AtomicBool::new(false));
        let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
        let ids = {
            let y = times(&x, 3., &never)?;
            let z = times(&y, 5., &never)?;
            let ids = [y.id(), z.id()];
            drop(y);
            // The graph of z still holds y.
            assert!(ids.iter().all(|id| lock(&LINKS).contains_key(id)));
            ids
        };
        assert!(ids.iter().all(|id| !lock(&LINKS).contains_key(id)));
        Ok(())
    }
}
