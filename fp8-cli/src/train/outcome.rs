//! The output of a finished run.

use super::goal::{Goal, judged};
use super::settings::Settings;
use crate::card::Asked;
use crate::model::Source;
use crate::output::{print, size};
use anyhow::Result;
use candle_core::DType;
use fp8::memory_in_use;
use fp8::models::Model;
use fp8::rewrite::{self, Classifier, Measure, Relation, WriteOptions};
use fp8::training::{Learner, Metrics, RunFolder, Task, Trained, Trainer};
use serde_json::json;
use std::path::Path;

/// The folder, within that of the run, of a model that was trained in full.
const MODEL: &str = "model";
/// The folder of an adapter.
const ADAPTER_DIR: &str = "adapter";

/// A finished run.
pub struct Finished<'a> {
    pub model: &'a Path,
    /// The command line that began the run.
    pub command: &'a str,
    pub settings: &'a Settings,
    pub folder: &'a RunFolder,
    /// The file of a model that was trained in full.
    pub source: Option<&'a dyn rewrite::Source>,
    /// The name of its adapter, if it has one.
    pub adapter: &'a str,
    pub trainer: &'a mut Trainer<Model, Goal>,
    /// The mean loss of the training steps since the last validation.
    pub trained: Option<f64>,
    pub task: Task,
    /// The classes; empty unless texts are classified.
    pub labels: &'a [String],
    /// The request of the system to stop, which ends the measurements of the card.
    pub asked: Asked<'a>,
}

/// How what is written does on the held-out data.
struct Judgement {
    loss: Option<f64>,
    accuracy: Option<f64>,
}

