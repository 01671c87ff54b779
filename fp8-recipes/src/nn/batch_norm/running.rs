//! Updates of running statistics.

use candle_core::{DType, Result, Tensor, Var};
use fp8_scaled::Parameter;

/// `running * (1 - momentum) + batch * momentum * unbiased`, in the dtype that `running` has.
pub(super) fn follow(running: &Tensor, batch: &Tensor, momentum: f64, unbiased: f64) -> Result<()> {
    let old = running.detach().to_dtype(batch.dtype())?;
    let new = ((old * (1. - momentum))? + (batch.detach() * (momentum * unbiased))?)?;
    // Running statistics are always variables: candle-nn makes them so.
    Var::from_tensor(running)?.set(&new.to_dtype(running.dtype())?)
}

/// Running statistics before a batch, restored for channels whose batch is not finite.
pub(super) struct Before([Tensor; 2]);

impl Before {
    pub(super) fn of(bn: &candle_nn::BatchNorm) -> Result<Self> {
        let copy = |running: &Tensor| running.detach().copy();
        Ok(Self([copy(bn.running_mean())?, copy(bn.running_var())?]))
    }

    /// Restores both statistics.
    pub(super) fn put_back(&self, bn: &candle_nn::BatchNorm) -> Result<()> {
        let [mean, variance] = &self.0;
        Var::from_tensor(bn.running_mean())?.set(mean)?;
        Var::from_tensor(bn.running_var())?.set(variance)
    }

    /// Restores mean and variance of each channel where one of them is not finite now. The device decides, without a transfer.
    pub(super) fn keep_where_not_finite(&self, bn: &candle_nn::BatchNorm) -> Result<()> {
        let now = [bn.running_mean().detach(), bn.running_var().detach()];
        // A finite value minus itself is 0; Inf and NaN give NaN.
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

/// The parameters of a batch norm.
#[derive(Debug, Clone)]
pub(super) struct Parameters {
    /// Mean and variance.
    pub(super) running: [Parameter; 2],
    /// Weight and bias.
    pub(super) affine: Option<[Parameter; 2]>,
}

impl Parameters {
    pub(super) fn of(bn: &candle_nn::BatchNorm) -> Self {
        let affine = bn.weight_and_bias();
        Self {
            running: [bn.running_mean(), bn.running_var()].map(Parameter::of),
            affine: affine.map(|(weight, bias)| [weight, bias].map(Parameter::of)),
        }
    }

    /// candle-nn's layer with the values of scaled parameters, None where they are plain tensors.
    pub(super) fn plain(&self, eps: f64, momentum: f64) -> Result<Option<candle_nn::BatchNorm>> {
        let [mean, variance] = &self.running;
        if mean.scaled().is_none() {
            return Ok(None);
        }
        let value = |own: &Parameter| Ok::<_, candle_core::Error>(own.value(DType::F32)?);
        let (mean, variance) = (value(mean)?, value(variance)?);
        let features = mean.elem_count();
        Ok(Some(match &self.affine {
            Some([weight, bias]) => candle_nn::BatchNorm::new_with_momentum(
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

    /// Copies the statistics of `plain` into the scaled ones.
    pub(super) fn follow(&self, plain: &candle_nn::BatchNorm) -> Result<()> {
        let now = [plain.running_mean(), plain.running_var()];
        for (running, now) in self.running.iter().zip(now) {
            if let Some(var) = running.scaled() {
                var.set_rescaled(&now.detach())?;
            }
        }
        Ok(())
    }
}
