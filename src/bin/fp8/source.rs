//! Opening what a command reads.

use anyhow::{Result, bail};
use fp8::load::{Checkpoint, Inputs, OpenOptions};
use fp8::models::gguf::{GgufFile, GgufSource, is_gguf};
use fp8::rewrite::Source;
use std::path::Path;

/// How an FP8 checkpoint is opened.
#[derive(Default, clap::Args)]
pub struct Opening {
    /// Scale inputs in groups of N, whatever the checkpoint says (ModelOpt's fp8_pb_wo runs with 128)
    #[arg(long, value_name = "N", conflicts_with = "weight_only")]
    groups: Option<usize>,
    /// Leave inputs in high precision, whatever the checkpoint says
    #[arg(long)]
    weight_only: bool,
    /// Take FP8 tensors without any scale in the files for their values
    #[arg(long)]
    allow_unscaled: bool,
}

impl Opening {
    /// A directory, or a single safetensors file.
    pub fn open(&self, path: &Path) -> Result<Checkpoint> {
        let inputs = match self.groups {
            Some(0) => bail!("--groups is 0, expected the number of inputs in a group"),
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
