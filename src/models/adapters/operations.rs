//! The operations on the adapters of a model.

use super::Host;
use super::slots::{Adapter, named};
use crate::models::error::{Error, Result};
use crate::models::layers::Change;
use crate::nn::{Linear, LoraConfig, LoraUpdate, linear_b};
use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_files::adapter::{
    AdapterConfig, AdapterError, AdapterFile, Naming, PREFIX, Targets, write_adapter_with,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::PoisonError;

/// A linear layer of the model.
struct Layer {
    path: String,
    features: (usize, usize),
    bias: bool,
}

/// What an adapter does to layers, by path.
#[derive(Default)]
struct Changes {
    updates: BTreeMap<String, LoraUpdate>,
    saved: BTreeMap<String, Linear>,
    /// In the order of the model.
    paths: Vec<String>,
}

impl Changes {
    fn update(&mut self, path: &str, update: LoraUpdate) {
        let update = update.with_path(path);
        self.paths.push(path.to_string());
        self.updates.insert(path.to_string(), update);
    }

    fn save(&mut self, path: &str, layer: Linear) {
        let layer = layer.with_path(path);
        self.paths.push(path.to_string());
        self.saved.insert(path.to_string(), layer);
    }
}

fn layers(host: &mut dyn Host) -> Vec<Layer> {
    let layers = host.projections().into_iter().map(|layer| Layer {
        path: layer.path().to_string(),
        features: layer.features(),
        bias: layer.has_bias(),
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
    let layers = layers.filter(|(_, own)| targeted.contains(&own.as_str()) || config.is_saved(own));
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
    let mut changes = Changes::default();
    for (layer, own) in layers {
        let (path, (out_features, in_features)) = (&layer.path, layer.features);
        if config.is_saved(&own) {
            let saved = linear_b(in_features, out_features, layer.bias, vb.pp(&own))?;
            changes.save(path, saved);
            continue;
        }
        let update = LoraUpdate::new(layer.features, lora_config(config, &own)?, vb.pp(&own))?;
        changes.update(path, update);
    }
    let adapters = host.adapters();
    adapters.check_own(name, &changes.updates)?;
    adapters.check_unmerged(name, config, named(naming, &changes.updates))?;
    host.freeze();
    insert(host, name, config, naming, changes)
}

/// Keeps an adapter and makes it the active one. Returns the paths of its layers.
fn insert(
    host: &mut dyn Host,
    name: &str,
    config: &AdapterConfig,
    naming: Naming,
    changes: Changes,
) -> Result<Vec<String>> {
    host.adapters_mut().list.push(Adapter {
        name: name.to_string(),
        config: config.clone(),
        naming,
        updates: changes.updates,
        saved: changes.saved,
        merged: false,
    });
    set(host, Some(name))?;
    Ok(changes.paths)
}

/// The adapter in a directory.
struct Read {
    config: AdapterConfig,
    naming: Naming,
    /// The layers that it changes, each with its path in the adapter and what it holds.
    layers: Vec<(Layer, String, Held)>,
}

/// What an adapter's file holds of a layer.
enum Held {
    /// A and B.
    Update([Tensor; 2]),
    /// Weight and bias of the layer that replaces it.
    Saved(Tensor, Option<Tensor>),
}

impl Held {
    /// By the names that they have in the file, after the layer's path.
    fn tensors(self) -> Vec<(&'static str, Tensor)> {
        match self {
            Self::Update([a, b]) => vec![("lora_A.weight", a), ("lora_B.weight", b)],
            Self::Saved(weight, bias) => {
                let bias = bias.map(|bias| ("bias", bias));
                [("weight", weight)].into_iter().chain(bias).collect()
            }
        }
    }
}

fn read(host: &mut dyn Host, name: &str, dir: &Path) -> Result<Read> {
    let file = AdapterFile::open(dir)?;
    // Only after all checks does the model get the layers that it could have but lacks.
    check(host, name, &file)?;
    host.make_room(file.saved(), &file.config().labels)?;
    let all = layers(host);
    let paths: Vec<&str> = all.iter().map(|layer| layer.path.as_str()).collect();
    let naming = file.naming(&paths);
    let targeted = file.layers(&paths)?;
    let targeted: BTreeSet<String> = targeted.into_iter().map(|(_, own)| own).collect();
    let mut held = vec![];
    for mut layer in all {
        let own = naming.of(&layer.path);
        let saved = file.saved().iter().find(|saved| saved.path == own);
        if let Some(saved) = saved {
            layer.bias = saved.bias;
            let (weight, bias) = file.saved_layer(saved, DType::F32, host.device())?;
            held.push((layer, own, Held::Saved(weight, bias)));
        } else if targeted.contains(&own) {
            let matrices = file.matrices(&own, layer.features, DType::F32, host.device())?;
            held.push((layer, own, Held::Update(matrices)));
        }
    }
    Ok(Read {
        layers: held,
        naming,
        config: file.config().clone(),
    })
}

/// Fails if the adapter does not fit the layers of the model, or if the weights have its updates.
fn check(host: &mut dyn Host, name: &str, file: &AdapterFile) -> Result<()> {
    let all = layers(host);
    let paths: Vec<&str> = all.iter().map(|layer| layer.path.as_str()).collect();
    let naming = file.naming(&paths);
    let features: BTreeMap<String, (usize, usize)> = (all.iter())
        .map(|layer| (naming.of(&layer.path), layer.features))
        .collect();
    let mut updates = vec![];
    for (_, own) in file.layers(&paths)? {
        if let Some(features) = features.get(&own) {
            file.check_sizes(&own, *features)?;
            updates.push((own, *features));
        }
    }
    for saved in file.saved().iter().filter(|saved| !host.takes(saved)) {
        let tensor = format!("{PREFIX}.{}.weight", saved.path);
        let Some(features) = features.get(&saved.path) else {
            let (path, extra) = (file.path().to_path_buf(), vec![tensor]);
            return Err(crate::FilesError::from(AdapterError::Extra { path, extra }).into());
        };
        if saved.sizes != *features {
            return Err(crate::FilesError::TensorShape {
                tensor,
                got: vec![saved.sizes.0, saved.sizes.1],
                expected: format!("{features:?}, as the base has it"),
            }
            .into());
        }
    }
    // A layer that is replaced has no update.
    updates.retain(|(own, _)| file.saved().iter().all(|saved| saved.path != *own));
    let updates = updates
        .into_iter()
        .map(|(own, features)| -> fp8_files::Result<_> {
            let matrices = file.matrices(&own, features, DType::F32, host.device())?;
            Ok((own, matrices))
        });
    let adapters = host.adapters();
    adapters.check_unmerged(name, file.config(), updates)
}

/// Adds the adapter in a directory, without gradients.
pub(crate) fn load(host: &mut dyn Host, name: &str, dir: &Path) -> Result<Vec<String>> {
    host.adapters().check_new(name)?;
    let read = read(host, name, dir)?;
    let mut changes = Changes::default();
    for (layer, own, held) in read.layers {
        match held {
            Held::Saved(weight, bias) => changes.save(&layer.path, Linear::new(weight, bias)),
            held @ Held::Update(_) => {
                let tensors = held.tensors().into_iter();
                let tensors: HashMap<String, Tensor> = tensors
                    .map(|(name, tensor)| (name.into(), tensor))
                    .collect();
                let vb = VarBuilder::from_tensors(tensors, DType::F32, host.device());
                let config = lora_config(&read.config, &own)?;
                changes.update(&layer.path, LoraUpdate::new(layer.features, config, vb)?);
            }
        }
    }
    let (config, naming) = (&read.config, read.naming);
    let adapters = host.adapters();
    adapters.check_unmerged(name, config, named(naming, &changes.updates))?;
    insert(host, name, config, naming, changes)
}

/// Adds the adapter in a directory, with its matrices as new variables of `vars`.
pub(crate) fn load_trainable(
    host: &mut dyn Host,
    name: &str,
    dir: &Path,
    vars: &VarMap,
) -> Result<Vec<String>> {
    host.adapters().check_new(name)?;
    let read = read(host, name, dir)?;
    let (mut layers, mut new) = (vec![], BTreeMap::new());
    for (layer, own, held) in read.layers {
        for (end, tensor) in held.tensors() {
            new.insert(format!("{PREFIX}.{own}.{end}"), Var::from_tensor(&tensor)?);
        }
        layers.push((layer, own));
    }
    let names: Vec<String> = new.keys().cloned().collect();
    {
        let mut vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(variable) = names.iter().find(|&name| vars.contains_key(name)) {
            return Err(Error::AdapterVariable {
                name: name.to_string(),
                variable: variable.clone(),
            });
        }
        vars.extend(new);
    }
    let vb = VarBuilder::from_varmap(vars, DType::F32, host.device());
    let added = add_to(host, name, &read.config, read.naming, layers, vb);
    if added.is_err() {
        let mut vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        vars.retain(|name, _| !names.contains(name));
    }
    added
}

/// Makes an adapter the active one, or none.
pub(crate) fn set(host: &mut dyn Host, name: Option<&str>) -> Result<()> {
    let adapters = host.adapters();
    let seed = adapters.seed.clone();
    let (updates, mut saved) = match name {
        None => Default::default(),
        Some(name) => {
            let adapter = adapters.get(name)?;
            adapter.check_unmerged()?;
            (adapter.updates.clone(), adapter.saved.clone())
        }
    };
    host.adapters_mut().active = name.map(String::from);
    for layer in host.projections() {
        let update = updates.get(layer.path()).cloned();
        let update = update.map(|update| Change::Update(update, seed.clone()));
        let saved = saved.remove(layer.path()).map(Change::Replace);
        layer.change(saved.or(update));
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
        // As in PEFT, whose model may have linear layers that this one lacks.
        config.targets = Targets::names(adapter.updates.keys().map(|path| naming.of(path)));
    }
    config.task = config.task.or_else(|| Some(host.task().to_string()));
    let matrices = adapter.updates.iter().map(|(path, update)| {
        let [a, b] = update.matrices();
        (naming.of(path), [a.clone(), b.clone()])
    });
    let saved = adapter.saved.iter().map(|(path, layer)| {
        let tensors = (layer.weight()?, layer.bias().cloned());
        Ok((naming.of(path), tensors))
    });
    let saved: Vec<_> = saved.collect::<Result<_>>()?;
    Ok(write_adapter_with(dir, &config, matrices, saved)?)
}

/// Adds an adapter to the weights of the base, and forgets it.
pub(crate) fn merge(host: &mut dyn Host, name: &str) -> Result<()> {
    let adapters = host.adapters();
    let adapter = adapters.get(name)?;
    adapter.check_unmerged()?;
    let (updates, saved) = (adapter.updates.clone(), adapter.saved.clone());
    let identity = adapter.identity()?;
    let mut equal = vec![];
    for other in adapters.list.iter().filter(|_| identity.is_some()) {
        if other.identity()? == identity {
            equal.push(other.name.clone());
        }
    }
    let dtype = host.dtype();
    let (mut done, mut outcome) = (vec![], Ok(()));
    for layer in host.projections() {
        let path = layer.path().to_string();
        outcome = match (updates.get(&path), saved.get(&path)) {
            (Some(update), _) => layer.merge(update, dtype),
            (None, Some(saved)) => layer.set_base(saved, dtype),
            (None, None) => continue,
        };
        if outcome.is_err() {
            break;
        }
        done.push(path);
    }
    let active = host.adapters().active().map(String::from);
    if let Err(error) = outcome {
        // What is in the weights must not count a second time, in results or in another merge.
        let list = &mut host.adapters_mut().list;
        let whole = list.iter_mut().filter(|adapter| adapter.name == name);
        for adapter in whole {
            adapter.updates.retain(|path, _| !done.contains(path));
            adapter.saved.retain(|path, _| !done.contains(path));
        }
        // Equal adapters have all their updates, also those that are in the weights. This one has only the rest, and may be merged again.
        let counted = done.iter().any(|path| updates.contains_key(path));
        equal.retain(|other| counted && other != name);
        if counted {
            host.adapters_mut().note_merged(identity, &equal);
        }
        let active = active.filter(|active| !equal.contains(active));
        set(host, active.as_deref())?;
        return Err(error.into());
    }
    if active.is_some_and(|active| equal.contains(&active)) {
        set(host, None)?;
    }
    host.adapters_mut().note_merged(identity, &equal);
    remove(host, name)
}
