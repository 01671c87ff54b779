//! Files without a configuration.

use crate::load::family::{Declared, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::InputScheme;
use fp8_core::Granularity;

impl FamilyName {
    /// FP8 weights and scales without a configuration: shapes decide how layers are stored.
    pub const BY_SHAPE: Self = Self::new("fp8 without a configuration");

    /// FP8 values without scales.
    pub const PLAIN_CAST: Self = Self::new("fp8 values without scales");
}

/// Every layer with a `weight_scale` is FP8. The shape of the scale decides the granularity. Inputs have a static scale where there is
/// an `input_scale`, else one per token.
pub(in crate::load) fn by_shape() -> Family {
    Family::new(FamilyName::BY_SHAPE, None, |_| {
        Ok(Some(Declared::default()))
    })
}

/// FP8 values without scales, as a plain cast leaves them in text encoders and diffusion models. Used only if nothing in the files looks
/// like a scale and the caller allows it.
pub(in crate::load) fn plain_cast() -> Family {
    let declared = Declared::new(Granularity::Tensorwise, InputScheme::None);
    Family {
        is_unscaled: true,
        ..Family::new(FamilyName::PLAIN_CAST, None, move |_| Ok(Some(declared)))
    }
}

/// Files whose configuration cannot be read: tensors are recognized by all names of all families.
pub(in crate::load) fn unknown() -> Family {
    Family {
        weight_scales: WEIGHT_SCALES,
        input_scales: INPUT_SCALES,
        ..by_shape()
    }
}

/// The names of a weight's scale in all families, after the path of the layer.
pub(in crate::load) const WEIGHT_SCALES: &[&str] = &[
    "weight_scale",
    "weight_scale_inv",
    "scale_weight",
    "qscale_weight",
    "_weight_scale",
    "scales",
];

/// The names of the scale of a layer's inputs in all families, after its path.
pub(in crate::load) const INPUT_SCALES: &[&str] = &[
    "input_scale",
    "activation_scale",
    "act_scale",
    "scale_input",
    "qscale_act",
];
