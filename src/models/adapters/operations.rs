//! What can be done with the adapters of a model.

use super::Host;
use super::slots::Adapter;
use crate::models::error::Result;
use crate::nn::{LoraConfig, LoraUpdate};
use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_files::adapter::{AdapterConfig, AdapterFile, PREFIX, Targets, write_adapter};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::PoisonError;

/// A linear layer of the model.
struct Layer {
    path: String,
    /// Its path in PEFT's names.
    peft: String,
    features: (usize, usize),
}

fn layers(host: &mut dyn Host) -> Vec<Layer> {
    let layers = host.projections().into_iter();
    let layers: Vec<_> = layers
        .map(|layer| (layer.path().to_string(), layer.features()))
        .collect();
    let layers = layers.into_iter().map(|(path, features)| Layer {
        peft: host.peft_path(&path).to_string(),
        path,
        features,
    });
    layers.collect()
}

/// The layers that a configuration names; with `strict`, every target has to match a layer.
fn targeted(host: &mut dyn Host, config: &AdapterConfig, strict: bool) -> Result<Vec<Layer>> {
    let mut layers = layers(host);
    let paths: Vec<&str> = layers.iter().map(|layer| layer.peft.as_str()).collect();
    let found: Vec<String> = match strict {
        true => config.targeted(&paths)?,
        false => config.among(&paths)?,
    }
    .into_iter()
    .map(String::from)
    .collect();
    layers.retain(|layer| found.contains(&layer.peft));
    Ok(layers)
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
    let layers = targeted(host, config, true)?;
    let vb = vb.pp(PREFIX);
    let mut updates = BTreeMap::new();
    for layer in &layers {
        let own = lora_config(config, &layer.peft)?;
        let update = LoraUpdate::new(layer.features, own, vb.pp(&layer.peft))?;
        updates.insert(layer.path.clone(), update.with_path(layer.path.as_str()));
    }
    host.freeze();
    insert(host, name, config, updates)?;
    Ok(layers.into_iter().map(|layer| layer.path).collect())
}

/// Keeps an adapter and makes it the active one.
fn insert(
    host: &mut dyn Host,
    name: &str,
    config: &AdapterConfig,
    updates: BTreeMap<String, LoraUpdate>,
) -> Result<()> {
    host.adapters_mut().list.push(Adapter {
        name: name.to_string(),
        config: config.clone(),
        updates,
    });
    set(host, Some(name))
}

/// The matrices in an adapter's directory, by layer.
fn read(host: &mut dyn Host, dir: &Path) -> Result<(AdapterConfig, Vec<(Layer, [Tensor; 2])>)> {
    let file = AdapterFile::open(dir)?;
    let layers = targeted(host, file.config(), false)?;
    let absent = host.absent().iter().copied();
    let absent = absent.filter(|path| file.has(path));
    let present = layers.iter().map(|layer| layer.peft.as_str());
    file.check(present.chain(absent))?;
    let device = host.device();
    let read = layers.into_iter().map(|layer| {
        let matrices = file.matrices(&layer.peft, layer.features, DType::F32, device)?;
        Ok((layer, matrices))
    });
    let read = read.collect::<Result<_>>()?;
    Ok((file.config().clone(), read))
}

/// Adds the adapter in a directory, without gradients.
pub(crate) fn load(host: &mut dyn Host, name: &str, dir: &Path) -> Result<Vec<String>> {
    host.adapters().check_new(name)?;
    let (config, read) = read(host, dir)?;
    let mut updates = BTreeMap::new();
    for (layer, [a, b]) in read {
        let own = lora_config(&config, &layer.peft)?;
        let tensors = HashMap::from([
            ("lora_A.weight".to_string(), a),
            ("lora_B.weight".to_string(), b),
        ]);
        let vb = VarBuilder::from_tensors(tensors, DType::F32, host.device());
        let update = LoraUpdate::new(layer.features, own, vb)?;
        updates.insert(layer.path.clone(), update.with_path(layer.path.as_str()));
    }
    let paths = updates.keys().cloned().collect();
    insert(host, name, &config, updates)?;
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
    let (config, read) = read(host, dir)?;
    for (layer, [a, b]) in read {
        let mut vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        for (matrix, tensor) in [("lora_A", a), ("lora_B", b)] {
            let name = format!("{PREFIX}.{}.{matrix}.weight", layer.peft);
            vars.insert(name, Var::from_tensor(&tensor)?);
        }
    }
    let vb = VarBuilder::from_varmap(vars, DType::F32, host.device());
    add(host, name, &config, vb)
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
    let peft = |path: &str| host.peft_path(path).to_string();
    if config.targets == Targets::AllLinear {
        // As PEFT: its own model may have linear layers that this one lacks.
        config.targets = Targets::names(adapter.updates.keys().map(|path| peft(path)));
    }
    config.task = config.task.or_else(|| Some(host.task().to_string()));
    let matrices = adapter.updates.iter().map(|(path, update)| {
        let [a, b] = update.matrices();
        (peft(path), [a.clone(), b.clone()])
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
