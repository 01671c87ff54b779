//! Files without a configuration.

use crate::load::family::{Declared, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::InputScheme;
use fp8_core::Granularity;

/// Every layer with a `weight_scale` is FP8. The shape of the scale decides the granularity. Inputs have a static scale where there is
/// an `input_scale`, else one per token.
pub(in crate::load) fn by_shape() -> Family {
    Family::new(FamilyName::ByShape, None, |_| Ok(Some(Declared::default())))
}

/// FP8 values without scales, as a plain cast leaves them in text encoders and diffusion models. Used only if nothing in the files looks
/// like a scale and the caller allows it.
pub(in crate::load) fn plain_cast() -> Family {
    let declared = Declared::new(Granularity::Tensorwise, InputScheme::None);
    Family {
        is_unscaled: true,
        ..Family::new(FamilyName::PlainCast, None, move |_| Ok(Some(declared)))
    }
}
