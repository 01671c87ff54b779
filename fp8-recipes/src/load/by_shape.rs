//! Files without a configuration: the shapes of the scales and the presence of an `input_scale` decide.

use super::family::Family;
use super::scheme::LayerScheme;
use crate::error::Result;
use std::path::Path;

/// Every layer that has a `weight_scale` is FP8. Its inputs have a static scale where there is an `input_scale`, else
/// one per token.
#[derive(Debug)]
pub(super) struct ByShape;

impl Family for ByShape {
    fn layer(&self, _: &str) -> Result<Option<LayerScheme>> {
        Ok(Some(LayerScheme {
            weight: None,
            input: None,
            power_of_two_inputs: false,
        }))
    }

    fn source(&self) -> Option<&Path> {
        None
    }
}
