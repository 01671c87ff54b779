//! Benchmark of work on folders of files: how fast `check` is on a large model, and rewrites against a plain copy of the same bytes.

#![warn(missing_docs)]

mod memory;
mod rewrites;
mod shape;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/spread.rs"]
mod spread;

use anyhow::{Context, Result};
use clap::Parser;
use fp8::audit::{AuditOptions, audit_dir};
use shape::{Kind, Shape};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Benchmark of checks and rewrites of large folders
#[derive(Debug, Parser)]
#[command(after_help = "\
The folders have the tensors of Llama 70B, without bytes on the disk where a file may have holes. `check` reads one
with FP8 weights of each kind. Rewrites read BF16 weights of --layers layers: with --dense from the disk, in turns with a
copy that reads and writes as many bytes.")]
struct Args {
    /// Where the folders are made
    #[arg(long, default_value = "target")]
    dir: PathBuf,
    /// Layers of the model that is rewritten, of 1.7 GB in BF16; 0 for none
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Fill the weights of that model, so that they are read from the disk
    #[arg(long)]
    dense: bool,
    /// Rounds of rewrites
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let dir =
        tempfile::tempdir_in(&args.dir).with_context(|| format!("in {}", args.dir.display()))?;
    for kind in [Kind::Channel, Kind::Block, Kind::Microscaling] {
        check(&dir.path().join(kind.name()), kind)?;
    }
    if args.layers > 0 {
        rewrites::run(dir.path(), args.layers, args.dense, args.rounds)?;
    }
    Ok(())
}

fn check(dir: &Path, kind: Kind) -> Result<()> {
    let shape = Shape {
        kind,
        layers: 80,
        dense: false,
    };
    let bytes = shape.write(dir)?;
    memory::forget_peak();
    let start = Instant::now();
    let report = audit_dir(dir, &AuditOptions::default());
    println!(
        "check {:<12} {:>5.1} GB, {} tensors: {:>7.3} s, {:>6.1} MB read, {} findings, peak {}",
        kind.name(),
        bytes as f64 / 1e9,
        report.tensors,
        start.elapsed().as_secs_f64(),
        report.bytes_read as f64 / 1e6,
        report.findings.len(),
        memory::peak(),
    );
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
