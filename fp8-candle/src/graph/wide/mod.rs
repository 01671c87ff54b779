//! Many operations as one node of candle's graph.
//!
//! candle's `backward` fills zeros and adds for every edge of its graph, and keeps every gradient in its store until the next
//! node has run. A [`WideNode`] computes a whole layer on detached tensors and appears in the graph once: gradients between
//! its operations never reach candle's store, those that meet are added in place, and it decides itself what it keeps for the
//! backward pass.
//!
//! ```
//! use candle_core::{Device, Var};
//! use fp8_candle::ops::Activation;
//! use fp8_candle::{LinearWeight, WideNode};
//!
//! let device = Device::Cpu;
//! let (x, up, down) = (
//!     Var::randn(0f32, 1., (5, 8), &device)?,
//!     Var::randn(0f32, 1., (32, 8), &device)?,
//!     Var::randn(0f32, 1., (8, 32), &device)?,
//! );
//! let mut node = WideNode::new("mlp");
//! let input = node.argument(&x);
//! let hidden = node.linear(&input, LinearWeight::HighPrecision(&up, None), None, None)?;
//! let hidden = node.activation(&hidden, Activation::Gelu)?;
//! let output = node.linear(&hidden, LinearWeight::HighPrecision(&down, None), None, None)?;
//! let sum = node.add(&output, &input)?;
//! let y = node.finish(sum)?; // one node of the graph, with three arguments
//! let grads = y.sqr()?.sum_all()?.backward()?;
//! assert!([&x, &up, &down].iter().all(|var| grads.get(var).is_some()));
//! # Ok::<(), fp8_candle::Error>(())
//! ```

pub(crate) mod codes;
pub(crate) mod kept;
pub(crate) mod memos;
mod opaque;
pub(crate) mod reader;
mod recompute;
mod shape;
pub(crate) mod sweep;
pub(crate) mod value;

pub use crate::graph::{GradientListener, backward, backward_with, node};
pub(crate) use recompute::is_second_run;
pub use recompute::recompute;

use crate::base::error::Result;
use crate::graph::{Ready, attach_all};
use candle_core::{DType, Device, Tensor, TensorId};
use codes::{Codes, Place};
use kept::Kept;
use std::collections::HashMap;
use std::sync::Arc;
use sweep::{Backward, Step, Sweep};
use value::Value;

/// Operations that become one node of candle's graph; see [the module](self).
///
/// Methods take and give [`Wide`] values and compute at once. Nothing is differentiable before [`WideNode::finish`].
#[derive(Default)]
pub struct WideNode {
    pub(crate) name: &'static str,
    /// The arguments of the node that are part of a graph.
    pub(crate) leaves: Vec<Tensor>,
    pub(crate) ids: HashMap<TensorId, usize>,
    /// The value of each leaf.
    pub(crate) leaf_values: Vec<usize>,
    pub(crate) values: usize,
    pub(crate) steps: Vec<Step>,
    pub(crate) recomputes: bool,
    /// The features of a group, if values are kept in FP8.
    groups: Option<usize>,
    /// The codes of values, some of which an operation may still have to make.
    coded: Vec<Arc<Codes>>,
    bytes_in_fp8: usize,
}

/// A value within a [`WideNode`].
#[derive(Clone)]
pub struct Wide {
    pub(crate) value: Value,
    /// None if no gradient goes there.
    pub(crate) id: Option<usize>,
    pub(crate) kept: Kept,
    /// Whether it is computed again anyway: then casts of it are repeated rather than kept.
    pub(crate) recast: bool,
    /// Shared by views of one value.
    pub(crate) codes: Place,
}

impl Wide {
    /// A value whose tensor is kept.
    pub(crate) fn held(tensor: Tensor, id: Option<usize>) -> Self {
        Self::kept_as(Value::Made(tensor.clone()), id, Kept::Tensor(tensor))
    }

    /// A value that is read in the backward pass as `kept`.
    pub(crate) fn kept_as(value: Value, id: Option<usize>, kept: Kept) -> Self {
        Self {
            value,
            id,
            kept,
            recast: false,
            codes: Place::default(),
        }
    }

    /// The values, outside any graph. Results of norms and activations are computed by the first call.
    ///
    /// # Errors
    /// If that fails.
    pub fn tensor(&self) -> Result<&Tensor> {
        self.value.get()
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Sizes of the dimensions.
    pub fn dims(&self) -> &[usize] {
        self.value.dims()
    }

    /// The device that holds the values.
    pub fn device(&self) -> &Device {
        self.value.device()
    }
}

impl WideNode {
    /// A node without operations. `name` appears in candle's messages.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// The same node with or without recomputation, in the backward pass, of everything that follows from what it keeps anyway (to the
    /// bit, unless it keeps values in FP8):
    /// FP8 codes of the results of norms and activations, and from them results of linear layers. Less memory for about a tenth more products.
    pub fn with_recomputation(self, recomputes: bool) -> Self {
        Self { recomputes, ..self }
    }

