//! A BERT encoder with a classifier, as transformers' `BertForSequenceClassification` has it.

use super::source::Source;
use crate::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::Granularity;
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// The prefix of all names but the classifier's in that class.
const BASE: &str = "bert.";

/// Whether a layer computes classes or their features.
pub(super) fn is_classification(path: &str) -> bool {
    ["classifier", "pooler.dense", "bert.pooler.dense"].contains(&path)
}

/// An encoder with the tensors `classifier.weight` and `classifier.bias` under the names and with the configuration of transformers'
/// `BertForSequenceClassification`: `bert.` before all other names, and the names of the classes.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::load::Checkpoint;
/// use fp8::rewrite::{Classifier, Source};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::plain_model(dir.path());
/// let encoder = Checkpoint::open_dir(dir.path())?;
/// let classifier = Classifier::new(&encoder, &["bad".into(), "good".into()]);
/// assert_eq!(classifier.config().unwrap()["id2label"]["1"], "good");
/// assert!(classifier.names().contains(&"bert.fc.weight".to_string()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Classifier<'a> {
    source: &'a dyn Source,
    config: Value,
    /// Whether the names of the source lack [`BASE`].
    adds: bool,
}

impl<'a> Classifier<'a> {
    /// The encoder of `source` for these classes, in the order of the classifier's rows.
    pub fn new(source: &'a dyn Source, labels: &[String]) -> Self {
        let mut config = source.config().cloned().unwrap_or_else(|| json!({}));
        if let Some(entries) = config.as_object_mut() {
            let numbered = labels.iter().enumerate();
            let names: Map<String, Value> = (numbered.clone())
                .map(|(number, label)| (number.to_string(), json!(label)))
                .collect();
            let numbers: Map<String, Value> = numbered
                .map(|(number, label)| (label.clone(), json!(number)))
                .collect();
            entries.insert(
                "architectures".into(),
                json!(["BertForSequenceClassification"]),
            );
            entries.insert("id2label".into(), names.into());
            entries.insert("label2id".into(), numbers.into());
            entries.insert("problem_type".into(), json!("single_label_classification"));
            // It follows from the names and must agree with them.
            entries.remove("num_labels");
        }
        let adds = !source.names().iter().any(|name| name.starts_with(BASE));
        Self {
            source,
            config,
            adds,
        }
    }

    /// The name in the source.
    fn own<'n>(&self, name: &'n str) -> &'n str {
        match self.adds {
            true => name.strip_prefix(BASE).unwrap_or(name),
            false => name,
        }
    }

    /// The name in the classifier.
    fn name(&self, own: String) -> String {
        match self.adds && !own.starts_with("classifier.") {
            true => format!("{BASE}{own}"),
            false => own,
        }
    }
}

impl Source for Classifier<'_> {
    fn names(&self) -> Vec<String> {
        let names = self.source.names().into_iter();
        names.map(|own| self.name(own)).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.source.shape(self.own(name))
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        self.source.dtype(self.own(name))
    }

    fn raw_dtype(&self, name: &str) -> Option<Dtype> {
        self.source.raw_dtype(self.own(name))
    }

    fn raw_bytes(&self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>> {
        self.source.raw_bytes(self.own(name), bytes)
    }

    fn is_fp8(&self, name: &str) -> bool {
        self.source.is_fp8(self.own(name))
    }

    fn codes(&self, name: &str, granularity: Granularity) -> Result<Option<Fp8Tensor>> {
        self.source.codes(self.own(name), granularity)
    }

    fn update(&self, name: &str) -> Result<Option<Tensor>> {
        self.source.update(self.own(name))
    }

    fn merged_adapters(&self) -> Result<Vec<String>> {
        self.source.merged_adapters()
    }

    fn value(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.source.value(self.own(name), dtype)
    }

    fn rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Option<Tensor>> {
        self.source.rows(self.own(name), rows, dtype)
    }

    fn config(&self) -> Option<&Value> {
        Some(&self.config)
    }

    fn directory(&self) -> Option<PathBuf> {
        self.source.directory()
    }

    fn files(&self) -> Result<BTreeMap<String, Value>> {
        self.source.files()
    }

    fn tied(&self) -> BTreeMap<String, String> {
        let tied = self.source.tied().into_iter();
        let tied = tied.map(|(name, stored)| (self.name(name), self.name(stored)));
        tied.collect()
    }
}

impl std::fmt::Debug for Classifier<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Classifier")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
