//! Opens the checkpoint that a command reads.

use crate::usage::at_least;
use anyhow::{Result, bail};
use fp8::load::{Checkpoint, Inputs, OpenOptions};
use fp8::models::gguf::{GgufFile, GgufSource, is_gguf};
use fp8::rewrite::Source;
use std::path::Path;

/// Bytes of the longest text file.
pub const MAX_TEXT: u64 = 1 << 30;

/// How an FP8 checkpoint is opened.
#[derive(Default, clap::Args)]
pub struct Opening {
    /// Scale inputs in groups of N, whatever the checkpoint says (ModelOpt's fp8_pb_wo runs with 128)
    #[arg(long, value_name = "N", conflicts_with = "weight_only", value_parser = at_least(1))]
    groups: Option<usize>,
    /// Leave inputs in high precision, whatever the checkpoint says
    #[arg(long)]
    weight_only: bool,
    /// Accept FP8 tensors that have no scale in the files, as if it were 1
    #[arg(long)]
    allow_unscaled: bool,
}

impl Opening {
    /// A directory, or a single safetensors file.
    pub fn open(&self, path: &Path) -> Result<Checkpoint> {
        if is_gguf(path) {
            bail!(
                "{} is a GGUF file, which holds no FP8: quantize, generate, eval, logits, bench and diff take it, and \
                 `fp8 quantize` makes an FP8 checkpoint of it",
                path.display()
            );
        }
        let inputs = match self.groups {
            Some(size) => Inputs::Groups(size),
            None if self.weight_only => Inputs::WeightOnly,
            None => Inputs::AsStored,
        };
        let options = OpenOptions::new().with_inputs(inputs);
        open_with(path, &options.with_allow_unscaled(self.allow_unscaled))
    }
}

/// A directory, a single safetensors file, or a GGUF file.
pub fn open(path: &Path) -> Result<Box<dyn Source>> {
    Ok(match is_gguf(path) {
        true => Box::new(GgufSource::new(GgufFile::open(path)?)?),
        false => Box::new(open_with(path, &OpenOptions::new())?),
    })
}

fn open_with(path: &Path, options: &OpenOptions) -> Result<Checkpoint> {
    if path.is_dir() {
        return Ok(Checkpoint::open_dir_with(path, options)?);
    }
    Ok(Checkpoint::open_with(&[path], options)?)
}
