//! What can be done with the adapters of a model.

use super::Host;
use super::slots::Adapter;
use crate::models::error::Result;
use crate::nn::{LoraConfig, LoraUpdate};
use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_files::adapter::{AdapterConfig, AdapterFile, Naming, PREFIX, Targets, write_adapter};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::PoisonError;

/// A linear layer of the model.
struct Layer {
    path: String,
    features: (usize, usize),
}

fn layers(host: &mut dyn Host) -> Vec<Layer> {
    let layers = host.projections().into_iter().map(|layer| Layer {
        path: layer.path().to_string(),
        features: layer.features(),
    });
    layers.collect()
}

fn lora_config(config: &AdapterConfig, path: &str) -> Result<LoraConfig> {
    Ok(LoraConfig::new(config.rank_of(path)?)
        .with_alpha(config.alpha_of(path)?)
        .with_rslora(config.rslora)
        .with_dropout(config.dropout))
}

/// Adds an adapter whose matrices are variables of `vb`, makes it the active one and freezes the base.
pub(crate) fn add(
    host: &mut dyn Host,
    name: &str,
    config: &AdapterConfig,
    vb: VarBuilder<'_>,
) -> Result<Vec<String>> {
    host.adapters().check_new(name)?;
    let naming = host.naming();
    let layers = layers(host);
    let own: Vec<String> = layers.iter().map(|layer| naming.of(&layer.path)).collect();
    let paths: Vec<&str> = own.iter().map(String::as_str).collect();
    let targeted = config.targeted(&paths)?;
    let layers = layers.into_iter().zip(own.clone());
    let layers = layers.filter(|(_, own)| targeted.contains(&own.as_str()));
    add_to(host, name, config, naming, layers, vb)
}

/// Adds an adapter to the given layers, each with its path in the adapter.
fn add_to(
    host: &mut dyn Host,
    name: &str,
    config: &AdapterConfig,
    naming: Naming,
    layers: impl IntoIterator<Item = (Layer, String)>,
    vb: VarBuilder<'_>,
) -> Result<Vec<String>> {
    let vb = vb.pp(PREFIX);
    let (mut updates, mut paths) = (BTreeMap::new(), vec![]);
    for (Layer { path, features }, own) in layers {
        let update = LoraUpdate::new(features, lora_config(config, &own)?, vb.pp(&own))?;
        updates.insert(path.clone(), update.with_path(path.as_str()));
        paths.push(path);
    }
    host.freeze();
    insert(host, name, config, naming, updates)?;
    Ok(paths)
}

/// Keeps an adapter and makes it the active one.
fn insert(
    host: &mut dyn Host,
    name: &str,
    config: &AdapterConfig,
    naming: Naming,
    updates: BTreeMap<String, LoraUpdate>,
) -> Result<()> {
    host.adapters_mut().list.push(Adapter {
        name: name.to_string(),
        config: config.clone(),
        naming,
        updates,
    });
    set(host, Some(name))
}

/// The adapter in a directory.
struct Read {
    config: AdapterConfig,
    naming: Naming,
    /// The layers that it changes, each with its path in the adapter and its matrices.
    layers: Vec<(Layer, String, [Tensor; 2])>,
}

fn read(host: &mut dyn Host, dir: &Path) -> Result<Read> {
    let file = AdapterFile::open(dir)?;
    let mut all = layers(host);
    let paths: Vec<String> = all.iter().map(|layer| layer.path.clone()).collect();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let targeted: BTreeMap<&str, String> = file.layers(&paths)?.into_iter().collect();
    all.retain(|layer| targeted.contains_key(layer.path.as_str()));
    let layers = all.into_iter().map(|layer| {
        let own = targeted[layer.path.as_str()].clone();
        let matrices = file.matrices(&own, layer.features, DType::F32, host.device())?;
        Ok((layer, own, matrices))
    });
    Ok(Read {
        layers: layers.collect::<Result<_>>()?,
        naming: file.naming(&paths),
        config: file.config().clone(),
    })
}

