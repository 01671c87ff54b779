//! Initial values of parameters. candle's own generator cannot be seeded on the CPU.

use anyhow::{Result, anyhow};
use candle_core::Tensor;
use candle_nn::VarMap;
use fp8::scaled::ScaledVarMap;
use std::collections::BTreeMap;

/// Sets parameters in the order of their names. `value` gets a name and a shape and returns the value in f32, or None to leave the
/// parameter as it is.
pub fn set_plain(
    vars: &VarMap,
    mut value: impl FnMut(&str, &[usize]) -> Result<Option<Tensor>>,
) -> Result<()> {
    let vars = vars.data().lock();
    let vars = vars.map_err(|_| anyhow!("the lock of the VarMap is poisoned"))?;
    for (name, var) in vars.iter().collect::<BTreeMap<_, _>>() {
        if let Some(value) = value(name, var.dims())? {
            var.set(&value.to_device(var.device())?.to_dtype(var.dtype())?)?;
        }
    }
    Ok(())
}

/// [`set_plain`] for scaled parameters.
pub fn set_scaled(
    vars: &ScaledVarMap,
    mut value: impl FnMut(&str, &[usize]) -> Result<Option<Tensor>>,
) -> Result<()> {
    let mut all = vars.vars();
    all.sort_by(|a, b| a.name().cmp(b.name()));
    for var in all {
        if let Some(value) = value(var.name(), var.dims())? {
            vars.set(var.name(), &value.to_device(vars.device())?)?;
        }
    }
    Ok(())
}
