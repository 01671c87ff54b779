//! Variables that a backward pass did not reach.

use candle_core::backprop::GradStore;
use candle_nn::VarMap;
use std::sync::PoisonError;

/// Names of the variables that have no gradient in `grads`, sorted; empty when every variable was reached.
///
/// candle-nn's fused norms, rope and softmax cut the graph without an error, and the loss still falls: call this after the first `backward`.
/// The running statistics of batch norms, variables named `running_mean` and `running_var`, never have a gradient and are left out.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let (used, _unused) = (vb.get(3, "used")?, vb.get(3, "unused")?);
/// let grads = used.sqr()?.sum_all()?.backward()?;
/// assert_eq!(fp8::optim::check_gradients(&vars, &grads), ["unused"]);
/// # Ok(()) }
/// ```
pub fn check_gradients(vars: &VarMap, grads: &GradStore) -> Vec<String> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    let mut missing: Vec<String> = vars
        .iter()
        .filter(|(_, var)| var.dtype().is_float() && grads.get(var.as_tensor()).is_none())
        .filter(|(name, _)| {
            let own = name.rsplit('.').next();
            !matches!(own, Some("running_mean" | "running_var"))
        })
        .map(|(name, _)| name.clone())
        .collect();
    missing.sort();
    missing
}
