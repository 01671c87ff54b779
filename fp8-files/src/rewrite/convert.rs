//! The same codes and scales in another spelling.

use super::companions::Changes;
use super::job::Job;
use super::options::{WriteOptions, WriteReport};
use super::progress::OnProgress;
use super::select::role;
use super::shards::{Batch, Entry};
use super::source::{Parts, Source, model_dtype, natural_order, take_scales};
use super::spelling::Layout;
use crate::contents::Role;
use crate::contents::{AttentionScale, Contents, Described, HEAD, KvScale};
use crate::error::{Error, Result};
use crate::load::Checkpoint;
use crate::spelling::Spelling;
use candle_core::{DType, Device, Tensor};
use std::path::Path;

/// Where a batch of tensors comes from.
pub(super) enum Origin {
    /// An FP8 layer, and where its parts go.
    Layer(Described, Vec<Layout>),
    /// Scales of a KV cache.
    Kv(KvScale),
    /// A scale of queries or probabilities.
    Attention(AttentionScale),
    /// A tensor that stays as it is.
    Other(String, DType),
}

/// Writes an FP8 checkpoint of any family into `target` in another spelling: the same codes, scales of the same value, inputs scaled in
/// the same way. Nothing is quantized anew. Input scales that are powers of two in the source are exact in a target whose configuration
/// cannot say so ([`WriteReport::exact_inputs`]), unless [`WriteOptions::power_of_two_inputs`] announces them.
///
/// Scales become f32, which holds BF16 and F16 exactly, and take the target's shape; KV scales take its names. All else stays as it is,
/// as [`quantize`](super::quantize) says.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::Checkpoint;
/// use fp8::rewrite::{self, Spelling, WriteOptions};
/// # use candle_core::{Device, Tensor};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let (model, target) = (dir.path().join("model"), dir.path().join("autofp8"));
/// # std::fs::create_dir(&model)?;
/// # let w = Tensor::randn(0f32, 1., (32, 64), &Device::Cpu)?;
/// # candle_core::safetensors::save(&[("fc.weight", w)].into(), dir.path().join("model/model.safetensors"))?;
/// # let options = rewrite::QuantizeOptions::new("tensor-token".parse()?);
/// # let fp8 = dir.path().join("fp8");
/// # rewrite::quantize(&Checkpoint::open_dir(&model)?, &fp8, &options, &mut rewrite::quiet)?;
/// # let model = fp8;
/// let checkpoint = Checkpoint::open_dir(&model)?;
/// let options = WriteOptions::new();
/// let report = rewrite::convert(&checkpoint, &target, Spelling::AutoFp8, &options, &mut rewrite::quiet)?;
/// assert_eq!(report.quantized, ["fc"]);
/// let again = Checkpoint::open_dir(&target)?;
/// # let (a, b) = (checkpoint.stored_layer("fc", &Device::Cpu)?, again.stored_layer("fc", &Device::Cpu)?);
/// # assert_eq!(a.codes.codes().to_vec2::<u8>()?, b.codes.codes().to_vec2::<u8>()?);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Inexpressible`] for the first layer that the target cannot hold, before anything is written;
/// [`Error::MissingConfig`] for Mistral's own files; [`Error::NothingToConvert`] for a checkpoint without FP8 layers; and as [`quantize`](super::quantize).
pub fn convert(
    checkpoint: &Checkpoint,
    target: impl AsRef<Path>,
    spelling: Spelling,
    options: &WriteOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<WriteReport> {
    let mut contents = Contents::default();
    for path in checkpoint.layer_paths() {
        contents.layers.extend(checkpoint.described(&path));
    }
    if contents.layers.is_empty() {
        return Err(Error::NothingToConvert);
    }
    let order = |layer: &Described| natural_order(&layer.path);
    contents.layers.sort_by_cached_key(order);
    let parts = take_scales(checkpoint, checkpoint.other_names())?;
    let others = keep(parts, options, &mut contents);
    name_others(checkpoint, &others, &mut contents);
    let exact_inputs = match options.power_of_two_inputs || spelling.says_power_of_two() {
        true => vec![],
        false => contents.make_inputs_exact(),
    };
    spelling.check(&contents)?;

    let mut batches = vec![];
    for layer in &contents.layers {
        batches.push(layer_batch(spelling, layer));
    }
    let default_dtype = Some(model_dtype(checkpoint, &others));
    add_scales(spelling, &contents, &mut batches)?;
    for name in others {
        // FP8 tensors that are no layer's weight (tables, convolutions) no target can say.
        let dtype = Source::dtype(checkpoint, &name).or(default_dtype);
        batches.push(other_batch(checkpoint, name, dtype.unwrap_or(DType::F32)));
    }
    sort(&mut batches);
    let job = Job {
        source: checkpoint,
        target: target.as_ref(),
        options,
        batches,
        contents,
        spelling: Some(spelling),
        changes: Changes {
            default_dtype,
            ..Changes::default()
        },
        unmatched: vec![],
        exact_inputs,
        requantized: vec![],
    };
    job.run(on_progress, |origin| match origin {
        Origin::Layer(described, layouts) => {
            let layer = checkpoint.stored_layer(&described.path, &Device::Cpu)?;
            layouts
                .iter()
                .map(|layout| layout.tensor(&layer.path, &layer.codes, &layer.input))
                .collect()
        }
        Origin::Kv(scale) => kv_tensors(spelling, scale),
        Origin::Attention(scale) => Ok(vec![spelling.attention_tensor(scale)?]),
        Origin::Other(name, dtype) => Ok(vec![checkpoint.value(name, *dtype)?]),
    })
}

/// Puts the scales of attention that are written into the contents; names of everything else.
pub(super) fn keep(parts: Parts, options: &WriteOptions, contents: &mut Contents) -> Vec<String> {
    if !options.drop_kv_scales {
        contents.kv = parts.kv;
        contents.attention = parts.attention;
    }
    parts.others
}

/// Puts linear layers in high precision into the list of those, and embeddings into theirs.
pub(super) fn name_others(source: &dyn Source, others: &[String], contents: &mut Contents) {
    for name in others {
        match role(source, name) {
            Some((path, Role::Embedding)) => contents.embeddings.push(path.to_string()),
            Some((path, _)) => contents.ignored.push(path.to_string()),
            None => {}
        }
    }
    contents.name_absent_layers();
    // A tied head has no tensor, but the model has the layer, which every list of this kind has to name.
    if !contents.has_head() {
        contents.ignored.push(HEAD.to_string());
    }
    contents
        .ignored
        .sort_by_cached_key(|path| natural_order(path));
}

pub(super) fn layer_batch(spelling: Spelling, layer: &Described) -> Batch<Origin> {
    let layouts = spelling.layouts(layer);
    let entry = |layout: &Layout| Entry {
        name: crate::names::join(&layer.path, layout.own),
        dtype: layout.dtype,
        dims: layout.dims.clone(),
    };
    Batch {
        entries: layouts.iter().map(entry).collect(),
        source: Origin::Layer(layer.clone(), layouts),
    }
}

pub(super) fn add_scales(
    spelling: Spelling,
    contents: &Contents,
    batches: &mut Vec<Batch<Origin>>,
) -> Result<()> {
    let entry = |name: String, tensor: &Tensor| Entry {
        name,
        dtype: tensor.dtype(),
        dims: tensor.dims().to_vec(),
    };
    for scale in &contents.kv {
        let tensors = spelling.kv_tensors(scale)?.into_iter();
        batches.push(Batch {
            source: Origin::Kv(scale.clone()),
            entries: tensors.map(|(name, tensor)| entry(name, &tensor)).collect(),
        });
    }
    for scale in &contents.attention {
        let tensor = spelling.attention_tensor(scale)?;
        batches.push(Batch {
            source: Origin::Attention(scale.clone()),
            entries: vec![entry(scale.name.clone(), &tensor)],
        });
    }
    Ok(())
}

pub(super) fn kv_tensors(spelling: Spelling, scale: &KvScale) -> Result<Vec<Tensor>> {
    let tensors = spelling.kv_tensors(scale)?.into_iter();
    Ok(tensors.map(|(_, tensor)| tensor).collect())
}

pub(super) fn other_batch(source: &dyn Source, name: String, dtype: DType) -> Batch<Origin> {
    let entry = Entry {
        dims: source.shape(&name).unwrap_or_default(),
        name: name.clone(),
        dtype,
    };
    Batch {
        source: Origin::Other(name, dtype),
        entries: vec![entry],
    }
}

/// The order of the model, so that what belongs together lies in one file.
pub(super) fn sort(batches: &mut [Batch<Origin>]) {
    batches.sort_by_cached_key(|batch| {
        let name = batch.entries.first().map_or("", |entry| &entry.name);
        natural_order(name)
    });
}
