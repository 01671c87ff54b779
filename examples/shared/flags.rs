//! Flags of every example that trains.

use crate::device::DeviceName;
use crate::runs;
use anyhow::Result;
use std::path::{Path, PathBuf};

/// Where to run and where to write.
#[derive(clap::Args)]
pub struct Flags {
    /// Where to run
    #[arg(long, default_value = "cpu")]
    pub device: DeviceName,
    /// Where to write [default: target/ and the example's name, followed by a number if that folder holds a run]
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Replace the run that the folder holds
    #[arg(long)]
    pub overwrite: bool,
}

impl Flags {
    /// The folder of a new run, made by [`runs::begin`]. Prints its path if it is neither the one given nor the default.
    pub fn begin(&self, default: &str, resumes: bool) -> Result<PathBuf> {
        let path = Path::new(default);
        let dir = runs::begin(self.out.as_deref(), path, self.overwrite, resumes)?;
        if self.out.is_none() && dir != path {
            println!(
                "{default} holds an earlier run: this one goes to {}",
                dir.display()
            );
        }
        Ok(dir)
    }
}
