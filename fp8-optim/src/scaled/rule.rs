//! Formulas in units of scales.

use super::super::rule::{MAX_MOMENTS, Moment, Rates, Rule};
use super::size::value;
use fp8_scaled::Scale;

/// A tensor of data and a scale, as far as the choice of new scales needs to know it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extent {
    /// What data are multiplied by to give values.
    pub dequant_scale: Scale,
    /// The largest magnitude of the data.
    pub amax: f64,
}

impl Extent {
    pub(crate) const ZERO: Self = Self {
        dequant_scale: Scale::ZERO,
        amax: 0.0,
    };

    /// The value of 1 in the data.
    pub(crate) fn unit(&self) -> f64 {
        value(self.dequant_scale)
    }

    /// The largest magnitude of the values.
    pub(crate) fn size(&self) -> f64 {
        self.amax * self.unit()
    }
}

/// What a [`ScaledRule`] plans a step from.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// The parameter.
    pub parameter: Extent,
    /// The gradient, not clipped.
    pub grad: Extent,
    /// The moments, in the order of [`ScaledRule::SCALED_MOMENTS`].
    pub moments: [Extent; MAX_MOMENTS],
}

/// The scales after a step, and the update of one element in units of the scales before and after it.
pub struct ScaledPlan<F> {
    /// The scale of the parameter's new data.
    pub(super) parameter: Scale,
    /// The scales of the moments' new data.
    pub(super) moments: [Scale; MAX_MOMENTS],
    /// From the data of value, gradient (not clipped) and moments to the new data.
    pub(super) formula: F,
}

impl<F: Fn(f32, f32, &mut [f32]) -> f32 + Copy + Sync> ScaledPlan<F> {
    pub(crate) fn new(parameter: Scale, moments: [Scale; MAX_MOMENTS], formula: F) -> Self {
        Self {
            parameter,
            moments,
            formula,
        }
    }
}

/// The formula of a rule for scaled parameters: data and moments of 16 bits, each with a scale.
pub trait ScaledRule: Rule {
    /// The name of the optimizer of scaled parameters in a state.
    const SCALED_KIND: &'static str;
    /// The moments of scaled parameters, as many as [`Rule::MOMENTS`].
    const SCALED_MOMENTS: &'static [Moment];

    /// Chooses new scales from bounds on the new values, and makes the formula in their units.
    fn scaled_plan(
        &self,
        at: &Rates,
        extents: Extents,
    ) -> ScaledPlan<impl Fn(f32, f32, &mut [f32]) -> f32 + Copy + Sync>;
}
