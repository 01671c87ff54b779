//! Rewrites of a large folder, in turns with a copy of as many bytes.

use crate::memory;
use crate::shape::{Kind, Shape};
use crate::spread::median;
use anyhow::Result;
use fp8::load::Checkpoint;
use fp8::rewrite::{self, QuantizeOptions, Scheme, Spelling, WriteOptions};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

const CHUNK: usize = 16 << 20;

/// Rewrites a folder of `layers` layers into each target, each time after a copy.
pub fn run(dir: &Path, layers: usize, dense: bool, rounds: usize) -> Result<()> {
    let source = dir.join("bf16");
    let shape = Shape {
        kind: Kind::Bf16,
        layers,
        dense,
    };
    shape.write(&source)?;
    // Quantized once, so that there is an FP8 folder to convert and to dequantize.
    let quantized = dir.join("quantized");
    time(
        "quantize, channel",
        &source,
        &quantized,
        rounds,
        quantize(Scheme::ChannelToken),
    )?;
    let again = dir.join("again");
    time(
        "quantize, blocks",
        &source,
        &again,
        rounds,
        quantize(Scheme::Block128),
    )?;
    time(
        "quantize, mx",
        &source,
        &again,
        rounds,
        quantize(Scheme::Mxfp8),
    )?;
    time("convert", &quantized, &again, rounds, |from, to| {
        rewrite::convert(
            from,
            to,
            Spelling::ModelOpt,
            &WriteOptions::new(),
            &mut rewrite::quiet,
        )?;
        Ok(())
    })?;
    time("dequantize", &quantized, &again, rounds, |from, to| {
        let dtype = candle_core::DType::BF16;
        rewrite::dequantize(from, to, dtype, &WriteOptions::new(), &mut rewrite::quiet)?;
        Ok(())
    })
}

fn quantize(scheme: Scheme) -> impl Fn(&Checkpoint, &Path) -> Result<()> {
    move |from, to| {
        rewrite::quantize(from, to, &QuantizeOptions::new(scheme), &mut rewrite::quiet)?;
        Ok(())
    }
}

fn time(
    name: &str,
    from: &Path,
    to: &Path,
    rounds: usize,
    work: impl Fn(&Checkpoint, &Path) -> Result<()>,
) -> Result<()> {
    let read = bytes(from)?;
    let (mut ours, mut copies, mut written, mut peak) = (vec![], vec![], 0, String::new());
    for _ in 0..rounds.max(1) {
        remove(to)?;
        leave_cache(from)?;
        memory::forget_peak();
        let start = Instant::now();
        work(&Checkpoint::open_dir(from)?, to)?;
        ours.push(start.elapsed().as_secs_f64());
        peak = memory::peak();
        written = bytes(to)?;

        let copied = to.with_extension("copy");
        leave_cache(from)?;
        let start = Instant::now();
        copy(from, &copied, written)?;
        copies.push(start.elapsed().as_secs_f64());
        std::fs::remove_file(copied)?;
    }
    let (ours, copies) = (median(ours), median(copies));
    println!(
        "{name:<18} {:>5.1} GB read, {:>5.1} GB written: {ours:>6.2} s, {:>4.0} MB/s of both; copy {copies:>6.2} s: {:.2} of its rate; peak {peak}",
        read as f64 / 1e9,
        written as f64 / 1e9,
        (read + written) as f64 / 1e6 / ours,
        copies / ours,
    );
    Ok(())
}

/// Reads all weights of `from` and writes the first `keep` bytes, or as many zeros after them, into one file.
fn copy(from: &Path, to: &Path, keep: u64) -> Result<()> {
    let mut out = File::create(to)?;
    let (mut left, mut buffer) = (keep as usize, vec![0u8; CHUNK]);
    let mut write = |bytes: &[u8]| -> Result<()> {
        let n = left.min(bytes.len());
        left -= n;
        Ok(out.write_all(&bytes[..n])?)
    };
    for path in weights(from)? {
        let mut file = File::open(path)?;
        loop {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            write(&buffer[..n])?;
        }
    }
    while left > 0 {
        let n = left.min(CHUNK);
        out.write_all(&buffer[..n])?;
        left -= n;
    }
    out.sync_all()?;
    Ok(())
}

fn weights(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = vec![];
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn bytes(dir: &Path) -> Result<u64> {
    weights(dir)?
        .iter()
        .map(|path| Ok(std::fs::metadata(path)?.len()))
        .sum()
}

fn remove(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Takes the files out of the system's cache, so that they are read from the disk.
fn leave_cache(dir: &Path) -> Result<()> {
    for path in weights(dir)? {
        let file = File::open(path)?;
        file.sync_all()?;
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}
