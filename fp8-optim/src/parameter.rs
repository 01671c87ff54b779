//! How the engine stores one parameter.

use std::collections::{HashMap, HashSet};

use candle_core::Tensor;

use super::error::Result;
use super::rule::{Rates, Rule};
use super::shared::Shared;
use super::state_reader::StateReader;

/// One parameter with its moments, in the storage of its kind: a plain variable, or data with a scale.
pub trait Parameter<R: Rule>: Sized {
    /// The gradients of all parameters, as a backward pass returns them.
    type Grads;
    /// The gradient of one parameter: it fits the parameter and has memory of its own.
    type Grad;
    /// Moments and master of a state, checked.
    type Loaded;

    /// The name of the optimizer in a state.
    const KIND: &'static str;

    /// The parameter's name.
    fn name(&self) -> &str;

    /// The tensor that the search for Inf and NaN looks at.
    fn tensor(&self) -> &Tensor;

    /// A tensor of the parameter's shape, by which weight decay chooses: another one if this is a range of a parameter. Its values do not
    /// matter.
    fn whole(&self) -> &Tensor {
        self.tensor()
    }

    /// The parameter's gradient. `own` has the addresses of all parameters: a gradient that shares memory with one is copied.
    ///
    /// # Errors
    /// A gradient of another shape, dtype or device.
    fn gradient(&self, grads: &Self::Grads, own: &HashSet<usize>) -> Result<Option<Self::Grad>>;

    /// The update of one step.
    ///
    /// # Errors
    /// candle's, or the device's.
    fn update(
        &mut self,
        rule: &R,
        grad: &Self::Grad,
        rates: &Rates,
        shared: &mut Shared,
    ) -> candle_core::Result<()>;

    /// Adds copies of moments and master to a state. Returns whether there are moments.
    ///
    /// # Errors
    /// candle's, when a tensor cannot be made.
    fn save(&self, state: &mut HashMap<String, Tensor>) -> Result<bool>;

    /// Copies moments and master from a state, and says whether there are moments; changes nothing.
    ///
    /// # Errors
    /// The tensor that does not fit.
    fn check(&self, state: &mut StateReader<'_>) -> Result<(Self::Loaded, bool)>;

    /// Replaces moments and master.
    fn restore(&mut self, loaded: Self::Loaded);
}
