//! FBGEMM: a scale per channel, inputs per token with an upper bound for their amax.

use super::modules::Modules;
use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::InputScheme;
use fp8_core::Granularity;

impl FamilyName {
    /// FBGEMM, with an upper bound for the amax of inputs.
    pub const FBGEMM: Self = Self::new("fbgemm_fp8");
}

pub(super) fn parse(at: &At<'_>) -> Result<Family> {
    let input = InputScheme::DynamicPerToken {
        power_of_two: false,
        // The name says scale, but the number bounds the amax.
        amax_bound: at.get("activation_scale_ub").positive()?,
    };
    let declared = Declared::new(Granularity::Rowwise, input);
    let modules = Modules::lenient(at, &["modules_to_not_convert"])?;
    let layer = move |path: &str| Ok((!modules.name(path)).then_some(declared));
    Ok(Family::new(FamilyName::FBGEMM, Some(at.path), layer))
}
