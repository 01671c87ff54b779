//! The adapters that a model holds.

use crate::models::error::{Error, Result};
use crate::models::layers::DropoutSeed;
use crate::nn::{Linear, LoraUpdate};
use fp8_files::adapter::{AdapterConfig, Naming};
use std::collections::BTreeMap;

/// One adapter.
#[derive(Debug)]
pub(super) struct Adapter {
    pub(super) name: String,
    pub(super) config: AdapterConfig,
    pub(super) naming: Naming,
    /// By the path of the layer.
    pub(super) updates: BTreeMap<String, LoraUpdate>,
    /// The layers that it replaces, by path.
    pub(super) saved: BTreeMap<String, Linear>,
}

/// All adapters of a model, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    pub(super) list: Vec<Adapter>,
    /// The name of the active one.
    pub(super) active: Option<String>,
    pub(super) seed: DropoutSeed,
}

impl Adapters {
    /// Their names.
    pub(crate) fn names(&self) -> Vec<&str> {
        let names = self.list.iter().map(|adapter| adapter.name.as_str());
        names.collect()
    }

    /// The name of the active one.
    pub(crate) fn active(&self) -> Option<&str> {
        self.active.as_deref()
    }

    /// The configuration of one of them.
    pub(crate) fn config(&self, name: &str) -> Result<&AdapterConfig> {
        Ok(&self.get(name)?.config)
    }

    /// Sets the seed of dropout.
    pub(crate) fn set_dropout_seed(&self, seed: Option<u64>) {
        self.seed.set(seed);
    }

    pub(super) fn get(&self, name: &str) -> Result<&Adapter> {
        let mut list = self.list.iter();
        list.find(|adapter| adapter.name == name)
            .ok_or_else(|| Error::NoAdapter {
                name: name.to_string(),
                adapters: self.names().join(", "),
            })
    }

    pub(super) fn check_new(&self, name: &str) -> Result<()> {
        match self.get(name) {
            Ok(_) => Err(Error::AdapterExists {
                name: name.to_string(),
            }),
            Err(_) => Ok(()),
        }
    }
}
