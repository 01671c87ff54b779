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
                    "the shape of its tensor, {:?}, in {:?}",
                    self.shape, self.dtype
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

    /// The sum of the gradients that the link was told of. Any before them are those of a pass that has failed.
    pub(super) fn take(&self, told: &Tensor) -> Result<Tensor> {
        let count = told.to_vec1::<f32>()?.iter().sum::<f32>() as usize;
        let all = lock(&self.gradients).remove(&thread::current().id());
        let mut all = all.unwrap_or_default();
        let mut last = all.drain(all.len().saturating_sub(count)..);
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
