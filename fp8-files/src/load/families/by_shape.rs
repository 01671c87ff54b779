//! Files without a configuration: the shapes of the scales and the presence of an `input_scale` decide.

use crate::error::Result;
use crate::load::family::Family;
use crate::load::family_name::FamilyName;
use crate::scheme::LayerScheme;
use std::path::Path;

/// Every layer that has a `weight_scale` is FP8. Its inputs have a static scale where there is an `input_scale`, else
/// one per token.
#[derive(Debug)]
pub(in crate::load) struct ByShape;

impl Family for ByShape {
    fn name(&self) -> FamilyName {
        FamilyName::ByShape
    }

    fn layer(&self, _: &str) -> Result<Option<LayerScheme>> {
        Ok(Some(LayerScheme::default()))
    }

    fn source(&self) -> Option<&Path> {
        None
    }
}