/// Adds the adapter in a directory, without gradients.
pub(crate) fn load(host: &mut dyn Host, name: &str, dir: &Path) -> Result<Vec<String>> {
    host.adapters().check_new(name)?;
    let read = read(host, dir)?;
    let (mut updates, mut paths) = (BTreeMap::new(), vec![]);
    for (Layer { path, features }, own, [a, b]) in read.layers {
        let tensors = HashMap::from([
            ("lora_A.weight".to_string(), a),
            ("lora_B.weight".to_string(), b),
        ]);
        let vb = VarBuilder::from_tensors(tensors, DType::F32, host.device());
        let update = LoraUpdate::new(features, lora_config(&read.config, &own)?, vb)?;
        updates.insert(path.clone(), update.with_path(path.as_str()));
        paths.push(path);
    }
    insert(host, name, &read.config, read.naming, updates)?;
    Ok(paths)
}

/// Adds the adapter in a directory, with its matrices as new variables of `vars`.
pub(crate) fn load_trainable(
    host: &mut dyn Host,
    name: &str,
    dir: &Path,
    vars: &VarMap,
) -> Result<Vec<String>> {
    host.adapters().check_new(name)?;
    let read = read(host, dir)?;
    let mut layers = vec![];
    for (layer, own, [a, b]) in read.layers {
        let mut vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        for (matrix, tensor) in [("lora_A", a), ("lora_B", b)] {
            let name = format!("{PREFIX}.{own}.{matrix}.weight");
            vars.insert(name, Var::from_tensor(&tensor)?);
        }
        layers.push((layer, own));
    }
    let vb = VarBuilder::from_varmap(vars, DType::F32, host.device());
    add_to(host, name, &read.config, read.naming, layers, vb)
}

/// Makes an adapter the active one; None: none.
pub(crate) fn set(host: &mut dyn Host, name: Option<&str>) -> Result<()> {
    let adapters = host.adapters();
    let seed = adapters.seed.clone();
    let updates = match name {
        None => BTreeMap::new(),
        Some(name) => adapters.get(name)?.updates.clone(),
    };
    host.adapters_mut().active = name.map(String::from);
    for layer in host.projections() {
        let update = updates.get(layer.path()).cloned();
        layer.set_update(update.map(|update| (update, seed.clone())));
    }
    Ok(())
}

/// Forgets an adapter.
pub(crate) fn remove(host: &mut dyn Host, name: &str) -> Result<()> {
    host.adapters().get(name)?;
    if host.adapters().active() == Some(name) {
        set(host, None)?;
    }
    let list = &mut host.adapters_mut().list;
    list.retain(|adapter| adapter.name != name);
    Ok(())
}

/// Writes an adapter as PEFT does.
pub(crate) fn save(host: &dyn Host, name: &str, dir: &Path) -> Result<()> {
    let adapter = host.adapters().get(name)?;
    let mut config = adapter.config.clone();
    let naming = adapter.naming;
    if config.targets == Targets::AllLinear {
        // As PEFT: its own model may have linear layers that this one lacks.
        config.targets = Targets::names(adapter.updates.keys().map(|path| naming.of(path)));
    }
    config.task = config.task.or_else(|| Some(host.task().to_string()));
    let matrices = adapter.updates.iter().map(|(path, update)| {
        let [a, b] = update.matrices();
        (naming.of(path), [a.clone(), b.clone()])
    });
    Ok(write_adapter(dir, &config, matrices)?)
}

/// Adds an adapter to the weights of the base, and forgets it.
pub(crate) fn merge(host: &mut dyn Host, name: &str) -> Result<()> {
    let updates = host.adapters().get(name)?.updates.clone();
    let dtype = host.dtype();
    for layer in host.projections() {
        if let Some(update) = updates.get(layer.path()) {
            layer.merge(update, dtype)?;
        }
    }
    remove(host, name)
}
