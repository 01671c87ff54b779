//! A checkpoint back into high precision.

use super::companions::Changes;
use super::convert::{Origin, other_batch, sort};
use super::job::Job;
use super::options::{WriteOptions, WriteReport};
use super::progress::OnProgress;
use super::source::{Source, model_dtype, take_scales};
use crate::check::is_float;
use crate::contents::Contents;
use crate::error::{Error, Result};
use candle_core::DType;
use std::path::Path;

/// Writes a model of any family as an ordinary checkpoint in `dtype`: f32, bf16 or f16.
///
/// FP8 weights are code * scale in f32, rounded once to `dtype`; all other floating point tensors are rounded to it, integers stay. With
/// `None` what is not FP8 stays as it is, and FP8 weights take the dtype that most other tensors have: nothing that was in high
/// precision is rounded. Scales of KV caches and attention and `quantization_config` are left out. All else is as
/// [`quantize`](super::quantize) says.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::DType;
/// use fp8::load::Checkpoint;
/// use fp8::rewrite::{self, WriteOptions};
/// # use candle_core::{Device, Tensor};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let (model, target) = (dir.path().join("model"), dir.path().join("bf16"));
/// # std::fs::create_dir(&model)?;
/// # let w = Tensor::randn(0f32, 1., (32, 64), &Device::Cpu)?;
/// # candle_core::safetensors::save(&[("fc.weight", w)].into(), dir.path().join("model/model.safetensors"))?;
/// let checkpoint = Checkpoint::open_dir(&model)?;
/// rewrite::dequantize(&checkpoint, &target, DType::BF16, &WriteOptions::new(), &mut rewrite::quiet)?;
/// # let plain = Checkpoint::open_dir(&target)?;
/// # assert_eq!(plain.tensor("fc.weight", &Device::Cpu)?.dtype(), DType::BF16);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::BuilderDType`] for another dtype; [`Error::MissingConfig`] for Mistral's own files; [`Error::TargetExists`]; [`Error::Cancelled`]; and if a file cannot be read or written.
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
    let names = take_scales(source, source.names())?.others;
    let default = model_dtype(source, &names);
    let mut batches: Vec<_> = names
        .into_iter()
        .map(|name| {
            let stored = source.dtype(&name);
            let dtype = match asked {
                Some(dtype) => stored.filter(|stored| !is_float(*stored)).unwrap_or(dtype),
                None => stored.unwrap_or(default),
            };
            other_batch(source, name, dtype)
        })
        .collect();
    sort(&mut batches);
    let job = Job {
        source,
        target: target.as_ref(),
        options,
        batches,
        contents: Contents::default(),
        spelling: None,
        changes: Changes {
            dtype: asked,
            default_dtype: Some(default),
            ..Changes::default()
        },
        unmatched: vec![],
        exact_inputs: vec![],
        requantized: vec![],
    };
    job.run(on_progress, |origin| match origin {
        Origin::Other(name, dtype) => Ok(vec![source.value(name, *dtype)?]),
        Origin::Layer(..) | Origin::Kv(_) | Origin::Attention(_) => Ok(vec![]),
    })
}
