//! The adapters that a model holds.

use crate::models::error::{Error, Result};
use crate::models::layers::DropoutSeed;
use crate::nn::{Linear, LoraUpdate};
use candle_core::{Tensor, TensorId};
use fp8_files::Result as FilesResult;
use fp8_files::adapter::{AdapterConfig, Naming, identity};
use std::collections::{BTreeMap, HashSet};

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
    /// Whether the weights have its updates already, those of an equal adapter.
    pub(super) merged: bool,
}

impl Adapter {
    /// What tells its updates from those of others.
    pub(super) fn identity(&self) -> Result<Option<String>> {
        Ok(identity(&self.config, named(self.naming, &self.updates))?)
    }

    /// Fails if its updates would count twice.
    pub(super) fn check_unmerged(&self) -> Result<()> {
        match self.merged {
            true => Err(Error::AdapterMerged {
                name: self.name.clone(),
            }),
            false => Ok(()),
        }
    }
}

/// The matrices of updates, which are given by the path of the layer, by its path in the adapter.
pub(super) fn named(
    naming: Naming,
    updates: &BTreeMap<String, LoraUpdate>,
) -> impl Iterator<Item = FilesResult<(String, [Tensor; 2])>> {
    updates.iter().map(move |(path, update)| {
        let matrices = update.matrices().map(Clone::clone);
        Ok((naming.of(path), matrices))
    })
}

/// All adapters of a model, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    pub(super) list: Vec<Adapter>,
    /// The name of the active one.
    pub(super) active: Option<String>,
    pub(super) seed: DropoutSeed,
    /// The identities of those whose updates the weights have.
    merged: Vec<String>,
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

    /// Sets the identities of the adapters whose updates the weights have from the file.
    pub(crate) fn set_merged(&mut self, identities: Vec<String>) {
        self.merged = identities;
    }

    /// Notes that the weights have the updates of this identity, and with them those of the adapters `equal`.
    pub(super) fn note_merged(&mut self, identity: Option<String>, equal: &[String]) {
        self.merged.extend(identity);
        for adapter in &mut self.list {
            adapter.merged |= equal.contains(&adapter.name);
        }
    }

    /// Fails if these updates of a new adapter, by the layer's path in it, are in the weights.
    pub(super) fn check_unmerged(
        &self,
        name: &str,
        config: &AdapterConfig,
        updates: impl IntoIterator<Item = FilesResult<(String, [Tensor; 2])>>,
    ) -> Result<()> {
        if self.merged.is_empty() {
            return Ok(());
        }
        let identity = identity(config, updates)?;
        match identity.is_some_and(|identity| self.merged.contains(&identity)) {
            true => Err(Error::AdapterMerged {
                name: name.to_string(),
            }),
            false => Ok(()),
        }
    }

    /// Fails if an adapter has matrices of these updates of a new one: training one would change the other.
    pub(super) fn check_own(
        &self,
        name: &str,
        updates: &BTreeMap<String, LoraUpdate>,
    ) -> Result<()> {
        let others = self.list.iter().flat_map(|other| other.updates.values());
        let theirs: HashSet<TensorId> = others
            .flat_map(|update| update.matrices().map(Tensor::id))
            .collect();
        for (path, update) in updates {
            if update
                .matrices()
                .iter()
                .any(|matrix| theirs.contains(&matrix.id()))
            {
                return Err(Error::AdapterVariable {
                    name: name.to_string(),
                    variable: path.clone(),
                });
            }
        }
        Ok(())
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
