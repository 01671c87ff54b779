//! FBGEMM: a scale per channel, inputs per token with an upper bound for their amax.

use super::modules::Modules;
use crate::error::Result;
use crate::load::family::{At, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::Granularity;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(in crate::load) struct Fbgemm {
    path: PathBuf,
    scheme: LayerScheme,
    modules: Modules,
}

impl Fbgemm {
    pub(in crate::load) fn parse(at: &At<'_>) -> Result<Self> {
        // The name says scale, but the number bounds the amax.
        let amax_bound = at.get("activation_scale_ub").positive()?;
        let mut modules = Modules::default();
        modules.add_lenient(&at.get("modules_to_not_convert"))?;
        Ok(Self {
            path: at.file(),
            scheme: LayerScheme {
                amax_bound,
                ..LayerScheme::new(Granularity::Rowwise, InputScheme::PerToken)
            },
            modules,
        })
    }
}

impl Family for Fbgemm {
    fn name(&self) -> FamilyName {
        FamilyName::Fbgemm
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        Ok((!self.modules.name(path)).then_some(self.scheme))
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
