//! FP8 values without scales: what a plain cast leaves, as of text encoders and diffusion models.

use crate::error::Result;
use crate::load::family::Family;
use crate::load::family_name::FamilyName;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::Granularity;
use std::path::Path;

/// Every code is its own value. Only where nothing in all files looks like a scale, and only if the caller says so.
#[derive(Debug)]
pub(in crate::load) struct PlainCast;

impl Family for PlainCast {
    fn name(&self) -> FamilyName {
        FamilyName::PlainCast
    }

    fn layer(&self, _: &str) -> Result<Option<LayerScheme>> {
        let scheme = LayerScheme::new(Granularity::Tensorwise, InputScheme::None);
        Ok(Some(scheme))
    }

    fn is_unscaled(&self) -> bool {
        true
    }

    fn source(&self) -> Option<&Path> {
        None
    }
}
