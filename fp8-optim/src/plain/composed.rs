//! The update made of candle's operations, for any dtype and device.

use candle_core::{DType, Device, Result, Tensor, Var};
use fp8_core::StochasticKey;
use half::{bf16, f16};

use super::super::host::Value;
use super::super::real::TensorExpr;

/// Elements of one task. The bits of an element follow from its index, so the split changes none.
const BLOCK: usize = 1 << 14;

/// The gradient in `dtype`, multiplied by `clip`.
pub(super) fn clipped(grad: &Tensor, dtype: DType, clip: f64) -> Result<Tensor> {
    let grad = grad.detach().to_dtype(dtype)?;
    if clip == 1.0 {
        return Ok(grad);
    }
    grad * clip
}

/// Runs `formula` over a variable, in the dtype of its gradient, and rounds the result once.
pub(super) fn update(
    var: &Var,
    grad: Tensor,
    moments: Vec<Tensor>,
    master: &mut Option<Tensor>,
    key: Option<StochasticKey>,
    formula: impl Fn(TensorExpr, TensorExpr, &mut [TensorExpr]) -> TensorExpr,
) -> Result<Vec<Tensor>> {
    let theta = current(var, master.as_ref(), grad.dtype())?;
    let mut moments: Vec<TensorExpr> = moments.into_iter().map(TensorExpr::from).collect();
    let next = formula(theta.into(), grad.into(), &mut moments).tensor()?;
    let moments = moments.into_iter().map(TensorExpr::tensor);
    let moments = moments.collect::<Result<_>>()?;
    store(var, next, master, key)?;
    Ok(moments)
}

/// The value that a step starts from, in `dtype`: the master's, unless the variable was written to.
fn current(var: &Var, master: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
    let current = var.as_detached_tensor();
    match master {
        None => current.to_dtype(dtype),
        Some(master) => master
            .to_dtype(var.dtype())?
            .eq(&current)?
            .where_cond(&master.to_dtype(dtype)?, &current.to_dtype(dtype)?),
    }
}

/// Puts the result of a step into master and variable.
fn store(
    var: &Var,
    next: Tensor,
    master: &mut Option<Tensor>,
    key: Option<StochasticKey>,
) -> Result<()> {
    let next = match (key, &master) {
        (None, _) => next,
        (Some(key), Some(master)) => round_at_random(&next, master.dtype(), key)?,
        (Some(key), None) => round_at_random(&next, var.dtype(), key)?,
    };
    let rounded = next.to_dtype(var.dtype())?;
    if let Some(master) = master {
        *master = next;
        // A variable of the master's dtype would share its memory.
        return var.set(&rounded.copy()?);
    }
    var.set(&rounded)
}

/// Rounds on the host: no accelerator computes these random bits.
fn round_at_random(values: &Tensor, dtype: DType, key: StochasticKey) -> Result<Tensor> {
    let wide = values.to_dtype(DType::F32)?.flatten_all()?;
    let wide = wide.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
    fn run<T: Value>(wide: &[f32], key: StochasticKey) -> Vec<T> {
        let mut out = vec![T::default(); wide.len()];
        let tasks = out.chunks_mut(BLOCK).zip(wide.chunks(BLOCK));
        fp8_candle::parallel::for_each(tasks.enumerate(), |(i, (out, wide))| {
            T::round(wide, out, (i * BLOCK) as u64, Some(key));
        });
        out
    }
    let (shape, device) = (values.shape(), values.device());
    match dtype {
        DType::BF16 => Tensor::from_vec(run::<bf16>(&wide, key), shape, device),
        _ => Tensor::from_vec(run::<f16>(&wide, key), shape, device),
    }
}
