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
    /// What `compute` makes of the casts of an operator with this state inside the guards of this thread; it gets None where the
    /// operator computes in high precision. A failure inside a guard is noted, as that of a layer is.
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

    /// An input as the operator sees it; its gradient is cast on its way back.
    pub(crate) fn input(&self, x: &Tensor) -> Result<Tensor> {
        Self::both(x, self.input.as_ref(), self.grad_input.as_ref())
    }

    /// As [`OperatorCasts::input`] for a weight.
    pub(crate) fn weight(&self, x: &Tensor) -> Result<Tensor> {
        Self::both(x, self.weight.as_ref(), self.grad_weight.as_ref())
    }

    /// What the operator gives; the gradient that comes to it is cast.
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
