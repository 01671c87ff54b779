//! The casts around an operator that computes in high precision.

use super::context::current;
use super::plan::{OperatorCasts, operator_casts};
use super::settings::Mode;
use super::state::Fp8State;
use crate::error::{Error, Result};
use candle_core::Tensor;
use fp8_candle::cast_values_and_gradient;
use fp8_core::Contraction;
use std::sync::Arc;

impl OperatorCasts {
    /// Calls `compute` with the casts of an operator under the guards of this thread; with None where the operator computes in high
    /// precision. A failure inside a guard is recorded, like that of a layer.
    pub(crate) fn around<T, E: From<Error>>(
        state: Option<Arc<Fp8State>>,
        compute: impl FnOnce(Option<&Self>) -> Result<T, E>,
    ) -> Result<T, E> {
        let casts = Self::here(state).map_err(E::from);
        let done = casts.and_then(|casts| compute(casts.as_ref()));
        if let (Err(_), Some(context)) = (&done, current()) {
            context.note_failure();
        }
        done
    }

    fn here(state: Option<Arc<Fp8State>>) -> Result<Option<Self>> {
        let (Some(state), Some(context)) = (state, current()) else {
            return Ok(None);
        };
        if context.settings.mode != Mode::Fp8 {
            return Ok(None);
        }
        match context.sign_in(&state)? {
            None => Ok(None),
            Some(step) => operator_casts(&state, &step),
        }
    }

    /// Casts an input, and its gradient in the backward pass.
    pub(crate) fn input(&self, x: &Tensor) -> Result<Tensor> {
        Self::both(x, self.input.as_ref(), self.grad_input.as_ref())
    }

    /// Casts a weight, and its gradient in the backward pass.
    pub(crate) fn weight(&self, x: &Tensor) -> Result<Tensor> {
        Self::both(x, self.weight.as_ref(), self.grad_weight.as_ref())
    }

    /// Casts the output, and the gradient that reaches it in the backward pass.
    pub(crate) fn output(&self, x: &Tensor) -> Result<Tensor> {
        Self::both(x, self.output.as_ref(), self.grad_output.as_ref())
    }

    fn both(
        x: &Tensor,
        values: Option<&fp8_candle::Quantizer>,
        gradient: Option<&fp8_candle::Quantizer>,
    ) -> Result<Tensor> {
        let cast = |quantizer| (quantizer, Contraction::Cols);
        match (values, gradient) {
            (None, None) => Ok(x.clone()),
            _ => Ok(cast_values_and_gradient(
                x,
                values.map(cast),
                gradient.map(cast),
            )?),
        }
    }
}
