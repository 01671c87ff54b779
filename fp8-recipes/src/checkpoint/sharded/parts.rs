//! The tensors of an optimizer of parameters in parts.

use super::super::meta::OptimizerMeta;
use crate::error::Result;
use crate::optim::OptimizerState;
use candle_core::Tensor;
use fp8_ranks::ShardedVarMap;
use std::collections::BTreeMap;

/// The tensors of one rank's optimizer.
pub(super) struct Parts {
    /// By parameter and name of the moment: tensors that have the elements of the rank's range.
    pub(super) ranges: BTreeMap<(String, String), Tensor>,
    /// The others, which are the same on all ranks.
    pub(super) others: Vec<(String, Tensor)>,
}

/// Separates moments from other tensors, such as the count of steps.
pub(super) fn of_optimizer(state: &OptimizerState, map: &ShardedVarMap) -> Parts {
    let (mut ranges, mut others) = (BTreeMap::new(), vec![]);
    for (name, tensor) in state.tensors() {
        let parameter = name.rsplit_once('.').and_then(|(parameter, part)| {
            let var = map.get(parameter)?;
            let fits = tensor.dims() == var.shard().dims();
            fits.then(|| (parameter.to_string(), part.to_string()))
        });
        match parameter {
            Some(names) => {
                ranges.insert(names, tensor.clone());
            }
            None => others.push((name.clone(), tensor.clone())),
        }
    }
    Parts { ranges, others }
}

/// The same state with other tensors.
pub(super) fn with_tensors(
    state: &OptimizerState,
    tensors: impl IntoIterator<Item = (String, Tensor)>,
) -> Result<OptimizerState> {
    Ok(OptimizerMeta::of(state).into_state()?.with_tensors(tensors))
}
