//! How running statistics follow those of a batch.

use crate::scaled::plain_value;
use candle_core::{DType, Result, Tensor, Var};
use fp8_scaled::ScaledVar;

/// `running * (1 - momentum) + batch * momentum * unbiased`, in the dtype that `running` has.
pub(super) fn follow(running: &Tensor, batch: &Tensor, momentum: f64, unbiased: f64) -> Result<()> {
    let old = running.detach().to_dtype(batch.dtype())?;
    let new = ((old * (1. - momentum))? + (batch.detach() * (momentum * unbiased))?)?;
    // The statistics are variables always: candle-nn makes them so.
    Var::from_tensor(running)?.set(&new.to_dtype(running.dtype())?)
}

/// Running statistics before a batch, to go back to where the batch was not finite.
pub(super) struct Before([Tensor; 2]);

impl Before {
    pub(super) fn of(bn: &candle_nn::BatchNorm) -> Result<Self> {
        let copy = |running: &Tensor| running.detach().copy();
        Ok(Self([copy(bn.running_mean())?, copy(bn.running_var())?]))
    }

    /// Takes all back.
    pub(super) fn put_back(&self, bn: &candle_nn::BatchNorm) -> Result<()> {
        let [mean, variance] = &self.0;
        Var::from_tensor(bn.running_mean())?.set(mean)?;
        Var::from_tensor(bn.running_var())?.set(variance)
    }

    /// Takes mean and variance of a channel back if one of them is not finite now. Decided on the device.
    pub(super) fn keep_where_not_finite(&self, bn: &candle_nn::BatchNorm) -> Result<()> {
        let now = [bn.running_mean().detach(), bn.running_var().detach()];
        // What is finite minus itself is 0, anything else NaN.
        let nothing = |running: &Tensor| running.sub(running)?.to_dtype(DType::F32);
        let finite = (nothing(&now[0])? + nothing(&now[1])?)?.eq(0f32)?;
        let pairs = now.iter().zip(&self.0);
        for (running, (now, before)) in [bn.running_mean(), bn.running_var()].into_iter().zip(pairs)
        {
            Var::from_tensor(running)?.set(&finite.where_cond(now, before)?)?;
        }
        Ok(())
    }
}

/// `bn` with the values of its parameters, None where they are plain tensors.
pub(super) fn plain_values(bn: &candle_nn::BatchNorm) -> Result<Option<candle_nn::BatchNorm>> {
    if ScaledVar::of(bn.running_mean()).is_none() {
        return Ok(None);
    }
    let value = |tensor| plain_value(tensor, DType::F32);
    let (mean, variance) = (value(bn.running_mean())?, value(bn.running_var())?);
    let (features, eps, momentum) = (mean.elem_count(), bn.eps(), bn.momentum());
    Ok(Some(match bn.weight_and_bias() {
        Some((weight, bias)) => candle_nn::BatchNorm::new_with_momentum(
            features,
            mean,
            variance,
            value(weight)?,
            value(bias)?,
            eps,
            momentum,
        )?,
        None => candle_nn::BatchNorm::new_no_bias_with_momentum(
            features, mean, variance, eps, momentum,
        )?,
    }))
}

/// The scaled statistics of `bn` become those of `plain`.
pub(super) fn follow_scaled(bn: &candle_nn::BatchNorm, plain: &candle_nn::BatchNorm) -> Result<()> {
    for (running, now) in [
        (bn.running_mean(), plain.running_mean()),
        (bn.running_var(), plain.running_var()),
    ] {
        if let Some(var) = ScaledVar::of(running) {
            var.set_rescaled(&now.detach())?;
        }
    }
    Ok(())
}
