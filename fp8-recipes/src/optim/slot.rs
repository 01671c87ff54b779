//! One variable with its moments, and the choice of how it is updated.

use candle_core::{DType, Device, Result, Shape, Storage, Tensor, Var};

use super::fused::{Coefficients, FusedUpdate};

/// The running means of the gradient and of its square.
pub(super) enum Moments {
    /// Host memory, updated in place: contiguous f32 variables on the CPU.
    Host {
        exp_avg: Vec<f32>,
        exp_avg_sq: Vec<f32>,
    },
    /// Tensors on the variable's device, replaced at each step: every other variable.
    Tensors { exp_avg: Tensor, exp_avg_sq: Tensor },
}

pub(super) struct Slot {
    pub name: String,
    pub var: Var,
    pub decays: bool,
    pub moments: Moments,
}

impl Slot {
    pub(super) fn new(name: String, var: Var, decays: bool) -> Result<Self> {
        let zeros = || Tensor::zeros(var.shape(), moment_dtype(&var), var.device());
        // The one place where the way of updating is chosen.
        let moments = if matches!(var.device(), Device::Cpu)
            && var.dtype() == DType::F32
            && var.is_contiguous()
        {
            let len = var.elem_count();
            Moments::Host {
                exp_avg: vec![0.0; len],
                exp_avg_sq: vec![0.0; len],
            }
        } else {
            Moments::Tensors {
                exp_avg: zeros()?,
                exp_avg_sq: zeros()?,
            }
        };
        Ok(Self {
            name,
            var,
            decays,
            moments,
        })
    }

    /// One update of the variable and its moments. `grad` has the variable's shape and dtype.
    pub(super) fn update(&mut self, grad: &Tensor, coefficients: &Coefficients) -> Result<()> {
        match &mut self.moments {
            Moments::Host {
                exp_avg,
                exp_avg_sq,
            } => {
                let grad = if shares_storage(&self.var, grad) {
                    grad.copy()?
                } else {
                    grad.clone()
                };
                let op = FusedUpdate::new(coefficients, exp_avg, exp_avg_sq);
                self.var.inplace_op2(&grad.contiguous()?, &op)
            }
            Moments::Tensors {
                exp_avg,
                exp_avg_sq,
            } => {
                let (next_m, next_v) =
                    composed(&self.var, grad, exp_avg, exp_avg_sq, coefficients)?;
                *exp_avg = next_m;
                *exp_avg_sq = next_v;
                Ok(())
            }
        }
    }

    /// Snapshots of both moments as tensors: `exp_avg`, `exp_avg_sq`.
    pub(super) fn snapshot(&self) -> Result<(Tensor, Tensor)> {
        match &self.moments {
            Moments::Host {
                exp_avg,
                exp_avg_sq,
            } => {
                let tensor =
                    |values: &[f32]| Tensor::from_slice(values, self.var.shape(), &Device::Cpu);
                Ok((tensor(exp_avg)?, tensor(exp_avg_sq)?))
            }
            Moments::Tensors {
                exp_avg,
                exp_avg_sq,
            } => Ok((exp_avg.clone(), exp_avg_sq.clone())),
        }
    }

    /// The moments made of two tensors whose shape and dtype were checked before.
    pub(super) fn moments_from(&self, exp_avg: &Tensor, exp_avg_sq: &Tensor) -> Result<Moments> {
        match self.moments {
            Moments::Host { .. } => {
                let values = |tensor: &Tensor| {
                    tensor
                        .to_device(&Device::Cpu)?
                        .flatten_all()?
                        .to_vec1::<f32>()
                };
                Ok(Moments::Host {
                    exp_avg: values(exp_avg)?,
                    exp_avg_sq: values(exp_avg_sq)?,
                })
            }
            Moments::Tensors { .. } => {
                let device = self.var.device();
                // A copy: the loaded tensor may be a variable that someone writes to later.
                let tensor =
                    |tensor: &Tensor| tensor.detach().to_device(device)?.contiguous()?.copy();
                Ok(Moments::Tensors {
                    exp_avg: tensor(exp_avg)?,
                    exp_avg_sq: tensor(exp_avg_sq)?,
                })
            }
        }
    }

    pub(super) fn shape(&self) -> &Shape {
        self.var.shape()
    }

    pub(super) fn moment_dtype(&self) -> DType {
        moment_dtype(&self.var)
    }
}

/// f64 for an f64 variable, f32 for every other: in bf16 the second moment would never move, since
/// `1 - beta2` is below half a unit in the last place.
fn moment_dtype(var: &Var) -> DType {
    if var.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// The update made of candle's own ops, for any dtype and device; computes in the dtype of the
/// moments and rounds to the variable's dtype once, at the end.
fn composed(
    var: &Var,
    grad: &Tensor,
    exp_avg: &Tensor,
    exp_avg_sq: &Tensor,
    c: &Coefficients,
) -> Result<(Tensor, Tensor)> {
    let dtype = moment_dtype(var);
    let theta = var.as_detached_tensor().to_dtype(dtype)?;
    let grad = grad.detach().to_dtype(dtype)?;
    let grad = if c.clip == 1.0 {
        grad
    } else {
        (grad * c.clip)?
    };
    let next_m = ((exp_avg * c.beta1)? + (&grad * (1.0 - c.beta1))?)?;
    let next_v = ((exp_avg_sq * c.beta2)? + (grad.sqr()? * (1.0 - c.beta2))?)?;
    let adjusted = ((&next_m * c.correction1)? / ((&next_v * c.correction2)?.sqrt()? + c.eps)?)?;
    let next_theta = ((theta * c.decay)? - (adjusted * c.lr)?)?;
    var.set(&next_theta.to_dtype(var.dtype())?)?;
    Ok((next_m, next_v))
}

/// Whether a gradient is a view of the variable's own memory, which an in-place op must not read.
fn shares_storage(var: &Var, grad: &Tensor) -> bool {
    let address =
        |tensor: &Tensor| std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0) as usize;
    address(var) == address(grad)
}
