//! The FP8 inference file: compressed-tensors, or another family by [`ExportOptions::with_spelling`].
//!
//! In compressed-tensors files:
//! `X.weight` F8_E4M3 `[out, in]`, `X.weight_scale`, `X.input_scale` f32 `[1]` (static inputs only), every other tensor
//! unchanged, and `config.json` with `quantization_config` beside the file. In all of them value = code * scale: these
//! names are the checkpoint convention's, the numbers are dequant_scales.
//!
//! | calibrated weight | `weight_scale` | calibrated input | in the configuration |
//! |---|---|---|---|
//! | tensorwise | f32 `[1]` | tensorwise | static, `input_scale` f32 `[1]` |
//! | rowwise | f32 `[out, 1]` | rowwise | dynamic per token |
//! | blocks | f32 `[ceil(out / rows), ceil(in / cols)]` | blocks of `1 x size` | dynamic per group of `size` |
//! | MX | U8 `[out, in / 32]`, E8M0 | MX | dynamic per group of 32 |
//!
//! Weights and inputs combine freely, but MX goes with MX only. Layers of several kinds go into several groups that
//! name them.
//!
//! A weight that is also used by something other than a linear layer (the head tied to an embedding) stays in high precision, as
//! [`crate::prepare_fp8`] leaves it, and is stored once, under the other name; the file's metadata says so in the form
//! `head.weight: embed.weight`, as `safetensors.torch.save_model` does, and the loader of this library follows it.
//!
//! A name that the model shows several times is stored once: for one tensor, and for several with the same bits, which a model that reads a
//! file more than once has. The first layer of such a name says how it is stored. Tensors of one name that differ are an error.

mod collect;
mod config;
mod options;
mod ptq;
mod scheme;
mod source;
mod target;

pub use options::{ExportOptions, Ragged};
pub use ptq::{PtqScheme, QuantizedModel, quantize_model};

use crate::atomic::{Part, replace_together, write_json, write_safetensors};
use crate::error::Result;
use crate::module::Fp8Module;
use crate::rewrite::Spelling;
use collect::collect;
use fp8_files::scheme::POWER_OF_TWO_INPUTS;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use target::Place;

/// The files that [`save_calibrated`] has written, and their contents.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportReport {
    /// The safetensors file.
    pub model: PathBuf,
    /// The configuration beside it.
    pub config: PathBuf,
    /// Paths of the layers in FP8.
    pub quantized: Vec<String>,
    /// Paths of the linear layers left in high precision (`ignore` in the configuration).
    pub ignored: Vec<String>,
    /// Weights of linear layers that are stored under another name, with that name.
    pub tied: BTreeMap<String, String>,
    /// Paths of prepared convolutions and of prepared dense layers with batch axes. In memory they compute in FP8; the file holds them in high
    /// precision, because FP8 checkpoints have no form for them.
    pub convolutions: Vec<String>,
    /// Paths of the layers in FP8 that vLLM does not read as such: [`Spelling::unread_by_vllm`]. A warning names the first.
    pub unread_by_vllm: Vec<String>,
}

/// Writes a calibrated model as an FP8 inference file: [`save_calibrated_with`] without options.
///
/// # Errors
/// As [`save_calibrated_with`].
pub fn save_calibrated<M: Fp8Module + ?Sized>(
    model: &M,
    path: impl AsRef<Path>,
) -> Result<ExportReport> {
    save_calibrated_with(model, path, &ExportOptions::default())
}

/// Writes a calibrated model as an FP8 inference file, with its configuration beside it.
///
/// `path` names a directory, which gets `model.safetensors`, or a file by a name that ends in `.safetensors`.
/// Missing directories are created. An existing `config.json` keeps its other entries, unless [`ExportOptions::with_config`] sets
/// others.
///
/// Both files become visible together. On file systems with symbolic and hard links a reader finds the old pair or the new one, even
/// after a crash at any moment; elsewhere each file is whole, and a kill between two renames may leave one of each. A program that
/// opens one file before and the other after the exchange also has one of each; the loader of this library compares them. A symbolic
/// link at one of the two names is replaced, not followed. A directory has one writer at a time.
///
/// Scales are computed from the calibrated amaxes (static inputs) and from the current weights. If the recipe rounds scales to powers
/// of two, the scales of rows and blocks of weights are rounded as well; static scales and scales of whole weights are exact. Scales
/// that engines compute from inputs while serving are exact too, unless [`ExportOptions::with_power_of_two_inputs`] asks for the
/// rounding of the recipe.
///
/// # Errors
/// If no layer is prepared, a prepared layer was not calibrated or cannot be stored as it was calibrated, a tensor has
/// no name or shares it with another that differs, a parameter that `options` expects was not shown by the model, the path is
/// neither a directory's nor ends in `.safetensors`, the directory holds a model in shards (its index hides the file), or a file cannot be
/// written (the old pair survives then).
pub fn save_calibrated_with<M: Fp8Module + ?Sized>(
    model: &M,
    path: impl AsRef<Path>,
    options: &ExportOptions,
) -> Result<ExportReport> {
    let place = Place::new(path.as_ref())?;
    place.refuse_shards()?;
    let collected = collect(model, options)?;
    options.check(&collected.shown)?;
    let (model, config) = (place.model_path(), place.config_path());
    let made = place.make_directory()?;
    let quantization = options.spelling.quantization(&collected.contents);
    let merged = config::merged(&config, options.config.as_ref(), quantization)?;
    let second = options.spelling.second_config(&collected.contents);

    let mut metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    metadata.extend(collected.tied.clone());
    let power_of_two = collected.contents.power_of_two_inputs();
    // Others say it in their configuration.
    if options.spelling == Spelling::CompressedTensors && !power_of_two.is_empty() {
        let layers = serde_json::Value::from(power_of_two).to_string();
        metadata.insert(POWER_OF_TWO_INPUTS.to_string(), layers);
    }
    let mut parts = vec![
        Part::new(&place.model, |out| {
            write_safetensors(out, &model, &collected.tensors, Some(&metadata))
        }),
        Part::new("config.json", |out| write_json(out, &config, &merged)),
    ];
    if let Some((name, value)) = &second {
        let path = place.directory.join(name);
        parts.push(Part::new(name, move |out| write_json(out, &path, value)));
    }
    replace_together(&place.directory, parts)?;
    made.keep();
    let unread_by_vllm = options.spelling.unread_by_vllm(&collected.contents);
    if let Some(first) = unread_by_vllm.first() {
        tracing::warn!(
            "vLLM does not read {} of the exported layers as FP8 in this spelling (first {first})",
            unread_by_vllm.len()
        );
    }
    Ok(ExportReport {
        unread_by_vllm,
        quantized: collected.quantized_paths(),
        ignored: collected.contents.ignored,
        tied: collected.tied,
        convolutions: collected.convolutions,
        model,
        config,
    })
}
