//! Parameters that a [`ScaledVarMap`](crate::scaled::ScaledVarMap) holds, as layers see them.

use super::join;
use crate::error::{Error, Result};
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Tensor};
use fp8_candle::scaled::{Scaled, ScaledVar};

/// The scaled parameter that holds `tensor`.
pub(super) fn parameter(tensor: &Tensor, path: Option<&str>, own: &str) -> Result<Scaled> {
    match ScaledVar::of(tensor) {
        Some(var) => Ok(var.value()),
        None => Err(Error::NotScaled {
            tensor: join(path.unwrap_or("without a path"), own),
        }),
    }
}

/// [`parameter`], where there is a tensor.
pub(super) fn optional(
    tensor: Option<&Tensor>,
    path: Option<&str>,
    own: &str,
) -> Result<Option<Scaled>> {
    tensor.map(|t| parameter(t, path, own)).transpose()
}

/// A parameter of channels along dimension 1 of `rank`.
pub(super) fn along_channels(parameter: &Scaled, rank: usize) -> Result<Scaled> {
    let mut dims = vec![1; rank];
    if let Some(channels) = dims.get_mut(1) {
        *channels = parameter.elem_count();
    }
    Ok(parameter.reshape(&dims)?)
}

/// `tensor`, or the value in `dtype` of the scaled parameter whose data it is: what a layer multiplies a plain tensor by. No gradient
/// reaches the parameter from there.
pub(crate) fn plain_value(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    match ScaledVar::of(tensor) {
        Some(var) => Ok(var.value().to_tensor(dtype)?),
        None => Ok(tensor.clone()),
    }
}

/// Fails if `model` shows a scaled parameter: for functions that save or load variables only.
pub(crate) fn refuse_scaled_model<M: Fp8Module + ?Sized>(
    model: &M,
    function: &'static str,
    instead: &'static str,
) -> Result<()> {
    struct First(Option<ScaledVar>);
    impl Visitor for First {
        fn tensor(&mut self, _: Option<&str>, tensor: &Tensor) {
            if self.0.is_none() {
                self.0 = ScaledVar::of(tensor);
            }
        }
    }
    let mut first = First(None);
    model.visit(&mut first);
    match first.0 {
        None => Ok(()),
        Some(var) => Err(Error::ScaledParameter {
            tensor: var.name().to_string(),
            function,
            instead,
        }),
    }
}

/// For layers that know nothing of scales: an error where a parameter is scaled, since they would compute with its data.
pub(super) fn refuse_scaled(layer: &'static str, path: &str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().any(|tensor| ScaledVar::of(tensor).is_some()) {
        true => Err(Error::NoScaledForm {
            layer,
            path: path.to_string(),
        }),
        false => Ok(()),
    }
}
