//! The same codes and scales in another spelling.

use super::companions::Changes;
use super::job::Job;
use super::options::{WriteOptions, WriteReport};
use super::progress::OnProgress;
use super::select::name_others;
use super::source::{model_dtype, natural_order, take_scales};
use crate::contents::{Role, role_by_name};
use crate::error::{Error, Result};
use crate::load::Checkpoint;
use crate::names::weight_name;
use crate::spelling::Spelling;
use candle_core::Device;
use std::path::Path;

/// Writes an FP8 checkpoint of any family into the directory `target` in another spelling: the same codes, equal scales, inputs scaled in
/// the same way. Nothing is quantized again. Input scales that are powers of two in the source become exact if the target's
/// configuration has no key for them ([`WriteReport::exact_inputs`]) and [`WriteOptions::power_of_two_inputs`] is not set.
///
/// FP8 tables of embeddings (MLX, torchao) and routers of experts are dequantized, since engines read them in high precision:
/// [`WriteReport::dequantized`] names them.
///
/// Scales become f32, which holds BF16 and F16 exactly, in the target's shapes; KV scales get its names. Everything else is written as
/// [`quantize`](super::quantize) describes.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::Checkpoint;
/// use fp8::rewrite::{self, Spelling, WriteOptions};
/// # use candle_core::Device;
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::fp8_model(dir.path());
/// let (model, target) = (Checkpoint::open_dir(dir.path())?, dir.path().join("modelopt"));
/// let options = WriteOptions::new();
/// let report = rewrite::convert(&model, &target, Spelling::ModelOpt, &options, &mut rewrite::quiet)?;
/// assert_eq!(report.quantized, ["fc"]);
/// let again = Checkpoint::open_dir(&target)?;
/// # let (a, b) = (model.stored_layer("fc", &Device::Cpu)?, again.stored_layer("fc", &Device::Cpu)?);
/// # assert_eq!(a.codes.codes().to_vec2::<u8>()?, b.codes.codes().to_vec2::<u8>()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Inexpressible`] for the first layer that the target cannot hold, before anything is written;
/// [`Error::MissingConfig`] for Mistral's own files; [`Error::NothingToConvert`] for a checkpoint without linear layers in FP8; and as
/// [`quantize`](super::quantize).
pub fn convert(
    checkpoint: &Checkpoint,
    target: impl AsRef<Path>,
    spelling: Spelling,
    options: &WriteOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<WriteReport> {
    let (layers, dequantized): (Vec<String>, Vec<String>) = checkpoint
        .layer_paths()
        .into_iter()
        .partition(|path| keeps_codes(path));
    if layers.is_empty() {
        return Err(Error::NothingToConvert);
    }
    let mut names = checkpoint.other_names();
    names.extend(dequantized.iter().map(|path| weight_name(path)));
    let (mut contents, others) = take_scales(checkpoint, names, options)?;
    let layers = layers.iter().filter_map(|path| checkpoint.described(path));
    contents.layers = layers.collect();
    contents
        .layers
        .sort_by_cached_key(|layer| natural_order(&layer.path));
    name_others(checkpoint, &others, &mut contents);
    let exact_inputs = match options.power_of_two_inputs || spelling.says_power_of_two() {
        true => vec![],
        false => contents.make_inputs_exact(),
    };
    spelling.check(&contents)?;
    let job = Job {
        source: checkpoint,
        target: target.as_ref(),
        options,
        spelling: Some(spelling),
        changes: Changes {
            untied: false,
            dtype: None,
            default_dtype: model_dtype(checkpoint, &others),
        },
        contents,
        others,
        report: WriteReport {
            exact_inputs,
            ..WriteReport::default()
        },
    };
    job.run(on_progress, |layer| {
        checkpoint.stored_layer(&layer.path, &Device::Cpu)
    })
}

/// Whether the weight of the layer at `path` may stay FP8: engines read tables and routers in high precision.
fn keeps_codes(path: &str) -> bool {
    let role = role_by_name(&weight_name(path)).map(|(_, role)| role);
    !matches!(role, Some(Role::Embedding | Role::Router))
}
