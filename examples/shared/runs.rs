//! The folders that training runs write to. An earlier run is only replaced on request.

use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The default folder of train_gpt; later runs add a number.
pub const DEFAULT: &str = "target/train_gpt";
/// The files that runs write to their folders, besides checkpoints.
const FILES: [&str; 11] = [
    "stats.jsonl",
    "metrics.jsonl",
    "summary.json",
    "loss.svg",
    "model.safetensors",
    "config.json",
    "merges.json",
    "scales.svg",
    "adapters.safetensors",
    "base/model.safetensors",
    "base/config.json",
];

/// The folder of a run's checkpoints.
pub fn checkpoints(dir: &Path) -> PathBuf {
    dir.join("checkpoint")
}

/// Makes the folder of a new run: `out`, or the first free one of `default`, `default-2` and so on. Files of an earlier
/// run in `out` are removed with `overwrite` and are an error without it. A run that `resumes` gets a folder for its
/// checkpoints.
pub fn begin(
    out: Option<&Path>,
    default: &Path,
    overwrite: bool,
    resumes: bool,
) -> Result<PathBuf> {
    let dir = match out {
        Some(out) => out.to_path_buf(),
        None if overwrite => default.to_path_buf(),
        None => free(default)?,
    };
    let old = files(&dir)?;
    if let (Some(first), false) = (old.first(), overwrite) {
        let go_on = match resumes {
            true => format!("continue it with --resume {}, ", dir.display()),
            false => String::new(),
        };
        bail!(
            "{} holds an earlier run ({}): {go_on}replace it by --overwrite, or name another folder with --out",
            dir.display(),
            first.strip_prefix(&dir).unwrap_or(first).display()
        );
    }
    // Check all of them before removing any.
    for file in &old {
        ensure_regular(file)?;
    }
    for file in &old {
        fs::remove_file(file).with_context(|| format!("removing {}", file.display()))?;
    }
    let made = match resumes {
        true => checkpoints(&dir),
        false => dir.clone(),
    };
    fs::create_dir_all(&made).with_context(|| format!("creating {}", made.display()))?;
    Ok(dir)
}

/// The first folder that holds no run; it is created if necessary.
fn free(default: &Path) -> Result<PathBuf> {
    let context = |dir: &Path| format!("creating {}", dir.display());
    if let Some(parent) = default.parent() {
        fs::create_dir_all(parent).with_context(|| context(parent))?;
    }
    for dir in numbered(default) {
        match fs::create_dir(&dir) {
            Ok(()) => return Ok(dir),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                if dir.is_dir() && files(&dir)?.is_empty() {
                    return Ok(dir);
                }
            }
            Err(error) => return Err(error).with_context(|| context(&dir)),
        }
    }
    bail!("every number after {} is taken", default.display())
}

/// `default`, `default-2`, `default-3`...
fn numbered(default: &Path) -> impl Iterator<Item = PathBuf> {
    (1..u32::MAX).map(move |number| match number {
        1 => default.to_path_buf(),
        _ => PathBuf::from(format!("{}-{number}", default.display())),
    })
}

/// The files of a run in `dir`.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = FILES.iter().map(|name| dir.join(name)).collect();
    // Dangling links count, too.
    files.retain(|path| fs::symlink_metadata(path).is_ok());
    let folder = checkpoints(dir);
    match fs::read_dir(&folder) {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {}
        Err(error) => {
            return Err(error).with_context(|| format!("reading {}", folder.display()));
        }
        Ok(entries) => {
            for entry in entries {
                let path = entry?.path();
                if path.extension().is_some_and(|e| e == "safetensors") {
                    files.push(path);
                }
            }
        }
    }
    Ok(files)
}

/// The folder of the model that was saved last in `default`, `default-2` and so on.
pub fn newest_model(default: &Path) -> Result<PathBuf> {
    let saved = |dir: &PathBuf| {
        let model = fs::metadata(dir.join("model.safetensors")).ok()?;
        dir.join("config.json").is_file().then_some(())?;
        model.modified().ok()
    };
    let dirs = numbered(default).take_while(|dir| dir.exists());
    dirs.filter(|dir| saved(dir).is_some())
        .max_by_key(saved)
        .with_context(|| {
            format!(
                "{} holds no model: `cargo run --release --example train_gpt` makes one, --model names another",
                default.display()
            )
        })
}

/// The text of a file, which must be regular.
pub fn read(path: &Path) -> Result<String> {
    ensure_regular(path)?;
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// Fails for a FIFO or a device, which could keep a reader waiting or never end.
fn ensure_regular(path: &Path) -> Result<()> {
    let metadata = fs::metadata(path).with_context(|| format!("reading {}", path.display()))?;
    ensure!(
        metadata.is_file(),
        "{} exists and is not a regular file",
        path.display()
    );
    Ok(())
}
