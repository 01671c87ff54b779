//! The accuracy of an encoder.

use crate::model::Source;
use crate::output::{print, print_json};
use crate::progress::{Bar, COUNT};
use crate::texts::{longest_of, warn_of_lost};
use anyhow::{Result, bail};
use candle_core::DType;
use fp8::models::{Bert, Model, Pooling};
use fp8::training::{
    Classify, Contrast, Dataset, DatasetOptions, Objective, Rows, Task, Validation,
};
use serde_json::json;
use std::path::Path;

/// Measures `bert`, the model of `source`, on the lines of the file `path`, `batch_size` at once.
pub fn run(source: &Source, bert: Bert, path: &Path, batch_size: usize, json: bool) -> Result<()> {
    let tokenizer = source.tokenizer()?;
    let files = vec![path.to_path_buf()];
    let longest = longest_of(source.path(), &bert)?;
    let options = DatasetOptions::new(longest)
        .with_labels(bert.labels().to_vec())
        .with_validation(Validation::Files(files.clone()));
    let data = Dataset::open(&files, &tokenizer, &options)?;
    warn_of_lost(path, data.summary(), longest);
    let (task, count) = (data.task(), data.validation_rows());
    let objective: Box<dyn Objective<Model, Batch = Rows>> = match task {
        Task::Classification => Box::new(Classify::new(data, batch_size)?),
        Task::Embedding => {
            let pooling = Pooling::of_dir(source.path())?;
            Box::new(Contrast::new(data, batch_size)?.with_pooling(pooling))
        }
        _ => bail!(
            "{}: an encoder is measured on lines of `text` and `label`, or of `query` and `positive`",
            path.display()
        ),
    };
    if objective.validation_batches() == 0 {
        bail!(
            "{}: a single query has no other text to choose from: expected at least 2 queries, or texts with a `negative`",
            path.display()
        );
    }
    let model = Model::Bert(bert);
    let mut bar = Bar::new("eval", COUNT)?;
    let (mut sum, mut hits, mut targets) = (0f64, 0, 0);
    for index in 0..objective.validation_batches() {
        if bar.at("", targets as u64, count as u64).is_break() {
            bail!("stopped after {targets} of {count} rows");
        }
        let batch = objective.validation_batch(index)?;
        let measured = objective.measure(&model, &batch)?;
        let loss = measured.loss.to_dtype(DType::F32)?.to_scalar::<f32>()?;
        let own = objective.targets(&batch);
        sum += f64::from(loss) * own as f64;
        hits += measured.hits.unwrap_or(0);
        targets += own;
    }
    drop(bar);
    let (loss, accuracy) = (sum / targets as f64, hits as f64 / targets as f64);
    if !loss.is_finite() {
        bail!("the logits are not finite");
    }
    if json {
        return print_json(&json!({
            "accuracy": accuracy,
            "loss": loss,
            "rows": targets,
            "batch": batch_size,
        }));
    }
    let of = match task {
        Task::Classification => "texts".to_string(),
        _ => format!("queries, each among the texts of {}", batch_size),
    };
    print(&format!(
        "accuracy {:.2}%, loss {loss:.5}, {targets} {of}\n",
        100. * accuracy
    ))
}
