//! Named variables: what optimizers of this library take, in one order.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Storage, Tensor, Var};
use candle_nn::VarMap;

use super::error::Result;
use super::{AdamW, OptimError, Sgd, StepReport};

/// An optimizer that knows its variables by name and reports on its steps: [`AdamW`](super::AdamW), [`Sgd`](super::Sgd), or your
/// own. [`DynamicLossScaler`](super::DynamicLossScaler) drives any.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor, Var};
/// use fp8::optim::{AdamW, AdamWConfig, NamedOptimizer, Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// fn train(optimizer: &mut impl NamedOptimizer, loss: &Tensor) -> Result<(), Box<dyn std::error::Error>> {
///     let report = optimizer.apply_gradients(&loss.backward()?)?;
///     assert_eq!(report.updated, optimizer.named_vars().len());
///     Ok(())
/// }
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let named = vec![("w".to_string(), w.clone())];
/// train(&mut AdamW::from_named(named.clone(), AdamWConfig::default())?, &w.sum_all()?)?;
/// train(&mut Sgd::from_named(named, SgdConfig::default())?, &w.sum_all()?)?;
/// # Ok(()) }
/// ```
pub trait NamedOptimizer {
    /// The variables that it updates, sorted by name.
    fn named_vars(&self) -> Vec<(String, Var)>;

    /// One step with these gradients.
    ///
    /// # Errors
    /// A gradient that does not fit its variable, or an error of the device.
    fn apply_gradients(&mut self, grads: &GradStore) -> Result<StepReport>;
}

macro_rules! named {
    ($($optimizer:ident)+) => {$(
        impl NamedOptimizer for $optimizer {
            fn named_vars(&self) -> Vec<(String, Var)> {
                let vars = self.vars();
                vars.map(|(name, var)| (name.to_string(), var.clone())).collect()
            }

            fn apply_gradients(&mut self, grads: &GradStore) -> Result<StepReport> {
                self.apply(grads)
            }
        }
    )+};
}
named!(AdamW Sgd);

/// The trainable variables sorted by name, each once.
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

/// The gradient of each variable, detached and in memory of its own.
pub(super) fn gradients<'a>(
    vars: impl Iterator<Item = (&'a str, &'a Var)> + Clone,
    grads: &GradStore,
) -> Result<Vec<Option<Tensor>>> {
    let own: HashSet<usize> = vars.clone().map(|(_, var)| address(var)).collect();
    let found = vars.map(|(name, var)| {
        let Some(grad) = grads.get(var) else {
            return Ok(None);
        };
        check_gradient(name, var, grad)?;
        // Updates in place must not change a gradient that is still to be read.
        match own.contains(&address(grad)) {
            true => Ok(Some(grad.detach().copy()?)),
            false => Ok(Some(grad.detach())),
        }
    });
    found.collect()
}

fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16)
}

/// Tells memory from memory.
pub(super) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0) as usize
}

/// The variable's shape, device and dtype; f32 for a bf16 or f16 variable is welcome too.
fn check_gradient(name: &str, var: &Var, grad: &Tensor) -> Result<()> {
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
