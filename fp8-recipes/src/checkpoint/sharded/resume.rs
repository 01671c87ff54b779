//! Resuming from a checkpoint in parts.

use super::super::fp8;
use super::super::meta::{OPTIMIZER, PREFIX, TrainingMeta, meta_of, mismatch, recipe_text};
use super::super::prepared::prepared_layers;
use super::super::resume::{announce, optimizer_state};
use super::index::Index;
use super::parts::with_tensors;
use crate::config::Recipe;
use crate::error::Result;
use crate::module::Fp8Module;
use crate::optim::ResumableOptimizer;
use crate::warning::warn_of_lost_scaler;
use candle_core::{DType, Device, Tensor};
use fp8_files::SafetensorsFile;
use fp8_ranks::ShardedVarMap;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Restores a checkpoint of [`save_sharded`](super::save_sharded) into a model that was built and prepared like the saved one, on any number
/// of ranks: the run continues with the same values, optimizer and FP8 state, to the bit. All ranks call it. Nothing is changed unless
/// the whole checkpoint fits on all ranks.
///
/// # Errors
/// As [`resume_training`](super::super::resume_training); those of the group. An error on one rank ends the job of all.
pub fn resume_sharded<M: Fp8Module + ?Sized, O: ResumableOptimizer + ?Sized>(
    dir: impl AsRef<Path>,
    model: &M,
    map: &ShardedVarMap,
    optimizer: &mut O,
    recipe: Option<&Recipe>,
) -> Result<TrainingMeta> {
    let (dir, group) = (dir.as_ref(), map.group());
    let end_of_all = |error: &crate::Error| {
        group.give_up(error);
    };
    let read = read(dir, map, recipe).inspect_err(end_of_all)?;
    let layers = prepared_layers(model);
    let fits = || match read.fp8.other_recipe(dir, &layers) {
        Some(error) => Err(error),
        None => read.fp8.check(dir, &layers),
    };
    fits().inspect_err(end_of_all)?;
    // The others fit too.
    group.barrier()?;
    if group.rank() == 0 {
        warn_of_lost_scaler(dir, &read.optimizer, optimizer);
    }
    let mut set = || -> Result<()> {
        optimizer.load_optimizer_state(&read.optimizer)?;
        for var in map.vars() {
            if let Some(own) = read.parameters.get(var.name()) {
                var.set_shard(&own.to_device(map.device())?)?;
            }
        }
        announce(&layers, optimizer.announces_changes());
        read.fp8.restore(&layers)
    };
    set().inspect_err(end_of_all)?;
    group.barrier()?;
    Ok(read.meta)
}

/// The part of a checkpoint that this rank needs.
struct Read {
    meta: TrainingMeta,
    parameters: BTreeMap<String, Tensor>,
    optimizer: crate::optim::OptimizerState,
    fp8: fp8::StoredState,
}

/// Elements in a file that lie in a range of the whole.
#[derive(Default)]
struct Pieces {
    tensors: Vec<Tensor>,
    elements: usize,
}

impl Pieces {
    /// Adds the elements of `stored`, which are at `place` in the whole, that lie in `wanted`.
    fn add(&mut self, stored: &Tensor, place: &Range<usize>, wanted: &Range<usize>) -> Result<()> {
        let begin = place.start.max(wanted.start);
        let end = place.end.min(wanted.end);
        let piece = stored.narrow(0, begin - place.start, end - begin)?;
        // A view would hold the whole file's tensor.
        self.tensors.push(piece.copy()?);
        self.elements += end - begin;
        Ok(())
    }

    fn joined(self) -> Result<Tensor> {
        match self.elements {
            0 => Ok(Tensor::zeros(0, DType::F32, &Device::Cpu)?),
            _ => Ok(Tensor::cat(&self.tensors, 0)?),
        }
    }
}

