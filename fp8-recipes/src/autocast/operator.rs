//! The casts around an operator that computes in high precision.

use super::context::{Context, current};
use super::plan::{OperatorCasts, TensorCasts, operator_casts};
use super::prepared::Prepared;
use super::settings::Mode;
use crate::error::{Error, Result};
use candle_core::Tensor;
use fp8_candle::cast_values_and_gradient;
use fp8_core::Contraction;

impl OperatorCasts {
    /// Calls `compute` with the casts of the operator at `path` under the guards of this thread; with None where the operator computes
    /// in high precision. A failure inside a guard is recorded, like that of a layer.
    pub(crate) fn around<T, E: From<Error>>(
        prepared: Prepared,
        path: Option<&str>,
        compute: impl FnOnce(Option<&Self>) -> Result<T, E>,
    ) -> Result<T, E> {
        let context = current();
        let casts = Self::under(context.as_ref(), prepared, path).map_err(E::from);
        let done = casts.and_then(|casts| compute(casts.as_ref()));
        if let (Err(_), Some(context)) = (&done, &context) {
            context.note_failure();
        }
        done
    }

    fn under(
        context: Option<&Context>,
        prepared: Prepared,
        path: Option<&str>,
    ) -> Result<Option<Self>> {
        let Some(context) = context else {
            return Ok(None);
        };
        match prepared {
            Prepared::With(state) if context.settings.mode == Mode::Fp8 => {
                match context.sign_in(&state)? {
                    None => Ok(None),
                    Some(step) => operator_casts(&state, &step),
                }
            }
            Prepared::Never => {
                context.note_operator(path);
                Ok(None)
            }
            Prepared::With(_) | Prepared::LeftOut => Ok(None),
        }
    }

    /// Casts an input, and its gradient in the backward pass.
    pub(crate) fn input(&self, x: &Tensor) -> Result<Tensor> {
        self.input.apply(x)
    }

    /// Casts a weight, and its gradient in the backward pass.
    pub(crate) fn weight(&self, x: &Tensor) -> Result<Tensor> {
        self.weight.apply(x)
    }

    /// Casts the output, and the gradient that reaches it in the backward pass.
    pub(crate) fn output(&self, x: &Tensor) -> Result<Tensor> {
        self.output.apply(x)
    }
}

impl TensorCasts {
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let cast = |quantizer| (quantizer, Contraction::Cols);
        match (self.values.as_ref(), self.gradient.as_ref()) {
            (None, None) => Ok(x.clone()),
            (values, gradient) => {
                let gradient = gradient.map(cast);
                Ok(cast_values_and_gradient(x, values.map(cast), gradient)?)
            }
        }
    }
}
