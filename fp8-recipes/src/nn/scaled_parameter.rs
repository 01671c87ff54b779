//! Parameters that a [`ScaledVarMap`](crate::scaled::ScaledVarMap) holds, as layers see them.

use crate::error::{Error, Result};
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Tensor};
use fp8_files::names::join;
use fp8_scaled::{Parameter, Scaled, ScaledVar};

/// The value of a scaled parameter; an error for a plain one.
pub(super) fn scaled(parameter: &Parameter, path: Option<&str>, own: &str) -> Result<Scaled> {
    match parameter.scaled() {
        Some(var) => Ok(var.value()),
        None => Err(Error::NotScaled {
            tensor: join(path.unwrap_or("without a path"), own),
        }),
    }
}

/// [`scaled`], where there is a parameter.
pub(super) fn optional(
    parameter: Option<&Parameter>,
    path: Option<&str>,
    own: &str,
) -> Result<Option<Scaled>> {
    parameter
        .map(|parameter| scaled(parameter, path, own))
        .transpose()
}

/// A parameter of channels along dimension 1 of `rank`.
pub(super) fn along_channels(parameter: &Scaled, rank: usize) -> Result<Scaled> {
    let mut dims = vec![1; rank];
    if let Some(channels) = dims.get_mut(1) {
        *channels = parameter.elem_count();
    }
    Ok(parameter.reshape(&dims)?)
}

/// The value of a parameter that may be absent: [`Parameter::value`].
pub(super) fn value_of(parameter: Option<&Parameter>, dtype: DType) -> Result<Option<Tensor>> {
    Ok(parameter
        .map(|parameter| parameter.value(dtype))
        .transpose()?)
}

/// Detaches a parameter, so that it gets no gradient. Scaled ones are not changed; one in parts becomes its placeholder of NaN.
pub(super) fn freeze(parameter: &mut Parameter) {
    match parameter {
        Parameter::Scaled(_) => {}
        parameter => *parameter = Parameter::Plain(parameter.tensor().detach()),
    }
}

/// Fails if `model` shows a scaled parameter or one in parts: for functions that save or load variables only.
pub(crate) fn refuse_scaled_model<M: Fp8Module + ?Sized>(
    model: &M,
    function: &'static str,
    instead: &'static str,
) -> Result<()> {
    struct First(Option<Parameter>);
    impl Visitor for First {
        fn tensor(&mut self, _: Option<&str>, tensor: &Tensor) {
            if self.0.is_none() {
                let parameter = Parameter::of(tensor);
                self.0 = (!matches!(parameter, Parameter::Plain(_))).then_some(parameter);
            }
        }
    }
    let mut first = First(None);
    model.visit(&mut first);
    match first.0 {
        Some(Parameter::Scaled(var)) => Err(Error::ScaledParameter {
            tensor: var.name().to_string(),
            function,
            instead,
        }),
        Some(Parameter::Sharded(var)) => Err(Error::ShardedParameter {
            tensor: var.name().to_string(),
            function,
        }),
        Some(Parameter::Plain(_)) | None => Ok(()),
    }
}

/// An error if one of `tensors` is a scaled parameter, whose data a function of plain parameters would take for its values.
pub(super) fn refuse_scaled_tensors(
    tensors: &[&Tensor],
    function: &'static str,
    instead: &'static str,
) -> Result<()> {
    match tensors.iter().find_map(|tensor| ScaledVar::of(tensor)) {
        Some(var) => Err(Error::ScaledParameter {
            tensor: var.name().to_string(),
            function,
            instead,
        }),
        None => Ok(()),
    }
}

/// An error where a parameter is scaled: for layers without scaled arithmetic, which would take its data for its values.
pub(super) fn refuse_scaled(layer: &'static str, path: &str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().any(|tensor| ScaledVar::of(tensor).is_some()) {
        true => Err(Error::NoScaledForm {
            layer,
            path: path.to_string(),
        }),
        false => Ok(()),
    }
}
