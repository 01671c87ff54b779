//! Parameters in parts by name, and the `VarBuilder` that makes them.

use super::layout::Layout;
use super::trace::Trace;
use super::var::{ShardedVar, Shared};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use rapidhash::v3::rapidhash_v3;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Named parameters of which each rank of a group holds a range, in f32: fully sharded training (FSDP). Clones share them.
///
/// Build a model on [`ShardedVarMap::var_builder`] on all ranks, in the same order. Its layers get placeholders and recognize
/// parameters in parts: a linear layer gathers its weight in the forward pass, drops it, and gathers it again in the backward pass. **A
/// layer that does not know them would compute NaN**; [`ShardedVarMap::check`], which optimizers call, names its parameters first.
///
/// The program must use the same layers in the same order on all ranks, whatever their data are. Gradients are means over the ranks.
///
/// ```
/// use candle_core::Device;
/// use fp8_ranks::{ShardedVar, ShardedVarMap, threads};
/// let values = threads::run(2, |group| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
///     let map = ShardedVarMap::new(&group, &Device::Cpu);
///     let init = candle_nn::Init::Randn { mean: 0., stdev: 1. };
///     let placeholder = map.var_builder().pp("fc").get_with_hints((64, 512), "weight", init)?;
///     let weight = ShardedVar::of(&placeholder).unwrap();
///     assert_eq!(weight.shard().dims(), [32 * 512]); // half of it on each rank
///     Ok(weight.gather()?.to_vec2::<f32>()?)
/// });
/// let values: Result<Vec<_>, _> = values.into_iter().collect();
/// let values = values.map_err(|error| error.to_string())?;
/// assert_eq!(values[0], values[1]);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone)]
pub struct ShardedVarMap {
    inner: Arc<Mutex<Parameters>>,
    shared: Arc<Shared>,
    device: Device,
}

#[derive(Debug)]
struct Parameters {
    vars: BTreeMap<String, ShardedVar>,
    /// Elements of each rank.
    held: Vec<usize>,
}

impl ShardedVarMap {
    /// An empty map.
    pub fn new(group: &ProcessGroup, device: &Device) -> Self {
        let parameters = Parameters {
            vars: BTreeMap::new(),
            held: vec![0; group.size()],
        };
        let shared = Shared {
            group: group.clone(),
            trace: Trace::default(),
        };
        Self {
            inner: Arc::new(Mutex::new(parameters)),
            shared: Arc::new(shared),
            device: device.clone(),
        }
    }

