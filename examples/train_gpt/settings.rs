//! What a run depends on, as its checkpoints store it.

use crate::gpt::GptConfig;
use crate::runs::checkpoints;
use crate::weights;
use anyhow::{Context, Result};
use clap::ValueEnum;
use fp8::config::KeptActivations;
use fp8::optim::{Fp8Moments, MomentStorage};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Everything a run depends on besides its recipe; its checkpoint stores it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub recipes: Vec<String>,
    pub steps: u64,
    pub seed: u64,
    pub batch: usize,
    /// Parts of a batch that have gradients of their own.
    #[serde(default = "one")]
    pub micro_batches: usize,
    pub learning_rate: f64,
    /// How the optimizer keeps its moments.
    #[serde(default)]
    pub moments: MomentStorage,
    /// How blocks keep activations for the backward pass, with an FP8 recipe.
    #[serde(default)]
    pub kept: KeptActivations,
    pub model: GptConfig,
    pub data: String,
    /// Layers that `auto` left in high precision: a resumed run does not measure again. None before it has chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_layers: Option<Vec<String>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            recipes: vec!["f32".into(), "delayed".into()],
            steps: 200,
            seed: 0,
            batch: 8,
            micro_batches: 1,
            learning_rate: 6e-4,
            moments: MomentStorage::F32,
            kept: KeptActivations::HighPrecision,
            model: GptConfig::default(),
            data: String::new(),
            slow_layers: None,
        }
    }
}

impl Settings {
    /// The first setting that differs from `here`, with both values.
    pub fn difference(&self, here: &Self) -> Result<Option<String>> {
        let [there, here] = [self, here].map(serde_json::to_value);
        let (there, here) = (there?, here?);
        let keys = here.as_object().into_iter().flat_map(|here| here.keys());
        let mut keys = keys.filter(|key| there[*key] != here[*key]);
        let told = |key: &String| format!("{key} is {} there, {} here", there[key], here[key]);
        Ok(keys.next().map(told))
    }
}

/// The choice of `--moments`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Moments {
    F32,
    /// Codes rounded at random.
    Fp8,
    /// Codes rounded to nearest.
    Fp8Nearest,
}

impl From<Moments> for MomentStorage {
    fn from(moments: Moments) -> Self {
        match moments {
            Moments::F32 => Self::F32,
            Moments::Fp8 => Self::Fp8(Fp8Moments::default().with_stochastic(true)),
            Moments::Fp8Nearest => Self::Fp8(Fp8Moments::default().with_stochastic(false)),
        }
    }
}

/// The choice of `--kept`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kept {
    F32,
    /// Codes with a scale for 128 features.
    Fp8,
}

impl From<Kept> for KeptActivations {
    fn from(kept: Kept) -> Self {
        match kept {
            Kept::F32 => Self::HighPrecision,
            Kept::Fp8 => Self::fp8(),
        }
    }
}

fn one() -> usize {
    1
}

/// The settings of the run that wrote `dir`.
pub fn saved_settings(dir: &Path) -> Result<Settings> {
    let folder = checkpoints(dir);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .with_context(|| format!("{} holds no checkpoint to resume", dir.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    let first = files
        .first()
        .with_context(|| format!("{} holds no checkpoint to resume", folder.display()))?;
    serde_json::from_value(weights::saved_settings(first)?)
        .with_context(|| format!("{}: not a checkpoint of this example", first.display()))
}