    /// The same node that keeps, for its backward pass, what norms, activations, attention and linear layers read there in FP8 instead
    /// of high precision: E4M3 codes, rounded to nearest even, whose scale is the largest power of two under which the largest magnitude
    /// of each group of this many neighbouring features is at most 448. `None` keeps the values themselves; 0 counts as 1.
    ///
    /// Results do not change. Gradients are those at the rounded values, which [`WideNode::with_recomputation`] also computes from.
    /// A group that holds Inf or NaN becomes NaN, and so do gradients that depend on it. Kept as they are: arguments, which
    /// candle's graph holds in any case, what [`WideNode::apply`] reads, and values without a gradient.
    #[must_use]
    pub fn with_kept_groups(self, group_size: Option<usize>) -> Self {
        let groups = group_size.map(|size| size.max(1));
        Self { groups, ..self }
    }

    /// Bytes of the codes and scales that this node keeps because of [`WideNode::with_kept_groups`].
    pub fn bytes_in_fp8(&self) -> usize {
        self.bytes_in_fp8
    }

    /// A tensor from outside: an input or a parameter. The same tensor is one argument however often it is used.
    pub fn argument(&mut self, x: &Tensor) -> Wide {
        let tensor = x.detach();
        let id = self.leaf(x);
        match id {
            Some(_) => Wide::kept_as(Value::Made(tensor.clone()), id, Kept::Argument(tensor)),
            None => Wide::held(tensor, id),
        }
    }

    /// The value of an argument, if a gradient is wanted there.
    pub(crate) fn leaf(&mut self, x: &Tensor) -> Option<usize> {
        if !x.track_op() {
            return None;
        }
        if let Some(id) = self.ids.get(&x.id()) {
            return Some(*id);
        }
        let id = self.new_value();
        self.ids.insert(x.id(), id);
        self.leaves.push(x.clone());
        self.leaf_values.push(id);
        Some(id)
    }

    pub(crate) fn new_value(&mut self) -> usize {
        self.values += 1;
        self.values - 1
    }

    /// A result, and how its gradient goes on to `parents`, if any of them wants one.
    pub(crate) fn record(
        &mut self,
        value: Value,
        kept: Kept,
        parents: &[Option<usize>],
        backward: impl Fn(&mut Sweep, &Tensor) -> Result<()> + Send + Sync + 'static,
    ) -> Wide {
        let id = parents.iter().any(Option::is_some).then(|| {
            let id = self.new_value();
            self.steps.push(Step {
                outputs: vec![id],
                backward: Backward::One(Box::new(move |sweep, grad| backward(sweep, grad.get()?))),
            });
            id
        });
        Wide::kept_as(value, id, kept)
    }

    /// [`WideNode::record`] of a tensor that is kept.
    pub(crate) fn record_tensor(
        &mut self,
        tensor: Tensor,
        parents: &[Option<usize>],
        backward: impl Fn(&mut Sweep, &Tensor) -> Result<()> + Send + Sync + 'static,
    ) -> Wide {
        let kept = Kept::Tensor(tensor.clone());
        self.record(Value::Made(tensor), kept, parents, backward)
    }

    /// `result` as a tensor of candle's graph.
    ///
    /// # Errors
    /// If a value cannot be cast, or candle refuses the node.
    pub fn finish(self, result: Wide) -> Result<Tensor> {
        for codes in &self.coded {
            codes.get()?;
        }
        let Some(id) = result.id else {
            return Ok(result.value.get()?.clone());
        };
        let (steps, values, leaf_values) = (Arc::new(self.steps), self.values, self.leaf_values);
        let backward = move |grad: &Tensor| {
            let mut sweep = Sweep::new(values);
            sweep.add_shared(Some(id), grad)?;
            sweep.run(&steps)?;
            let made = |value: Value| value.get().cloned();
            let grads = leaf_values.iter().map(|id| sweep.take(*id));
            grads.map(|grad| grad.map(made).transpose()).collect()
        };
        let tensor = result.value.get()?.clone();
        let arguments: Vec<&Tensor> = self.leaves.iter().collect();
        attach_all(
            self.name,
            &arguments,
            Ready::of(&tensor)?,
            move |_, _, grad| backward(grad),
        )
    }
}
