//! The variables of an optimizer, and the gradients that fit them.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;

use super::super::error::{OptimError, Result};
use super::super::memory::address;

/// The variables of floating point dtypes sorted by name, each once.
pub(super) fn sorted(mut vars: Vec<(String, Var)>, masters: bool) -> Result<Vec<(String, Var)>> {
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(pair) = vars.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(OptimError::DuplicateName {
            name: pair[0].0.clone(),
        });
    }
    let integer = vars.iter().find(|(_, var)| !is_trainable(var.dtype()));
    if let (true, Some((name, var))) = (masters, integer) {
        return Err(OptimError::MasterOfInteger {
            name: name.clone(),
            dtype: var.dtype(),
        });
    }
    let mut seen = HashSet::new();
    vars.retain(|(_, var)| is_trainable(var.dtype()) && seen.insert(var.id()));
    Ok(vars)
}

/// The variables of a [`VarMap`].
pub(super) fn of_varmap(varmap: &VarMap) -> Result<Vec<(String, Var)>> {
    let data = varmap
        .data()
        .lock()
        .map_err(|_| candle_core::Error::msg("the lock of the VarMap is poisoned"))?;
    let vars = data.iter();
    Ok(vars
        .map(|(name, var)| (name.clone(), var.clone()))
        .collect())
}

/// The variables under the names `000000`, `000001`, .. in the order given.
pub(super) fn numbered(vars: Vec<Var>) -> Vec<(String, Var)> {
    let vars = vars.into_iter().enumerate();
    vars.map(|(i, var)| (format!("{i:06}"), var)).collect()
}

/// The gradient of a variable, detached and in memory of its own; `own` is the memory of all variables.
pub(super) fn gradient(
    name: &str,
    var: &Var,
    grads: &GradStore,
    own: &HashSet<usize>,
) -> Result<Option<Tensor>> {
    let Some(grad) = grads.get(var) else {
        return Ok(None);
    };
    check(name, var, grad)?;
    // An update in place must not change a gradient that is read later.
    match own.contains(&address(grad)) {
        true => Ok(Some(grad.detach().copy()?)),
        false => Ok(Some(grad.detach())),
    }
}

fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16)
}

/// Checks that a gradient has the variable's shape, device and dtype, or f32 for a bf16 or f16 variable.
fn check(name: &str, var: &Var, grad: &Tensor) -> Result<()> {
    if !grad.device().same_device(var.device()) {
        return Err(OptimError::GradientDevice {
            name: name.to_string(),
            expected: var.device().location(),
            got: grad.device().location(),
        });
    }
    let wide = grad.dtype() == DType::F32 && matches!(var.dtype(), DType::BF16 | DType::F16);
    if grad.shape() != var.shape() || !(wide || grad.dtype() == var.dtype()) {
        return Err(OptimError::Gradient {
            name: name.to_string(),
            expected_dtype: var.dtype(),
            expected_shape: var.shape().clone(),
            got_dtype: grad.dtype(),
            got_shape: grad.shape().clone(),
        });
    }
    Ok(())
}
