//! sglang's `w8a8_fp8`: a scale per channel, inputs per token.

use super::modules::Modules;
use crate::error::Result;
use crate::load::family::{At, Family};
use crate::load::family_name::FamilyName;
use crate::scheme::{InputScheme, LayerScheme};
use fp8_core::Granularity;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(in crate::load) struct W8a8 {
    path: PathBuf,
    modules: Modules,
}

impl W8a8 {
    pub(in crate::load) fn parse(at: &At<'_>) -> Result<Self> {
        let mut modules = Modules::default();
        for key in ["ignored_layers", "modules_to_not_convert", "ignore"] {
            modules.add_lenient(&at.get(key))?;
        }
        let path = at.file();
        Ok(Self { path, modules })
    }
}

impl Family for W8a8 {
    fn name(&self) -> FamilyName {
        FamilyName::W8a8Fp8
    }

    fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        let scheme = LayerScheme::new(Granularity::Rowwise, InputScheme::PerToken);
        Ok((!self.modules.name(path)).then_some(scheme))
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
