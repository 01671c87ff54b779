//! The result of a backward pass.

use super::error::{Result, shape};
use super::value::Scaled;
use super::var::ScaledVar;
use std::collections::HashMap;

/// Gradients of the variables that a loss was computed from, each with a scale of its own.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// let used = ScaledVar::new("used", &Tensor::new(&[2f32, 4.0], &Device::Cpu)?)?;
/// let unused = ScaledVar::new("unused", &Tensor::new(&[1f32], &Device::Cpu)?)?;
/// let grads = used.value().sum_all()?.backward()?;
/// assert_eq!(grads.get(&used).unwrap().to_vec1()?, [1.0, 1.0]);
/// assert!(grads.get(&unused).is_none());
/// # Ok::<(), fp8_scaled::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ScaledGrads(HashMap<u64, Scaled>);

impl ScaledGrads {
    /// The gradient of `var`, None if the loss does not depend on it.
    pub fn get(&self, var: &ScaledVar) -> Option<&Scaled> {
        self.0.get(&var.id())
    }

    /// Removes and returns the gradient of `var`.
    pub fn remove(&mut self, var: &ScaledVar) -> Option<Scaled> {
        self.0.remove(&var.id())
    }

    /// Sets the gradient of `var`, for example to one reduced over ranks, and returns the old one.
    pub fn insert(&mut self, var: &ScaledVar, grad: Scaled) -> Option<Scaled> {
        self.0.insert(var.id(), grad.detach())
    }

    /// The sums of these gradients and those of another backward pass, by the rule of [`Scaled::add`], each then
    /// [rescaled](Scaled::dynamic_rescale_l2), so that the data of many sums stay in range. A variable with a gradient in only
    /// one of the two keeps that gradient.
    ///
    /// Each sum is rounded to the dtype of the gradients: over hundreds of micro-batches in f16 the later ones lose bits.
    ///
    /// # Errors
    /// If two gradients of a variable differ in shape or device; if a device fails.
    #[allow(clippy::should_implement_trait, reason = "it can fail")]
    pub fn add(mut self, other: Self) -> Result<Self> {
        for (id, grad) in other.0 {
            let grad = match self.0.remove(&id) {
                None => grad,
                // Broadcasting would hide that they belong to different variables.
                Some(sum) if sum.dims() != grad.dims() => {
                    return Err(shape(
                        "ScaledGrads::add",
                        "a gradient",
                        format!("{:?}, as the other", sum.dims()),
                        grad.dims(),
                    ));
                }
                Some(sum) => sum.add(&grad)?.dynamic_rescale_l2()?,
            };
            self.0.insert(id, grad);
        }
        Ok(self)
    }

    /// All gradients times a constant: `1 / n` for the mean of `n` micro-batches, their weights in a weighted sum. Powers of two
    /// change only the scales.
    ///
    /// # Errors
    /// As [`Scaled::mul_constant`].
    pub fn mul_constant(self, constant: f64) -> Result<Self> {
        let grads = self.0.into_iter();
        let grads = grads.map(|(id, grad)| Ok((id, grad.mul_constant(constant)?)));
        Ok(Self(grads.collect::<Result<_>>()?))
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
