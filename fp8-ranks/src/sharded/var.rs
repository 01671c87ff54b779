//! A parameter in parts.

use super::known_amax::KnownAmax;
use super::layout::Layout;
use super::trace::{Did, Trace};
use crate::error::Result;
use crate::group::ProcessGroup;
use crate::sum::ReduceOp;
use candle_core::{DType, Device, Tensor, TensorId, Var};
use fp8_candle::weight_version::WeightVersion;
use fp8_candle::wide::node;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// All parameters by the ids of their placeholders, in which the constructors of layers recognize them.
static PARAMETERS: Mutex<Option<HashMap<TensorId, Weak<Inner>>>> = Mutex::new(None);

/// A parameter of which each rank holds a range, in f32. Clones are the same parameter. It is made by a
/// [`ShardedVarMap`](super::ShardedVarMap).
#[derive(Debug, Clone)]
pub struct ShardedVar(Arc<Inner>);

/// What the parameters of a map share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) group: ProcessGroup,
    pub(super) trace: Trace,
}

#[derive(Debug)]
struct Inner {
    name: String,
    /// Its number among those of its map.
    index: usize,
    layout: Layout,
    /// This rank's range, flat.
    shard: Var,
    /// NaN in the shape of the whole, without memory for it.
    placeholder: Tensor,
    /// Layers that gather it.
    claims: AtomicUsize,
    amax: KnownAmax,
    /// Keeps count of announced changes.
    _version: WeightVersion,
    shared: Arc<Shared>,
}

impl ShardedVar {
    /// The parameter of shape `dims` whose range on this rank is `shard`.
    pub(super) fn new(
        (name, index): (&str, usize),
        dims: &[usize],
        layout: Layout,
        shard: Tensor,
        shared: &Arc<Shared>,
    ) -> candle_core::Result<Self> {
        let shard = Var::from_tensor(&shard)?;
        let placeholder = Tensor::full(f32::NAN, (), shard.device())?.broadcast_as(dims)?;
        let inner = Arc::new(Inner {
            name: name.to_string(),
            index,
            layout,
            placeholder,
            claims: AtomicUsize::new(0),
            amax: KnownAmax::default(),
            _version: WeightVersion::of(&shard),
            shard,
            shared: shared.clone(),
        });
        let mut parameters = PARAMETERS.lock().unwrap_or_else(PoisonError::into_inner);
        let parameters = parameters.get_or_insert_default();
        if parameters.len() == parameters.capacity() {
            // Remove parameters that no longer exist before the table grows.
            parameters.retain(|_, parameter| parameter.strong_count() > 0);
        }
        parameters.insert(inner.placeholder.id(), Arc::downgrade(&inner));
        Ok(Self(inner))
    }

    /// The parameter whose placeholder is `tensor`, as the constructor of a layer gets it from the `VarBuilder`. None for other tensors,
    /// and after the last clone of the parameter was dropped.
    pub fn of(tensor: &Tensor) -> Option<Self> {
        let parameters = PARAMETERS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = parameters.as_ref()?.get(&tensor.id())?.upgrade();
        found.map(Self)
    }

    /// Its name in checkpoints.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Sizes of the whole parameter.
    pub fn dims(&self) -> &[usize] {
        self.0.placeholder.dims()
    }

    /// The dtype of values and gradients: f32.
    pub fn dtype(&self) -> DType {
        self.0.shard.dtype()
    }

    /// Where this rank's range is, and where values arrive.
    pub fn device(&self) -> &Device {
        self.0.shard.device()
    }

