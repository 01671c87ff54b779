//! What a finished run says and writes.

use super::settings::Settings;
use crate::output::size;
use anyhow::Result;
use candle_core::DType;
use fp8::memory_in_use;
use fp8::models::Model;
use fp8::rewrite::{self, Source, WriteOptions};
use fp8::training::{Learner, Metrics, NextToken, RunFolder, Trained, Trainer};
use serde_json::json;
use std::path::Path;

/// Where a model that was trained in full is written to, in the folder of its run.
const MODEL: &str = "model";
/// Where an adapter is written to.
const ADAPTER_DIR: &str = "adapter";

/// A finished run.
pub struct Finished<'a> {
    pub model: &'a Path,
    pub settings: &'a Settings,
    pub folder: &'a RunFolder,
    /// The file of a model that was trained in full.
    pub source: Option<&'a dyn Source>,
    /// The name of its adapter, if it has one.
    pub adapter: &'a str,
    pub trainer: &'a mut Trainer<Model, NextToken>,
}

impl Finished<'_> {
    /// Validates, writes what was trained, figures and the drawing of the losses.
    pub fn write(self, metrics: &mut Metrics) -> Result<()> {
        let name = self.settings.name();
        let step = self.trainer.step();
        // A run that is resumed after its end validates again.
        let known = metrics.validation_curve(name);
        let known = known.last().filter(|point| point.0 == step && step > 0);
        let val_loss = match known {
            Some(point) => Some(point.1),
            None => self.trainer.validate()?,
        };
        if let (Some(loss), None) = (val_loss, known) {
            metrics.push_validation(name, step, loss)?;
        }
        let written = self.write_model()?;
        let settings = self.settings;
        let ms = metrics.median_step_ms(name);
        let tokens = (settings.batch * settings.context) as f64;
        let vars = self.trainer.vars().all_vars();
        let peak = memory_in_use().map(|used| used.peak);
        let summary = json!({
            "recipe": name,
            "model": self.model,
            "steps": step,
            "final_train_loss": metrics.last_train_loss(name),
            "final_val_loss": val_loss,
            "perplexity": val_loss.map(f64::exp),
            "skipped_steps": metrics.skipped_steps(name),
            "median_step_ms": ms,
            "tokens_per_s": if ms > 0. { tokens / ms * 1e3 } else { 0. },
            "trained_parameters": vars.iter().map(|var| var.elem_count()).sum::<usize>(),
            "converted_layers": self.trainer.report().map_or(0, fp8::PrepareReport::converted),
            "peak_memory": peak,
            "written": written,
            "settings": settings,
        });
        let unit = "cross entropy per token (nats)";
        self.folder.finish(&summary, metrics, &[name], unit)?;
        if let Some(loss) = val_loss {
            println!(
                "step {step}: validation {loss:.4} (perplexity {:.3})",
                loss.exp()
            );
        }
        if let Some(peak) = peak {
            println!("{ms:.0} ms a step, at most {} of memory", size(peak));
        }
        println!("written: {}", self.folder.path().join(written).display());
        Ok(())
    }

    /// Writes what was trained; the name of its folder.
    fn write_model(&self) -> Result<&'static str> {
        let Some(source) = self.source else {
            let dir = self.folder.path().join(ADAPTER_DIR);
            self.trainer.model().save_adapter(self.adapter, dir)?;
            return Ok(ADAPTER_DIR);
        };
        let trained = Trained::new(source, self.trainer.vars())?;
        let options = WriteOptions::new().with_overwrite(true);
        let dir = self.folder.path().join(MODEL);
        rewrite::dequantize(&trained, dir, DType::F32, &options, &mut rewrite::quiet)?;
        Ok(MODEL)
    }
}
