//! Tensors and numbers of an AdamW step on a CUDA device, and their checks.

use crate::base::check::{check_dims, check_dtype, check_float};
use crate::base::error::{Result, dtype_error};
use candle_core::{DType, Tensor};
use fp8_core::{EXPANDED_BLOCK, StochasticKey};

/// Dtypes of variables.
pub(super) const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

/// One variable with its optimizer state. All are contiguous and on one CUDA device. The kernels write to the memory of these tensors.
#[derive(Debug, Clone)]
pub struct AdamWTensors {
    /// f32, bf16, f16 or f64.
    pub var: Tensor,
    /// Running means of the gradient and of the squared gradient.
    pub moments: AdamWMoments,
    /// f32 copy of a bf16 or f16 variable: the update changes it and rounds it to the variable. An element that no longer
    /// rounds to the variable's value is read from the variable first.
    pub master: Option<Tensor>,
    /// Whether weight decay applies to the variable.
    pub decays: bool,
}

/// The moments of a variable.
#[derive(Debug, Clone)]
pub enum AdamWMoments {
    /// Values, in f32, or in f64 for an f64 variable, in the shape of the variable.
    Values {
        /// Running mean of the gradient.
        exp_avg: Tensor,
        /// Running mean of the squared gradient.
        exp_avg_sq: Tensor,
    },
    /// E4M3 codes in blocks of 128 elements of the flattened variable, which is not f64, as [`fp8_core::encode_expanded`] makes them. No
    /// positive element of `exp_avg_sq` has code 0.
    Coded {
        /// Running mean of the gradient.
        exp_avg: CodedMoment,
        /// Running mean of the squared gradient.
        exp_avg_sq: CodedMoment,
        /// Whether blocks choose `k` among 1, 2, 4 and 1/2 by their spread; else it is 1.
        expands: bool,
        /// The random words of codes, but for the number of the step, which takes the place of the key's; None rounds to nearest.
        key: Option<StochasticKey>,
    },
}

/// A moment in FP8.
#[derive(Debug, Clone)]
pub struct CodedMoment {
    /// U8, in the shape of the variable.
    pub codes: Tensor,
    /// f32, one for each block.
    pub amaxes: Tensor,
    /// U8, one for each block: 0, 1, 2, 3 for the exponents 1, 2, 4, 1/2.
    pub curves: Tensor,
    /// By how many bits the random words of the variable are rotated left for this moment.
    pub rotated: u32,
}

impl CodedMoment {
    fn tensors(&self) -> [&Tensor; 3] {
        [&self.codes, &self.amaxes, &self.curves]
    }

    fn check(&self, var: &Tensor) -> Result<()> {
        let blocks = [var.elem_count().div_ceil(EXPANDED_BLOCK)];
        check_like(OP, "codes of a moment", var, DType::U8, &self.codes)?;
        check_dtype(OP, "amaxes of a moment", &self.amaxes, DType::F32)?;
        check_dims(OP, "amaxes of a moment", &self.amaxes, &blocks)?;
        check_dtype(OP, "curves of a moment", &self.curves, DType::U8)?;
        check_dims(OP, "curves of a moment", &self.curves, &blocks)
    }
}

impl AdamWMoments {
    /// The tensors, in the order in which [`AdamWMoments::words`] takes their addresses.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Values {
                exp_avg,
                exp_avg_sq,
            } => vec![exp_avg, exp_avg_sq],
            Self::Coded {
                exp_avg,
                exp_avg_sq,
                ..
            } => [exp_avg.tensors(), exp_avg_sq.tensors()].concat(),
        }
    }

    pub(super) fn is_coded(&self) -> bool {
        matches!(self, Self::Coded { .. })
    }

    /// Two structs `Moment` of the kernels, from the addresses of the tensors.
    pub(super) fn words(&self, mut next: impl FnMut() -> u64) -> [u64; 8] {
        match self {
            Self::Values { .. } => [next(), 0, 0, 0, next(), 0, 0, 0],
            Self::Coded {
                exp_avg,
                exp_avg_sq,
                ..
            } => {
                let [first, second] = [exp_avg, exp_avg_sq].map(|moment| u64::from(moment.rotated));
                let mut three = || [next(), next(), next()];
                let ([a, b, c], [d, e, f]) = (three(), three());
                [a, b, c, first, d, e, f, second]
            }
        }
    }

    /// The flags of the kernels that moments decide, and the key.
    pub(super) fn flags(&self) -> (u64, StochasticKey) {
        match *self {
            Self::Values { .. } => (0, StochasticKey::default()),
            Self::Coded { expands, key, .. } => {
                let flags = u64::from(expands) * EXPANDS + u64::from(key.is_some()) * STOCHASTIC;
                (flags, key.unwrap_or_default())
            }
        }
    }
}

/// Flags of the struct `Params` of the kernels.
pub(super) const DECAYS: u64 = 1;
const EXPANDS: u64 = 2;
const STOCHASTIC: u64 = 4;

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
    /// The number of the step, counted from 1, for random bits.
    pub step: u64,
}

const OP: &str = "AdamW";

/// Checks the tensors of a variable, but for their devices and strides.
pub(super) fn check(tensors: &AdamWTensors) -> Result<()> {
    let var = &tensors.var;
    check_float(OP, "a variable", var)?;
    match &tensors.moments {
        AdamWMoments::Values {
            exp_avg,
            exp_avg_sq,
        } => {
            let dtype = match var.dtype() {
                DType::F64 => DType::F64,
                _ => DType::F32,
            };
            check_like(OP, "exp_avg", var, dtype, exp_avg)?;
            check_like(OP, "exp_avg_sq", var, dtype, exp_avg_sq)?;
        }
        AdamWMoments::Coded { .. } if var.dtype() == DType::F64 => {
            let (what, expected) = ("a variable with moments in FP8", "f32, bf16 or f16");
            return Err(dtype_error(OP, what, expected, var.dtype()));
        }
        AdamWMoments::Coded {
            exp_avg,
            exp_avg_sq,
            ..
        } => {
            exp_avg.check(var)?;
            exp_avg_sq.check(var)?;
        }
    }
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
