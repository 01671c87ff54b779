//! Writing a checkpoint in parts.

use super::super::meta::TrainingMeta;
use super::super::prepared::prepared_layers;
use super::super::ranks::gather_state_of;
use super::super::save::write;
use super::index::Index;
use super::parts::{Parts, of_optimizer, with_tensors};
use crate::atomic::FileError;
use crate::error::Result;
use crate::module::Fp8Module;
use crate::optim::ResumableOptimizer;
use candle_core::Tensor;
use fp8_ranks::ShardedVarMap;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Saves parameters in parts, their optimizer and the FP8 state to the directory `dir`: each rank writes a file with its ranges, and when
/// all are written, rank 0 writes the index, which makes them a checkpoint. A crash at any time leaves the checkpoint that was there
/// before, or the new one; files that no index names are removed by the next save that ends. All ranks call it, and see one directory.
///
/// Any number of ranks resumes with [`resume_sharded`](super::resume_sharded). Ends the step first, on all ranks.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes as fp8;
/// use fp8::checkpoint::{TrainingMeta, resume_sharded, save_sharded};
/// use fp8::nn;
/// use fp8::optim::{AdamW, AdamWConfig};
/// use fp8_ranks::{ProcessGroup, ShardedVarMap, threads};
/// # type Failed = Box<dyn std::error::Error + Send + Sync>;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("run");
/// fn make(group: &ProcessGroup) -> Result<(ShardedVarMap, nn::Linear, AdamW), Failed> {
///     let map = ShardedVarMap::new(group, &Device::Cpu);
///     let model = nn::linear(16, 8, map.var_builder().pp("fc"))?;
///     let optimizer = AdamW::from_sharded(&map, AdamWConfig::default())?;
///     Ok((map, model, optimizer))
/// }
/// let meta = TrainingMeta { step: 1, recipe: None, random: 0.into(), extra: 0.into() };
/// let saved = threads::run(2, |group| -> Result<_, Failed> {
///     let (map, model, mut optimizer) = make(&group)?;
///     let x = Tensor::ones((4, 16), candle_core::DType::F32, &Device::Cpu)?;
///     optimizer.apply(&fp8::backward(&model.forward(&x)?.sqr()?.mean_all()?)?)?;
///     save_sharded(&path, &model, &map, &optimizer, &meta)?;
///     Ok(model.weight()?.to_vec2::<f32>()?)
/// });
/// let resumed = threads::run(3, |group| -> Result<_, Failed> {
///     let (map, model, mut optimizer) = make(&group)?;
///     resume_sharded(&path, &model, &map, &mut optimizer, None)?;
///     Ok(model.weight()?.to_vec2::<f32>()?)
/// });
/// let first = |all: Vec<Result<_, Failed>>| all.into_iter().next().unwrap().unwrap();
/// assert_eq!(first(saved), first(resumed));
/// ```
///
/// # Errors
/// Those of the group, of writing files, and [`UnfinishedStep`](crate::TrainingCheckpointError::UnfinishedStep) as for
/// [`save_training`](super::super::save_training); each ends the job of all ranks.
pub fn save_sharded<M: Fp8Module + ?Sized, O: ResumableOptimizer + ?Sized>(
    dir: impl AsRef<Path>,
    model: &M,
    map: &ShardedVarMap,
    optimizer: &O,
    meta: &TrainingMeta,
) -> Result<()> {
    let (dir, group) = (dir.as_ref(), map.group());
    gather_state_of(model, group, optimizer.announces_changes())?;
    // Names that differ from those of the files in the present index.
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let tag = format!("{}-{:x}", meta.step, now.unwrap_or_default().as_nanos());
    let tag = group.broadcast_bytes(Some(tag.as_bytes()), 0)?;
    let tag = String::from_utf8_lossy(&tag).into_owned();
    let ranks = group.size();
    let files = (0..ranks).map(|rank| format!("step-{tag}.rank-{rank}-of-{ranks}.safetensors"));
    let files: Vec<String> = files.collect();
    let state = optimizer.optimizer_state()?;
    let Parts { ranges, others } = of_optimizer(&state, map);
    let own = || -> Result<()> {
        std::fs::create_dir_all(dir).map_err(FileError::io(dir, "create"))?;
        let shards = map.shards().into_iter();
        let tensors: BTreeMap<String, Tensor> = shards
            .map(|(name, var)| (name, var.as_detached_tensor()))
            .collect();
        // The FP8 state is the same on all ranks.
        let layers = (group.rank() == 0).then(|| prepared_layers(model));
        let held = ranges.iter().filter(|(_, own)| own.elem_count() > 0);
        let held = held.map(|((name, part), own)| (format!("{name}.{part}"), own.clone()));
        let state = with_tensors(&state, held.chain(others.clone()))?;
        let path = dir.join(&files[group.rank()]);
        write(&path, tensors, layers.as_deref(), &state, meta)
    };
    let end_of_all = |error: &crate::Error| {
        group.give_up(error);
    };
    own().inspect_err(end_of_all)?;
    group.barrier()?;
    if group.rank() == 0 {
        let index = Index::of(map, files, ranges.keys());
        index.write(dir).inspect_err(end_of_all)?;
        remove_others(dir, &index.files);
    }
    Ok(group.barrier()?)
}

/// Removes files of earlier checkpoints. The checkpoint is complete by now, so a file that cannot be removed does no harm.
fn remove_others(dir: &Path, files: &[String]) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_part =
            name.starts_with("step-") && name.contains(".rank-") && name.ends_with(".safetensors");
        if is_part
            && !files.contains(&name)
            && let Err(error) = std::fs::remove_file(entry.path())
        {
            tracing::warn!("{}: an old file stays: {error}", entry.path().display());
        }
    }
}