fn read(dir: &Path, map: &ShardedVarMap, recipe: Option<&Recipe>) -> Result<Read> {
    let index = Index::read(dir)?;
    index.check(dir, map)?;
    let first_path = dir.join(&index.files[0]);
    let first = SafetensorsFile::open(&first_path)?;
    let meta = meta_of(&first)?;
    if meta.recipe.as_ref() != recipe {
        let (found, expected) = (recipe_text(meta.recipe.as_ref()), recipe_text(recipe));
        return Err(mismatch(&first_path, "the recipe", found, expected));
    }
    let mut fp8_tensors = BTreeMap::new();
    let mut others = vec![];
    for name in first.names() {
        if name.starts_with(PREFIX) {
            fp8_tensors.insert(name.clone(), first.tensor(&name, &Device::Cpu)?);
        } else if let Some(own) = name.strip_prefix(OPTIMIZER)
            && moment_of(own, &index).is_none()
        {
            others.push((own.to_string(), first.tensor(&name, &Device::Cpu)?));
        }
    }
    let fp8 = fp8::take(&first_path, &mut fp8_tensors, fp8::rows_of(&first)?)?;
    let rank = map.group().rank();
    let held = map
        .vars()
        .into_iter()
        .filter(|var| var.shard().elem_count() > 0);
    let wanted: BTreeMap<String, Range<usize>> = held
        .map(|var| (var.name().to_string(), var.layout().range(rank)))
        .collect();
    let mut pieces: BTreeMap<(String, Option<String>), Pieces> = BTreeMap::new();
    for (number, file) in index.files.iter().enumerate() {
        let meets = |name: &str| {
            let place = index.parameters.get(name)?.range(number);
            let wanted = wanted.get(name)?;
            let meet = place.start.max(wanted.start) < place.end.min(wanted.end);
            meet.then_some((place, wanted))
        };
        if !wanted.keys().any(|name| meets(name).is_some()) {
            continue;
        }
        let path = dir.join(file);
        let file = SafetensorsFile::open(&path)?;
        for name in file.names() {
            let (parameter, part) = match name.strip_prefix(OPTIMIZER) {
                None => (name.as_str(), None),
                Some(own) => match moment_of(own, &index) {
                    Some((parameter, part)) => (parameter, Some(part)),
                    None => continue,
                },
            };
            let Some((place, wanted)) = meets(parameter) else {
                continue;
            };
            let stored = file.tensor(&name, &Device::Cpu)?;
            if stored.dims() != [place.len()] || stored.dtype() != DType::F32 {
                let found = format!("{:?} {:?}", stored.dtype(), stored.dims());
                let expected = format!("F32 [{}] by the index", place.len());
                return Err(mismatch(
                    &path,
                    &format!("tensor `{name}`"),
                    found,
                    expected,
                ));
            }
            let key = (parameter.to_string(), part.map(str::to_string));
            pieces
                .entry(key)
                .or_default()
                .add(&stored, &place, wanted)?;
        }
    }
    let (mut parameters, mut tensors) = (BTreeMap::new(), others);
    for (name, stored) in &index.parameters {
        let expected = wanted.get(name).map_or(0, Range::len);
        let moments = stored.moments.iter().map(|part| Some(part.clone()));
        for part in moments.chain([None]) {
            let key = (name.clone(), part.clone());
            let own = pieces.remove(&key).unwrap_or_default();
            if own.elements != expected {
                let what = part.as_deref().unwrap_or("values");
                let what = format!("parameter `{name}` ({what})");
                let found = format!("{} of the elements of rank {rank}", own.elements);
                return Err(mismatch(dir, &what, found, expected.to_string()));
            }
            let joined = own.joined()?;
            match part {
                None => {
                    parameters.insert(name.clone(), joined);
                }
                Some(part) => tensors.push((format!("{name}.{part}"), joined)),
            }
        }
    }
    if let Some((name, part)) = pieces.into_keys().next() {
        let what = format!("moment `{}` of `{name}`", part.unwrap_or_default());
        let (found, expected) = ("in a file".to_string(), "in the index".to_string());
        return Err(mismatch(dir, &what, found, expected));
    }
    Ok(Read {
        meta,
        parameters,
        optimizer: with_tensors(&optimizer_state(&first)?, tensors)?,
        fp8,
    })
}

/// The parameter whose moment an optimizer's tensor is, and which moment.
fn moment_of<'a>(own: &'a str, index: &Index) -> Option<(&'a str, &'a str)> {
    let (parameter, part) = own.rsplit_once('.')?;
    index
        .parameters
        .contains_key(parameter)
        .then_some((parameter, part))
}
