//! Tensors and numbers of an AdamW step on a CUDA device, and their checks.

use crate::base::check::{check_dims, check_dtype, check_float};
use crate::base::error::{Result, dtype_error};
use candle_core::{DType, Tensor};

/// Dtypes of variables.
pub(super) const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

/// One variable with its optimizer state. All are contiguous, of one shape and on one CUDA device. The kernels write to the
/// memory of these tensors.
#[derive(Debug, Clone)]
pub struct AdamWTensors {
    /// f32, bf16, f16 or f64.
    pub var: Tensor,
    /// Running mean of the gradient: f32, or f64 for an f64 variable.
    pub exp_avg: Tensor,
    /// Running mean of the squared gradient, of the same dtype.
    pub exp_avg_sq: Tensor,
    /// f32 copy of a bf16 or f16 variable: the update changes it and rounds it to the variable. An element that no longer
    /// rounds to the variable's value is read from the variable first.
    pub master: Option<Tensor>,
    /// Whether weight decay applies to the variable.
    pub decays: bool,
}

/// The numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWHyperparameters {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the running mean of gradients.
    pub beta1: f64,
    /// Decay of the running mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// `1 - lr * weight_decay`.
    pub decay: f64,
    /// Gradients are multiplied by `min(1, max_grad_norm / (norm + 1e-6))`.
    pub max_grad_norm: Option<f64>,
}

/// What the host has decided for one step, if it knows the norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWDecision {
    /// `1 / (1 - beta1^step)`.
    pub correction1: f64,
    /// `1 / (1 - beta2^step)`.
    pub correction2: f64,
    /// The factor on the gradients.
    pub clip: f64,
}

/// Checks the tensors of a variable, but for their devices and strides.
pub(super) fn check(tensors: &AdamWTensors) -> Result<()> {
    const OP: &str = "AdamW";
    let var = &tensors.var;
    check_float(OP, "a variable", var)?;
    let moments = match var.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    check_like(OP, "exp_avg", var, moments, &tensors.exp_avg)?;
    check_like(OP, "exp_avg_sq", var, moments, &tensors.exp_avg_sq)?;
    if let Some(master) = &tensors.master {
        if !matches!(var.dtype(), DType::BF16 | DType::F16) {
            let (what, expected) = ("a variable with a master", "bf16 or f16");
            return Err(dtype_error(OP, what, expected, var.dtype()));
        }
        check_like(OP, "master", var, DType::F32, master)?;
    }
    Ok(())
}

/// Checks that `x` has the shape of `var` and `dtype`. Devices and strides are checked where addresses are taken.
pub(super) fn check_like(
    op: &'static str,
    what: &'static str,
    var: &Tensor,
    dtype: DType,
    x: &Tensor,
) -> Result<()> {
    check_dtype(op, what, x, dtype)?;
    check_dims(op, what, x, var.dims())
}
