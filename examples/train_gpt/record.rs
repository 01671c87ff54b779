//! `summary.json`, and other files of JSON.

use anyhow::Result;
use fp8::atomic::write_atomic;
use fp8::training::any_number;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One run in `summary.json`.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub recipe: String,
    pub steps: u64,
    #[serde(serialize_with = "any_number::serialize")]
    pub final_train_loss: f64,
    #[serde(serialize_with = "any_number::serialize")]
    pub final_val_loss: f64,
    /// Steps that were skipped because a gradient was not finite.
    pub skipped_steps: usize,
    pub median_step_ms: f64,
    pub tokens_per_s: f64,
    /// As served: see `Run::served_weight_bytes`.
    pub linear_weight_bytes: usize,
    /// Linear layers with FP8 state.
    pub converted_layers: usize,
    /// Tensors cast to FP8, in forward and backward passes, training and validation.
    pub quantized_tensors: u64,
    /// As in `config.json`.
    pub model: serde_json::Value,
    pub parameters: u64,
    /// Moments and masters of the optimizer, where this rank has all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer_bytes: Option<u64>,
    pub micro_batches: usize,
    pub ranks: usize,
    /// What the ranks divide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallel: Option<&'static str>,
    /// What this rank has sent to others, by operation, over all runs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sent: BTreeMap<String, Sent>,
    /// With `--profile`, milliseconds of a step by kind of work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile_ms: Option<BTreeMap<&'static str, f64>>,
}

/// What a rank sends in a step, for one operation.
#[derive(Debug, Serialize)]
pub struct Sent {
    pub calls_per_step: f64,
    pub bytes_per_step: f64,
}

/// The file of `--stats`.
pub const STATS: &str = "stats.jsonl";

pub fn write_summary(dir: &Path, summaries: &[Summary]) -> Result<()> {
    write_json(&dir.join("summary.json"), summaries)
}

pub fn write_json(path: &Path, value: &(impl Serialize + ?Sized)) -> Result<()> {
    Ok(write_atomic(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })?)
}
