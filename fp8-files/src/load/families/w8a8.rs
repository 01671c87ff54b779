//! sglang's `w8a8_fp8`: a scale per channel, inputs per token.

use super::modules::Modules;
use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::InputScheme;
use fp8_core::Granularity;

impl FamilyName {
    /// One scale per channel: sglang.
    pub const W8A8_FP8: Self = Self::new("w8a8_fp8");
}

pub(super) fn parse(at: &At<'_>) -> Result<Family> {
    let keys = ["ignored_layers", "modules_to_not_convert", "ignore"];
    let modules = Modules::lenient(at, &keys)?;
    let declared = Declared::new(Granularity::Rowwise, InputScheme::per_token());
    let layer = move |path: &str| Ok((!modules.name(path)).then_some(declared));
    Ok(Family::new(FamilyName::W8A8_FP8, Some(at.path), layer))
}