    /// Which rank holds which elements.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// The ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.0.shared.group
    }

    /// This rank's range, one-dimensional: what an optimizer changes, and the variable that gets the gradient. Perhaps without elements.
    pub fn shard(&self) -> &Var {
        &self.0.shard
    }

    /// A tensor of the shape of the whole parameter with NaN for every element, which takes no memory.
    pub fn placeholder(&self) -> &Tensor {
        &self.0.placeholder
    }

    /// Records that a layer gathers the parameter when it computes. The layer's constructor calls this once.
    pub fn claim(&self) {
        self.0.claims.fetch_add(1, Ordering::Relaxed);
    }

    /// How many layers gather it: more than one share the parameter.
    pub fn claims(&self) -> usize {
        self.0.claims.load(Ordering::Relaxed)
    }

    /// The values of all ranks, outside any graph. All ranks call it.
    ///
    /// # Errors
    /// Those of the group.
    pub fn gather(&self) -> Result<Tensor> {
        self.note(Did::Gather, 0);
        let counts = self.0.layout.counts();
        let flat = (self.group()).all_gather(&self.0.shard.as_detached_tensor(), counts)?;
        self.shaped(flat)
    }

    /// The values as part of the graph. The backward pass gives each rank the mean over the ranks of the gradients of its range. All ranks
    /// call it, and go through it in their backward passes.
    ///
    /// # Errors
    /// Those of the group.
    pub fn value(&self) -> fp8_candle::Result<Tensor> {
        let (whole, var) = (self.gather()?, self.clone());
        node("sharded-parameter", &self.0.shard, &whole, move |grad| {
            Ok(var.scatter(grad)?)
        })
    }

    /// The mean over the ranks of gradients of the whole parameter, of which this rank gets its range. Sums are in the order of ranks. All
    /// ranks call it.
    ///
    /// # Errors
    /// Those of the group; a gradient of another size or dtype.
    pub fn scatter(&self, grad: &Tensor) -> Result<Tensor> {
        self.note(Did::Scatter, 0);
        let (group, counts) = (self.group(), self.0.layout.counts());
        let flat = (grad.detach().flatten_all()).and_then(|flat| flat.to_dtype(DType::F32));
        let flat = flat.map_err(|error| self.failed(error))?;
        let own = group.reduce_scatter(&flat, counts, ReduceOp::Sum)?;
        match (group.size(), own.elem_count()) {
            (1, _) | (_, 0) => Ok(own),
            (ranks, _) => (own * (1. / ranks as f64)).map_err(|error| self.failed(error)),
        }
    }

    /// Gives a tensor of one rank's elements per rank, such as the moment of an optimizer, the shape of the parameter. All ranks call it.
    ///
    /// # Errors
    /// Those of the group; a tensor with another number of elements than this rank's range.
    pub fn gather_like(&self, part: &Tensor) -> Result<Tensor> {
        let flat = self.group().all_gather(part, self.0.layout.counts())?;
        self.shaped(flat)
    }

    /// Sets the values from those of the whole parameter, of which this rank takes its range.
    ///
    /// # Errors
    /// [`crate::Error::ParameterShape`] if `whole` has another shape.
    pub fn set(&self, whole: &Tensor) -> Result<()> {
        if whole.dims() != self.dims() {
            return Err(crate::Error::ParameterShape {
                name: self.0.name.clone(),
                expected: self.dims().to_vec(),
                got: whole.dims().to_vec(),
            });
        }
        let range = self.0.layout.range(self.group().rank());
        let own = || -> candle_core::Result<Tensor> {
            let flat = whole.detach().flatten_all()?.to_dtype(DType::F32)?;
            flat.narrow(0, range.start, range.len())?
                .to_device(self.device())
        };
        let own = own().map_err(|error| self.failed(error))?;
        self.set_shard(&own)
    }

    /// Sets this rank's range.
    ///
    /// # Errors
    /// [`crate::Error::ParameterShape`] if `own` has another shape than [`ShardedVar::shard`].
    pub fn set_shard(&self, own: &Tensor) -> Result<()> {
        let shard = &self.0.shard;
        if own.dims() != shard.dims() {
            return Err(crate::Error::ParameterShape {
                name: self.0.name.clone(),
                expected: shard.dims().to_vec(),
                got: own.dims().to_vec(),
            });
        }
        if own.elem_count() > 0 {
            // Never the tensor itself, which may belong to another variable.
            let own = own.detach().to_dtype(DType::F32).and_then(|own| own.copy());
            let set = own.and_then(|own| shard.set(&own));
            set.map_err(|error| self.failed(error))?;
        }
        fp8_candle::weight_version::announce_change(shard);
        self.0.amax.forget();
        Ok(())
    }

    /// The codes of all ranks, of which this one has `own`, flat. `scale`: bits that must be the same on all ranks.
    pub(super) fn gather_codes(&self, own: &Tensor, scale: u32) -> Result<Tensor> {
        self.note(Did::GatherCodes, u64::from(scale));
        self.group().all_gather(own, self.0.layout.counts())
    }

    pub(super) fn amax(&self) -> &KnownAmax {
        &self.0.amax
    }

    fn shaped(&self, flat: Tensor) -> Result<Tensor> {
        flat.reshape(self.dims())
            .map_err(|error| self.failed(error))
    }

    /// Adds to what the ranks compare.
    fn note(&self, did: Did, detail: u64) {
        self.0.shared.trace.note(did, self.0.index, detail);
    }

    /// An error of this rank alone, which is reported to the others.
    fn failed(&self, error: candle_core::Error) -> crate::Error {
        let reason = format!("parameter `{}`: {error}", self.0.name);
        self.group().give_up(reason)
    }
}