    /// A `VarBuilder` that makes parameters in this map. The first `get` of a name lets rank 0 initialize the parameter by the hint and
    /// gives each rank its range, so all ranks ask for the same names in the same order. Every `get` of a name returns the same
    /// placeholder.
    pub fn var_builder(&self) -> VarBuilder<'static> {
        let backend: Box<dyn SimpleBackend> = Box::new(self.clone());
        VarBuilder::from_backend(backend, DType::F32, self.device.clone())
    }

    /// The ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.shared.group
    }

    /// Where the parameters are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<ShardedVar> {
        self.lock().vars.get(name).cloned()
    }

    /// All parameters, in the order of their names.
    pub fn vars(&self) -> Vec<ShardedVar> {
        self.lock().vars.values().cloned().collect()
    }

    /// The number of parameters.
    pub fn len(&self) -> usize {
        self.lock().vars.len()
    }

    /// Whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.lock().vars.is_empty()
    }

    /// This rank's ranges under the names of their parameters, in the order of names. Parameters of which it holds nothing are left out.
    pub fn shards(&self) -> Vec<(String, Var)> {
        let vars = self.vars().into_iter();
        let held = vars.filter(|var| var.shard().elem_count() > 0);
        held.map(|var| (var.name().to_string(), var.shard().clone()))
            .collect()
    }

    /// Sets the values of a parameter from those of the whole one, of which each rank takes its range: all ranks give the same.
    ///
    /// # Errors
    /// [`Error::NoParameter`], [`Error::ParameterShape`].
    pub fn set(&self, name: &str, whole: &Tensor) -> Result<()> {
        let var = self.get(name).ok_or_else(|| Error::NoParameter {
            name: name.to_string(),
        })?;
        var.set(whole)
    }

    /// Forgets what [`precompute_float8_dynamic_scale_for_fsdp`](crate::precompute_float8_dynamic_scale_for_fsdp) has reduced: the values
    /// have changed, on all ranks. Optimizers call it.
    pub fn forget_amaxes(&self) {
        for var in self.vars() {
            var.amax().forget();
        }
    }

    /// A number that all ranks share as long as they have gathered and scattered the same parameters in the same order; optimizers
    /// compare it.
    pub fn trace(&self) -> u64 {
        self.shared.trace.get()
    }

    /// Checks, before training, that a layer gathers each parameter and that all ranks have the same ones. All ranks call it.
    ///
    /// # Errors
    /// [`Error::Unclaimed`]; [`Error::OtherParameters`] on all ranks; those of the group.
    pub fn check(&self) -> Result<()> {
        let vars = self.vars();
        let text: String = (vars.iter())
            .map(|var| {
                format!(
                    "{}: {:?}, layers: {}\n",
                    var.name(),
                    var.dims(),
                    var.claims()
                )
            })
            .collect();
        let hash = rapidhash_v3(text.as_bytes());
        let group = self.group();
        let failed = |error: candle_core::Error| group.give_up(error);
        let own = Tensor::new(&[(hash >> 32) as u32, hash as u32], &Device::Cpu);
        let own = own.map_err(failed)?;
        let all = group.all_gather(&own, &vec![2; group.size()])?;
        let all = all.to_vec1::<u32>().map_err(failed)?;
        // All ranks see the same difference.
        if let Some(rank) = all.chunks(2).position(|one| one != &all[..2]) {
            let text_of = |rank| -> Result<String> {
                let text = group.broadcast_bytes(Some(text.as_bytes()), rank)?;
                Ok(String::from_utf8_lossy(&text).into_owned())
            };
            let (first, other) = (text_of(0)?, text_of(rank)?);
            let only = |a: &str, b: &str| {
                let found = a
                    .lines()
                    .find(|line| !b.lines().any(|other| other == *line));
                found.map(str::to_string)
            };
            return Err(Error::OtherParameters {
                rank,
                there: only(&other, &first),
                first: only(&first, &other),
            });
        }
        let unclaimed = vars.iter().filter(|var| var.claims() == 0);
        let names: Vec<String> = unclaimed.map(|var| var.name().to_string()).collect();
        match names.is_empty() {
            true => Ok(()),
            false => Err(Error::Unclaimed { names }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Parameters> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rank 0's initial values of this rank's range.
    fn initial(&self, shape: &Shape, layout: &Layout, init: Init) -> candle_core::Result<Tensor> {
        let group = self.group();
        let (rank, counts) = (group.rank(), layout.counts());
        let values = match rank {
            0 => (init.var(shape, DType::F32, &self.device))
                .and_then(|values| values.detach().flatten_all()),
            _ => Tensor::zeros(0, DType::F32, &self.device),
        };
        // The others wait for these values.
        let values = values.map_err(|error| group.give_up(error))?;
        let nothing = vec![0; counts.len()];
        let send = match rank {
            0 => counts,
            _ => &nothing,
        };
        let mut receive = nothing.clone();
        receive[0] = counts[rank];
        Ok(group.all_to_all(&values, send, &receive)?)
    }
}

impl SimpleBackend for ShardedVarMap {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        if dtype != DType::F32 || !device.same_device(&self.device) {
            let name = name.to_string();
            return Err(Error::ParameterKind { name, dtype }.into());
        }
        let mut parameters = self.lock();
        if let Some(var) = parameters.vars.get(name) {
            return match var.dims() == shape.dims() {
                true => Ok(var.placeholder().clone()),
                false => Err(Error::ParameterShape {
                    name: name.to_string(),
                    expected: var.dims().to_vec(),
                    got: shape.dims().to_vec(),
                }
                .into()),
            };
        }
        let mut held = parameters.held.clone();
        let layout = Layout::new(shape.elem_count(), &mut held);
        let own = self.initial(&shape, &layout, init)?;
        let index = parameters.vars.len();
        let var = ShardedVar::new((name, index), shape.dims(), layout, own, &self.shared)?;
        let placeholder = var.placeholder().clone();
        parameters.vars.insert(name.to_string(), var);
        parameters.held = held;
        Ok(placeholder)
    }

    /// Works only for existing parameters.
    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let Some(var) = ShardedVarMap::get(self, name) else {
            let name = name.to_string();
            return Err(Error::NoParameter { name }.into());
        };
        let device = self.device.clone();
        SimpleBackend::get(
            self,
            var.dims().into(),
            name,
            Init::Const(0.),
            dtype,
            &device,
        )
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().vars.contains_key(name)
    }
}
