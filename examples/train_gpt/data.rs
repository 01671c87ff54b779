//! Text as tokens: the Rust sources of candle-core by default, split into training and validation by position.

use crate::candle_sources::candle_sources;
use crate::vocabulary::Vocabulary;
use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use fp8::fp8_candle::profile::{Kind, enter};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rapidhash::v3::rapidhash_v3;
use std::path::{Path, PathBuf};

/// Share of the text, at its end, that is never trained on.
const VALIDATION: f64 = 0.1;

pub struct Data {
    train: Vec<u32>,
    validation: Vec<u32>,
    pub vocabulary: Vocabulary,
    /// The device of batches.
    device: Device,
    pub description: String,
    /// Identifies the text when a run is resumed.
    pub fingerprint: String,
}

/// Inputs and targets, U32 `[batch, tokens]`; a target is the token after its input.
pub type Batch = (Tensor, Tensor);

impl Data {
    /// Reads a file, every text file of a directory, or the default text, and encodes it in a vocabulary of `vocab` tokens. Fails if it
    /// is too short for a batch of `batch` windows of `context` tokens.
    pub fn load(path: Option<&Path>, vocab: usize, batch: usize, context: usize) -> Result<Self> {
        let (root, what) = match path {
            Some(path) => (path.to_path_buf(), path.display().to_string()),
            None => (candle_sources()?, "the sources of candle-core".to_string()),
        };
        let mut files = vec![];
        collect(&root, path.is_none(), &mut files)?;
        files.sort();
        let mut text = vec![];
        for file in &files {
            let bytes =
                std::fs::read(file).with_context(|| format!("reading {}", file.display()))?;
            // A directory may hold images and the like.
            if files.len() == 1 || std::str::from_utf8(&bytes).is_ok() {
                text.extend(bytes);
            }
        }
        let split = (text.len() as f64 * (1. - VALIDATION)) as usize;
        let validation = text.split_off(split);
        let vocabulary = Vocabulary::learn(&text, vocab).with_context(|| what.clone())?;
        let (train, held) = (vocabulary.encode(&text), vocabulary.encode(&validation));
        let need = batch.saturating_add(context);
        for (part, tokens) in [("training", train.len()), ("validation", held.len())] {
            ensure!(
                tokens > need,
                "{what}: {tokens} tokens of {part} text are too few, one batch of {batch} x {context} needs more than {need}: give a smaller --context or --batch, or more text"
            );
        }
        let hash = rapidhash_v3(
            &[rapidhash_v3(&text), rapidhash_v3(&validation)]
                .map(u64::to_le_bytes)
                .concat(),
        );
        let total = text.len() + validation.len();
        Ok(Self {
            train,
            validation: held,
            vocabulary,
            device: Device::Cpu,
            description: format!(
                "{what}: {:.2} MB in {} files",
                total as f64 / 1e6,
                files.len()
            ),
            fingerprint: format!("{total}-{hash:016x}"),
        })
    }

    /// Puts batches on `device`.
    pub fn on(self, device: &Device) -> Self {
        Self {
            device: device.clone(),
            ..self
        }
    }

    /// The batch of a step. It depends on seed and step only, so every run sees the same batches, resumed or not.
    pub fn train_batch(&self, seed: u64, step: u64, batch: usize, context: usize) -> Result<Batch> {
        let _scope = enter(Kind::Data);
        let mut rng = StdRng::seed_from_u64(seed ^ (step + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let starts = (0..batch).map(|_| rng.random_range(0..self.train.len() - context));
        self.windows(&self.train, &starts.collect::<Vec<_>>(), context)
    }

    /// Evenly spread validation windows: the same for every run.
    pub fn validation_batches(
        &self,
        count: usize,
        batch: usize,
        context: usize,
    ) -> Result<Vec<Batch>> {
        let windows_total = count * batch;
        let room = self.validation.len() - context - 1;
        (0..count)
            .map(|i| {
                let starts: Vec<usize> = (0..batch)
                    .map(|j| (i * batch + j) * room / windows_total)
                    .collect();
                self.windows(&self.validation, &starts, context)
            })
            .collect()
    }

    /// The first tokens of the validation text.
    pub fn prompt(&self, len: usize) -> &[u32] {
        &self.validation[..len.min(self.validation.len())]
    }

    fn windows(&self, text: &[u32], starts: &[usize], context: usize) -> Result<Batch> {
        let shifted = |offset: usize| {
            let tokens: Vec<u32> = starts
                .iter()
                .flat_map(|&s| &text[s + offset..s + offset + context])
                .copied()
                .collect();
            Tensor::from_vec(tokens, (starts.len(), context), &self.device)
        };
        Ok((shifted(0)?, shifted(1)?))
    }
}

/// Files under `path`; `rust_only` keeps those named `*.rs`.
fn collect(path: &Path, rust_only: bool, files: &mut Vec<PathBuf>) -> Result<()> {
    let context = || format!("reading {}", path.display());
    if std::fs::metadata(path).with_context(context)?.is_file() {
        if !rust_only || path.extension().is_some_and(|e| e == "rs") {
            files.push(path.to_path_buf());
        }
        return Ok(());
    }
    for entry in std::fs::read_dir(path).with_context(context)? {
        collect(&entry.with_context(context)?.path(), rust_only, files)?;
    }
    Ok(())
}
