//! `candle_nn::batch_norm`: batch normalization with a path, and what folds it into a convolution.

mod arrays;
mod fuse;
mod running;
mod whole;

pub use candle_nn::batch_norm::BatchNormConfig;
pub use fuse::fuse_batch_norm;
pub use whole::{adjacent_batch_norms, fold_batch_norms};

use super::identity::path_methods;
use crate::error::{Error, LayerError};
use crate::{Fp8Module, Visitor};
use candle_core::{D, DType, Result, Tensor};
use candle_nn::{ModuleT, VarBuilder};
use running::{Before, Parameters, follow};
use std::ops::Deref;
use std::sync::Arc;
use tracing::span::EnteredSpan;

/// `(x - mean) / sqrt(variance + eps) * weight + bias` of each channel: over the batch in training, where the running
/// statistics follow, and with the running statistics in evaluation.
///
/// Same constructors and methods as `candle_nn::BatchNorm` and, where `x` and all parameters are f32, or all f64, the same bits.
/// Other inputs are computed in f32 (f64 for an f64 `x`) and give the dtype of `x`. It is never cast to FP8. In both modes the
/// gradient reaches `x`, weight and bias.
///
/// Running statistics that come from a [`VarBuilder`] over a VarMap are variables of it: training checkpoints hold them, and
/// optimizers leave them alone, since they have no gradient. An aborted step ([`AutocastGuard::abort`]) moves them too. If the
/// mean or variance of a channel is Inf or NaN, its running statistics do not change; candle-nn's would never recover.
///
/// [`AutocastGuard::abort`]: crate::AutocastGuard::abort
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// use fp8::nn::{self, ModuleT};
/// # fn main() -> candle_core::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let bn = nn::batch_norm(3, 1e-5, vb.pp("bn"))?;
/// let x = Tensor::ones((2, 3, 4, 4), DType::F32, &Device::Cpu)?;
/// bn.forward_t(&x, true)?;
/// // A tenth of the way from 0 to the mean of the batch.
/// assert_eq!(bn.running_mean().to_vec1::<f32>()?, [0.1; 3]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct BatchNorm {
    inner: candle_nn::BatchNorm,
    parameters: Parameters,
    remove_mean: bool,
    path: Option<Arc<str>>,
}

impl From<candle_nn::BatchNorm> for BatchNorm {
    /// Assumes that the layer subtracts the mean, since candle-nn's does not say; [`batch_norm`] knows its configuration.
    fn from(inner: candle_nn::BatchNorm) -> Self {
        Self {
            parameters: Parameters::of(&inner),
            inner,
            remove_mean: true,
            path: None,
        }
    }
}

impl Deref for BatchNorm {
    type Target = candle_nn::BatchNorm;

    fn deref(&self) -> &Self::Target {
        &self.inner
    }
}

/// The constructors of candle-nn.
macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*);)*) => {
        impl BatchNorm {$(
            $(#[$doc])*
            pub fn $name($($arg: $type),*) -> Result<Self> {
                Ok(candle_nn::BatchNorm::$name($($arg),*)?.into())
            }
        )*}
    };
}

constructors! {
    /// `running_mean`, `running_var`, `weight`, `bias`: `[num_features]`. Running statistics that are variables are used as they
    /// are; other tensors are copied.
    ///
    /// # Errors
    /// If a shape does not fit or `eps` is negative.
    new(num_features: usize, running_mean: Tensor, running_var: Tensor, weight: Tensor, bias: Tensor, eps: f64);

    /// Without weight and bias.
    ///
    /// # Errors
    /// As [`BatchNorm::new`].
    new_no_bias(num_features: usize, running_mean: Tensor, running_var: Tensor, eps: f64);

    /// With another momentum than 0.1: `running * (1 - momentum) + batch * momentum`.
    ///
    /// # Errors
    /// As [`BatchNorm::new`], and if the momentum is not within 0 and 1.
    new_with_momentum(
        num_features: usize, running_mean: Tensor, running_var: Tensor, weight: Tensor, bias: Tensor, eps: f64, momentum: f64
    );

    /// Without weight and bias, with a momentum.
    ///
    /// # Errors
    /// As [`BatchNorm::new_with_momentum`].
    new_no_bias_with_momentum(num_features: usize, running_mean: Tensor, running_var: Tensor, eps: f64, momentum: f64);
}

impl BatchNorm {
    /// Normalizes with the mean and variance of the batch, `x` `[batch, num_features, ..]`, and moves the running statistics
    /// towards them (with the unbiased variance), except those of a channel whose mean or variance is not finite.
    ///
    /// # Errors
    /// If `x` has another shape, or fewer than two values for a channel, which have no variance.
    pub fn forward_train(&self, x: &Tensor) -> Result<Tensor> {
        let _span = self.entered();
        self.in_training(x)
    }

    /// Normalizes with the running statistics.
    ///
    /// # Errors
    /// If `x` has another shape than `[batch, num_features, ..]`.
    pub fn forward_eval(&self, x: &Tensor) -> Result<Tensor> {
        let _span = self.entered();
        self.in_evaluation(x)
    }

    /// Enters the span of a forward pass.
    fn entered(&self) -> EnteredSpan {
        tracing::trace_span!("norm", kind = "batch-norm", path = self.path()).entered()
    }

