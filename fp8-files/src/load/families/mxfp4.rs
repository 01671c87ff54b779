//! `quant_method: "mxfp4"`, gpt-oss: experts in MXFP4, all else in high precision.
//!
//! The file has the codes and scales of all experts in one tensor each; `experts.rs` gives every projection of every expert its own.

use super::modules::Modules;
use crate::error::Result;
use crate::load::at::At;
use crate::load::family::{Declared, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::InputScheme;

impl FamilyName {
    /// gpt-oss: experts in MXFP4.
    pub const MXFP4: Self = Self::new("mxfp4 (gpt-oss)");
}

pub(super) fn parse(at: &At<'_>) -> Result<Family> {
    let modules = Modules::lenient(at, &["modules_to_not_convert"])?;
    let declared = Declared::mxfp4(InputScheme::None);
    let layer = move |path: &str| Ok((!modules.name(path)).then_some(declared));
    Ok(Family {
        packed_weights: &["weight"],
        ..Family::new(FamilyName::MXFP4, Some(at.path), layer)
    })
}
