//! Writes a checkpoint in high precision.

use super::companions::Changes;
use super::job::Job;
use super::options::{WriteOptions, WriteReport};
use super::progress::OnProgress;
use super::source::{Source, model_dtype, take_scales};
use crate::contents::Contents;
use crate::error::{Error, Result};
use candle_core::DType;
use std::path::Path;

/// Writes a model of any family as an ordinary checkpoint in `dtype`: f32, bf16 or f16.
///
/// FP8 weights are code * scale in f32, rounded once to `dtype`; all other floating point tensors are rounded to it; integers and what
/// candle cannot hold ([`Source::raw_dtype`]) stay. With `None` only FP8 weights change: they get the dtype of most other tensors, and no
/// tensor in high precision is rounded. Scales of KV caches and attention and `quantization_config` are left out. Everything else is
/// written as [`quantize`](super::quantize) describes.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::DType;
/// use fp8::load::Checkpoint;
/// use fp8::rewrite::{self, WriteOptions};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::fp8_model(dir.path());
/// let (model, target) = (Checkpoint::open_dir(dir.path())?, dir.path().join("bf16"));
/// rewrite::dequantize(&model, &target, DType::BF16, &WriteOptions::new(), &mut rewrite::quiet)?;
/// # let plain = Checkpoint::open_dir(&target)?;
/// # assert_eq!(plain.tensor("fc.weight", &candle_core::Device::Cpu)?.dtype(), DType::BF16);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::BuilderDType`] for another dtype; [`Error::MissingConfig`] for Mistral's own files; [`Error::TargetExists`];
/// [`Error::Cancelled`]; and if a file cannot be read or written.
pub fn dequantize(
    source: &dyn Source,
    target: impl AsRef<Path>,
    dtype: impl Into<Option<DType>>,
    options: &WriteOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<WriteReport> {
    let asked = dtype.into();
    if let Some(got) = asked
        && !matches!(got, DType::F32 | DType::BF16 | DType::F16)
    {
        return Err(Error::BuilderDType { got });
    }
    let (_, others) = take_scales(source, source.names(), options)?;
    let job = Job {
        source,
        target: target.as_ref(),
        options,
        spelling: None,
        contents: Contents::default(),
        changes: Changes {
            untied: false,
            dtype: asked,
            default_dtype: model_dtype(source, &others),
        },
        others,
        report: WriteReport::default(),
    };
    // The contents list no FP8 layer.
    job.run(on_progress, |_| Err(Error::NothingToConvert))
}