    fn in_training(&self, x: &Tensor) -> Result<Tensor> {
        if let Some(plain) = self.plain()? {
            let y = plain.in_training(x)?;
            return self.parameters.follow(&plain).map(|()| y);
        }
        let features = self.features(x)?;
        if features == 0 || x.elem_count() / features < 2 {
            return Err(Error::from(LayerError::NoVariance {
                layer: self.path().map(str::to_string),
                shape: x.dims().to_vec(),
            })
            .into());
        }
        let before = Before::of(&self.inner)?;
        let y = match self.has_one_dtype(x) {
            true => self.inner.forward_train(x),
            false => self.forward_mixed(x, true),
        }?;
        if crate::is_recomputing() {
            // The first run has already moved the statistics.
            before.put_back(&self.inner)?;
        }
        before.keep_where_not_finite(&self.inner)?;
        Ok(y)
    }

    fn in_evaluation(&self, x: &Tensor) -> Result<Tensor> {
        if let Some(plain) = self.plain()? {
            return plain.in_evaluation(x);
        }
        self.features(x)?;
        match self.has_one_dtype(x) {
            true => self.inner.forward_t(x, false),
            false => self.forward_mixed(x, false),
        }
    }

    /// Whether the mean is subtracted.
    pub(crate) fn remove_mean(&self) -> bool {
        self.remove_mean
    }

    /// The layer with the values of its parameters where these are scaled.
    fn plain(&self) -> Result<Option<Self>> {
        let plain = self.parameters.plain(self.eps(), self.momentum())?;
        Ok(plain.map(|inner| Self {
            remove_mean: self.remove_mean,
            path: self.path.clone(),
            ..inner.into()
        }))
    }

    fn features(&self, x: &Tensor) -> Result<usize> {
        let features = self.running_mean().dim(0)?;
        match x.dims() {
            [_, channels, ..] if *channels == features => Ok(features),
            dims => candle_core::bail!("batch norm of {features} features got {dims:?}"),
        }
    }

    fn has_one_dtype(&self, x: &Tensor) -> bool {
        let (mean, var) = (self.running_mean(), self.running_var());
        let affine = self.weight_and_bias().into_iter();
        let affine = affine.flat_map(|(weight, bias)| [weight, bias]);
        let half = matches!(x.dtype(), DType::F16 | DType::BF16);
        !half
            && [mean, var]
                .into_iter()
                .chain(affine)
                .all(|tensor| tensor.dtype() == x.dtype())
    }

    /// Computes everything in f32, or in f64 if `x` is f64.
    fn forward_mixed(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let wide = match x.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let shape: Vec<usize> = (0..x.rank())
            .map(|d| if d == 1 { x.dims()[1] } else { 1 })
            .collect();
        let along = |t: &Tensor| t.to_dtype(wide)?.reshape(shape.as_slice());
        let (running_mean, running_var) = (self.running_mean(), self.running_var());
        let centered = x.to_dtype(wide)?;
        let (centered, variance) = if train {
            // `[features, values]`: one sum for each channel.
            let mean_of = |t: &Tensor| {
                let rows = t.transpose(0, 1)?.flatten_from(1)?.contiguous()?;
                rows.mean(D::Minus1)
            };
            let centered = match self.remove_mean {
                true => {
                    let mean = mean_of(&centered)?;
                    follow(running_mean, &mean, self.momentum(), 1.)?;
                    centered.broadcast_sub(&along(&mean)?)?
                }
                false => centered,
            };
            let variance = mean_of(&centered.sqr()?)?;
            let count = (x.elem_count() / running_var.dim(0)?) as f64;
            follow(
                running_var,
                &variance,
                self.momentum(),
                count / (count - 1.),
            )?;
            (centered, along(&variance)?)
        } else {
            let mean = along(&running_mean.detach())?;
            (
                centered.broadcast_sub(&mean)?,
                along(&running_var.detach())?,
            )
        };
        let y = centered.broadcast_div(&(variance + self.eps())?.sqrt()?)?;
        let y = match self.weight_and_bias() {
            None => y,
            Some((weight, bias)) => y
                .broadcast_mul(&along(weight)?)?
                .broadcast_add(&along(bias)?)?,
        };
        y.to_dtype(x.dtype())
    }
}

path_methods!(BatchNorm);

impl ModuleT for BatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        match train {
            true => self.forward_train(x),
            false => self.forward_eval(x),
        }
    }
}

impl Fp8Module for BatchNorm {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.batch_norm(self.path(), &self.inner);
    }
}

/// Creates or loads a batch norm, with candle-nn's initialization and configuration.
///
/// # Errors
/// If a tensor is missing or has another shape, or `eps` is negative.
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::nn;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let config = nn::BatchNormConfig { momentum: 0.5, ..Default::default() };
/// let bn = nn::batch_norm(3, config, vb.pp("stem.bn"))?;
/// assert_eq!((bn.path(), bn.momentum()), (Some("stem.bn"), 0.5));
/// assert_eq!(vars.all_vars().len(), 4);
/// # Ok(()) }
/// ```
pub fn batch_norm<C: Into<BatchNormConfig>>(
    num_features: usize,
    config: C,
    vb: VarBuilder<'_>,
) -> Result<BatchNorm> {
    let (config, path) = (config.into(), vb.prefix());
    let inner = candle_nn::batch_norm(num_features, config, vb)?;
    Ok(BatchNorm {
        remove_mean: config.remove_mean,
        path: Some(path.into()),
        ..inner.into()
    })
}
