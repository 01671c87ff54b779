//! The result of a backward pass.

use super::value::Scaled;
use super::var::ScaledVar;
use std::collections::HashMap;

/// Gradients of the variables that a loss was computed from, each with a scale of its own.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::scaled::ScaledVar;
/// let used = ScaledVar::new("used", &Tensor::new(&[2f32, 4.0], &Device::Cpu)?)?;
/// let unused = ScaledVar::new("unused", &Tensor::new(&[1f32], &Device::Cpu)?)?;
/// let grads = used.value().sum_all()?.backward()?;
/// assert_eq!(grads.get(&used).unwrap().to_vec1()?, [1.0, 1.0]);
/// assert!(grads.get(&unused).is_none());
/// # Ok::<(), fp8_candle::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ScaledGrads(HashMap<u64, Scaled>);

impl ScaledGrads {
    /// The gradient of `var`, None if the loss does not depend on it.
    pub fn get(&self, var: &ScaledVar) -> Option<&Scaled> {
        self.0.get(&var.id())
    }

    /// Takes out the gradient of `var`.
    pub fn remove(&mut self, var: &ScaledVar) -> Option<Scaled> {
        self.0.remove(&var.id())
    }

    /// Puts in another gradient for `var`, reduced over ranks for example, and gives back the old one.
    pub fn insert(&mut self, var: &ScaledVar, grad: Scaled) -> Option<Scaled> {
        self.0.insert(var.id(), grad.detach())
    }

    /// How many variables have a gradient.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no variable has a gradient.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn insert_id(&mut self, id: u64, grad: Scaled) {
        self.0.insert(id, grad);
    }
}
