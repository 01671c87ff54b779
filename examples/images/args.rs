//! Arguments of the examples that train an image classifier, and the file that both write.

use crate::flags::Flags;
use crate::images::data::Data;
use crate::images::epochs::Epochs;
use anyhow::{Result, ensure};
use fp8::atomic::write_atomic;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What to train on, and for how long.
#[derive(clap::Args)]
pub struct ImageArgs {
    /// Passes over the training images [default: 2 for images of 28x28, 40 for the digits]
    #[arg(long)]
    epochs: Option<usize>,
    /// Images per step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// The largest learning rate
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    /// A folder with Fashion-MNIST's (or MNIST's) four IDX files, packed with gzip or not, or `digits` [default: where Debian's
    /// dataset-fashion-mnist puts them, else the digits that come with the program]
    #[arg(long)]
    data: Option<PathBuf>,
    #[command(flatten)]
    pub flags: Flags,
}

impl ImageArgs {
    /// Loads the images and prints what they are.
    pub fn load(&self) -> Result<Data> {
        ensure!(self.batch > 0, "--batch 0: a step needs at least one image");
        ensure!(
            self.epochs != Some(0),
            "--epochs 0: there is nothing to train"
        );
        let device = self.flags.device.open()?;
        let data = Data::load(self.data.as_deref())?.on_device(&device)?;
        let (name, size) = (data.name, data.size);
        let (train, test) = (data.train.len(), data.test.len());
        println!("{name}: {train} of {size}x{size} to train with, {test} to test");
        Ok(data)
    }

    /// A run on `data`.
    pub fn epochs(&self, data: &Data, seed: u64) -> Epochs {
        Epochs {
            count: self.epochs.unwrap_or(if data.size > 16 { 2 } else { 40 }),
            batch: self.batch,
            lr: self.lr,
            seed,
        }
    }
}

/// Writes `summary.json` to `dir` and prints its path.
pub fn write_summary(dir: &Path, summary: &impl Serialize) -> Result<()> {
    let path = dir.join("summary.json");
    let json = serde_json::to_string_pretty(summary)?;
    write_atomic(&path, |out| out.write_all(json.as_bytes()))?;
    println!("written: {}", path.display());
    Ok(())
}