impl Finished<'_> {
    /// Validates, writes what was trained, figures and the drawing of the losses.
    pub fn write(mut self, metrics: &mut Metrics) -> Result<()> {
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
            metrics.push_validation(name, step, loss, self.trainer.accuracy())?;
        }
        let accuracy = metrics.last_accuracy(name).filter(|_| val_loss.is_some());
        let judgement = self.judge_written(val_loss, accuracy)?;
        let written = self.write_model()?;
        let settings = self.settings;
        let ms = metrics.median_step_ms(name);
        // Texts of an encoder are shorter than a row, so only a language model has a known number of tokens.
        let tokens =
            (self.task == Task::LanguageModel).then_some(settings.batch * settings.context());
        let speed = tokens.map(|tokens| {
            if ms > 0. {
                tokens as f64 / ms * 1e3
            } else {
                0.
            }
        });
        let vars = self.trainer.vars().all_vars();
        let peak = memory_in_use().map(|used| used.peak);
        let summary = json!({
            "recipe": name,
            "model": self.model,
            "steps": step,
            "final_train_loss": metrics.last_train_loss(name),
            "final_val_loss": val_loss,
            "perplexity": val_loss.map(f64::exp).filter(|_| self.task == Task::LanguageModel),
            "accuracy": accuracy,
            "written_val_loss": judgement.loss,
            "written_perplexity": judgement.loss.map(f64::exp).filter(|_| self.task == Task::LanguageModel),
            "written_accuracy": judgement.accuracy,
            "labels": self.labels,
            "skipped_steps": metrics.skipped_steps(name),
            "median_step_ms": ms,
            "tokens_per_s": speed,
            "trained_parameters": vars.iter().map(|var| var.elem_count()).sum::<usize>(),
            "converted_layers": self.trainer.report().map_or(0, fp8::PrepareReport::converted),
            "peak_memory": peak,
            "written": written,
            "settings": settings,
        });
        let unit = match self.task {
            Task::LanguageModel => "cross entropy per token (nats)",
            Task::Classification => "cross entropy per text (nats)",
            _ => "cross entropy per query (nats)",
        };
        if !settings.card.no_card {
            self.write_card(written, metrics, &judgement)?;
        }
        // Last: a run with a summary is finished.
        self.folder.finish(&summary, metrics, &[name], unit)?;
        if val_loss.is_none()
            && let Some(loss) = self.trained
        {
            print(&format!("step {step:>5}  train {loss:.4}\n"))?;
        }
        if let Some(loss) = val_loss {
            let train = self
                .trained
                .map_or(String::new(), |loss| format!("train {loss:.4}  "));
            let judged = judged(self.task, loss, accuracy);
            print(&format!("step {step:>5}  {train}validation {judged}\n"))?;
        }
        if let Some(loss) = judgement.loss.filter(|_| self.in_fp8()) {
            let judged = judged(self.task, loss, judgement.accuracy);
            print(&format!(
                "as written, without the recipe: validation {judged}\n"
            ))?;
        }
        if let Some(peak) = peak {
            let peak = size(peak);
            print(&format!("{ms:.0} ms a step, at most {peak} of memory\n"))?;
        }
        let before = metrics.validation_curve(name).first().copied();
        // By at least what the message shows.
        if let (Some((0, before)), Some(after)) = (before, judgement.loss)
            && after - before >= 1e-4
        {
            eprintln!(
                "warning: training has raised the validation loss from {before:.4} to {after:.4}; a lower --lr or more data may help"
            );
        }
        let written = self.folder.path().join(written);
        print(&format!("written: {}\n", written.display()))
    }

    /// Whether validations ran in FP8, although what is written does not ask for it.
    fn in_fp8(&self) -> bool {
        (self.trainer.report()).is_some_and(|report| report.converted() > 0)
    }

    /// The judgement of what is written, which the run's recipe does not belong to: another validation if the others ran in FP8.
    fn judge_written(&mut self, val_loss: Option<f64>, accuracy: Option<f64>) -> Result<Judgement> {
        let as_they_are = self.settings.operands().is_none();
        if val_loss.is_none() || (as_they_are && !self.in_fp8()) {
            return Ok(Judgement {
                loss: val_loss,
                accuracy,
            });
        }
        self.trainer.model_mut().set_operands(None);
        let loss = self.trainer.validate_high_precision()?;
        let accuracy = accuracy.and(self.trainer.accuracy());
        Ok(Judgement { loss, accuracy })
    }

    /// Writes the card into the folder of what was trained.
    fn write_card(&self, written: &str, metrics: &Metrics, judgement: &Judgement) -> Result<()> {
        let (settings, dir) = (self.settings, self.folder.path().join(written));
        let relation = match written {
            ADAPTER_DIR => Relation::Adapter,
            _ => Relation::Finetune,
        };
        let on = |path: &Path| Source::of(path).on(settings.device);
        let base = on(self.model);
        let made = match relation {
            Relation::Adapter => on(self.model).with_adapter(&dir),
            _ => on(&dir),
        };
        let card = (settings.card).begin(self.model, self.folder.path(), relation)?;
        let recipe = match settings.lora {
            Some(rank) => format!("adapters of rank {rank}; the base as its file says"),
            None => {
                let rounded = match settings.weight_rounding.is_nearest() {
                    true => "",
                    false => ", weights rounded at random",
                };
                let last = settings.finish;
                let last = last.map(|last| format!("; the last {last} steps without it"));
                format!("{}{rounded}{}", settings.name(), last.unwrap_or_default())
            }
        };
        let learned = match self.task {
            Task::LanguageModel => "the next token".to_string(),
            Task::Classification => format!("the labels {}", self.labels.join(", ")),
            _ => "which text belongs to a query".to_string(),
        };
        let mut card = card
            .with_command(self.command)
            .with_fact("Learned", learned)
            .with_fact("Recipe", recipe)
            .with_fact("Steps", self.trainer.step().to_string());
        if settings.lora.is_some() {
            card = card.with_tags(["lora"]);
        }
        if self.task == Task::Embedding {
            card = card.with_tags(["sentence-transformers", "feature-extraction"]);
        }
        if let Some(report) = self.trainer.report() {
            let converted = report.converted();
            card = card.with_fact("Layers trained in FP8", converted.to_string());
        }
        let curve = metrics.validation_curve(settings.name());
        if let (Some(first), Some(last)) = (curve.first(), judgement.loss) {
            let before = (first.0 == 0).then_some(first.1);
            card = card.with_measure(Measure::new("Validation loss", before, last));
            if self.task == Task::LanguageModel {
                let before = before.map(f64::exp);
                let perplexity = Measure::new("Validation perplexity", before, last.exp());
                card = card.with_measure(perplexity);
            }
        }
        if let Some(accuracy) = judgement.accuracy {
            card = card.with_measure(Measure::new("Validation accuracy", None, accuracy));
        }
        let card = (settings.card).measure(card, (&base, &made), self.asked)?;
        card.write(&dir)?;
        Ok(())
    }

    /// Writes what was trained; returns the name of its folder.
    fn write_model(&self) -> Result<&'static str> {
        let Some(source) = self.source else {
            let dir = self.folder.path().join(ADAPTER_DIR);
            self.trainer.model().save_adapter(self.adapter, dir)?;
            return Ok(ADAPTER_DIR);
        };
        let trained = Trained::new(source, self.trainer.vars())?;
        let options = WriteOptions::new().with_overwrite(true);
        let dir = self.folder.path().join(MODEL);
        let classifier = (!self.labels.is_empty()).then(|| Classifier::new(&trained, self.labels));
        let source: &dyn rewrite::Source = match &classifier {
            Some(classifier) => classifier,
            None => &trained,
        };
        rewrite::dequantize(source, dir, DType::F32, &options, &mut rewrite::quiet)?;
        Ok(MODEL)
    }
}
