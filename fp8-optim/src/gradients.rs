//! Gradients of variables: missing ones, and the check of those that are there.

use std::collections::HashSet;
use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::VarMap;

use super::error::{OptimError, Result};
use super::memory::address;

/// Names of the variables that have no gradient in `grads`, sorted; empty when every variable was reached.
///
/// candle-nn's fused norms, rope and softmax cut the graph without an error, and the loss still falls: call this after the first `backward`.
/// The running statistics of batch norms, variables named `running_mean` and `running_var`, never have a gradient and are left out.
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let (used, _unused) = (vb.get(3, "used")?, vb.get(3, "unused")?);
/// let grads = used.sqr()?.sum_all()?.backward()?;
/// assert_eq!(fp8_optim::check_gradients(&vars, &grads), ["unused"]);
/// # Ok(()) }
/// ```
pub fn check_gradients(vars: &VarMap, grads: &GradStore) -> Vec<String> {
    let is_statistic = |name: &str| {
        let own = name.rsplit('.').next();
        matches!(own, Some("running_mean" | "running_var"))
    };
    let mut missing = vars_of(vars);
    missing.retain(|(name, var)| {
        var.dtype().is_float() && grads.get(var).is_none() && !is_statistic(name)
    });
    let mut missing: Vec<String> = missing.into_iter().map(|(name, _)| name).collect();
    missing.sort();
    missing
}

/// The variables of a map, in no order.
pub(super) fn vars_of(vars: &VarMap) -> Vec<(String, Var)> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    let vars = vars.iter();
    vars.map(|(name, var)| (name.clone(), var.clone()))
        .collect()
}

/// The gradient `grad` of a parameter, detached and in memory of its own; `own` has the addresses of all parameters. An update in place
/// must not change a gradient that is read later.
///
/// # Errors
/// If the gradient is on another device, or has other `dims`, or its dtype does not fit.
pub(super) fn own_gradient(
    name: &str,
    parameter: &Tensor,
    grad: &Tensor,
    dims: &[usize],
    dtype_fits: bool,
    own: &HashSet<usize>,
) -> Result<Tensor> {
    let name = || name.to_string();
    if !grad.device().same_device(parameter.device()) {
        return Err(OptimError::GradientDevice {
            name: name(),
            expected: parameter.device().location(),
            got: grad.device().location(),
        });
    }
    if dims != parameter.dims() || !dtype_fits {
        return Err(OptimError::Gradient {
            name: name(),
            expected_dtype: parameter.dtype(),
            expected_shape: parameter.shape().clone(),
            got_dtype: grad.dtype(),
            got_shape: dims.into(),
        });
    }
    match own.contains(&address(grad)) {
        true => Ok(grad.detach().copy()?),
        false => Ok(grad.detach()),
    }
}
