//! Cross entropy composed of candle's primitives, with targets on the device.

use super::options::CrossEntropyOptions;
use crate::base::error::Result;
use crate::device::cpu::elements::compute_dtype;
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::cross_entropy as cuda;
use candle_core::{D, DType, Tensor};

/// Contiguous I64 targets. candle does not cast every integer dtype on every device.
pub(super) fn to_i64(targets: &Tensor) -> Result<Tensor> {
    let targets = targets.contiguous()?;
    #[cfg(feature = "cuda")]
    if targets.device().is_cuda() {
        return cuda::to_i64(&targets);
    }
    Ok(targets.to_dtype(DType::I64)?)
}

/// The loss from candle's primitives, for I64 targets on any device; a target that is not a class makes it NaN.
pub(super) fn composed(
    logits: &Tensor,
    targets: &Tensor,
    options: CrossEntropyOptions,
) -> Result<Tensor> {
    let (rows, classes) = (targets.elem_count(), logits.dim(D::Minus1)?);
    let dtype = compute_dtype(logits.dtype());
    if rows == 0 || classes == 0 {
        return Ok(Tensor::new(f64::NAN, logits.device())?.to_dtype(dtype)?);
    }
    let targets = targets.reshape((rows, 1))?;
    let constant = |value: f64| {
        let value = Tensor::new(value, logits.device())?.to_dtype(dtype)?;
        value.broadcast_as(targets.shape())
    };
    let is_class = (targets.ge(0i64)? * targets.lt(classes as i64)?)?;
    let counts = match options.ignore_index {
        Some(ignored) => targets.ne(ignored)?,
        None => targets.eq(&targets)?,
    };
    let x = logits.contiguous()?.reshape((rows, classes))?;
    let x = x.to_dtype(dtype)?;
    // A row that does not count is replaced rather than multiplied by 0: neither its NaN nor 0 / 0 may reach a gradient.
    let x = counts
        .broadcast_as(x.shape())?
        .where_cond(&x, &x.zeros_like()?)?;
    let (one, nan) = (constant(1.0)?, constant(f64::NAN)?);
    let factor = is_class.where_cond(&one, &counts.where_cond(&nan, &one)?)?;
    let x = x.broadcast_mul(&factor)?;
    let class = is_class.where_cond(&targets, &targets.zeros_like()?)?;
    let x = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    let log_sum = x.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let losses = (log_sum - x.gather(&class, 1)?)?;
    let losses = counts.where_cond(&losses, &losses.zeros_like()?)?;
    Ok((losses.sum_all()? / counts.to_dtype(dtype)?.sum_all()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn composed_takes_bad_targets_and_ignored_rows_of_nan() -> Result<()> {
        let cpu = &Device::Cpu;
        let mut values: Vec<f64> = (0..20).map(|i| f64::from(i * 7 % 11)).collect();
        values[5..10].fill(f64::NAN);
        let options = CrossEntropyOptions {
            ignore_index: Some(-3),
        };
        let logits = Var::from_tensor(&Tensor::from_vec(values, (4, 5), cpu)?)?;
        let gradient = |targets: &[i64]| -> Result<(f64, Vec<Vec<f64>>)> {
            let loss = composed(&logits, &Tensor::new(targets, cpu)?, options)?;
            let grads = loss.backward()?;
            let dx = grads.get(&logits).map(|dx| dx.to_vec2()).transpose()?;
            Ok((loss.to_scalar()?, dx.unwrap_or_default()))
        };
        let (loss, dx) = gradient(&[1, -3, 4, 0])?;
        assert!(loss.is_finite());
        assert_eq!(dx[1], [0.0; 5]);
        assert!(
            [0, 2, 3]
                .iter()
                .all(|&i| dx[i].iter().all(|g| g.is_finite() && *g != 0.0))
        );
        for bad in [5, -1] {
            let (loss, dx) = gradient(&[1, -3, bad, 0])?;
            assert!(loss.is_nan());
            assert_eq!(dx[1], [0.0; 5]);
            assert!(dx[2].iter().all(|g| g.is_nan()));
            assert!([0, 3].iter().all(|&i| dx[i].iter().all(|g| g.is_finite())));
        }
        let (loss, dx) = gradient(&[-3; 4])?;
        assert!(loss.is_nan());
        assert_eq!(dx, vec![vec![0.0; 5]; 4]);
        Ok(())
    }
}
