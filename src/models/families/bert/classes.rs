//! Encoders that classify texts.

use super::Bert;
use super::config::label_name;
use super::head::{CLASSIFIER, Head, POOLER};
use crate::models::error::{Error, Result};
use crate::models::layers::{Projection, in_pool};
use crate::nn::Linear;
use candle_core::{DType, Device, Tensor};

/// A layer of zeros.
fn zeros(rows: usize, columns: usize, path: String, like: &Bert) -> Result<Projection> {
    let (dtype, device) = (like.words.embeddings().dtype(), &like.device);
    let weight = Tensor::zeros((rows, columns), dtype, device)?;
    let bias = Tensor::zeros(rows, dtype, device)?;
    Ok(Linear::new(weight, Some(bias)).with_path(path).into())
}

impl Bert {
    /// The names of the classes, in the order of the logits; empty without a classifier.
    pub fn labels(&self) -> &[String] {
        &self.config.labels
    }

    /// Whether the file has the pooler that a classifier needs.
    pub fn has_pooler(&self) -> bool {
        self.pooler.is_some() || self.head.is_some()
    }

    /// Removes the classifier and the pooler, so that the model computes features alone.
    pub fn remove_classifier(&mut self) {
        self.config.labels.clear();
        (self.head, self.pooler) = (None, None);
    }

    /// Gives the encoder a classifier for these classes, in place of any other. It is zero until an adapter with a classifier
    /// ([`AdapterConfig::saved`](crate::models::AdapterConfig::saved)) replaces it. The pooler is that of the file, or zero without one.
    /// `fp8::training` makes new ones to train.
    ///
    /// # Errors
    /// If the device has no memory for it.
    pub fn set_labels(&mut self, labels: Vec<String>) -> Result<()> {
        let hidden = self.config.hidden_size;
        let classifier = zeros(labels.len(), hidden, CLASSIFIER.to_string(), self)?;
        let old = self.head.take().map(|head| head.pooler);
        let pooler = match old.or_else(|| self.pooler.as_deref().cloned().map(Projection::from)) {
            Some(pooler) => pooler,
            None => zeros(hidden, hidden, format!("{}{POOLER}", self.prefix()), self)?,
        };
        self.config.labels = labels;
        self.head = Some(Box::new(Head { pooler, classifier }));
        Ok(())
    }

    /// Makes room for a classifier of an adapter. A model that has one keeps it: the adapter must have the same classes.
    pub(super) fn make_classes(&mut self, classes: usize, labels: &[String]) -> Result<()> {
        if self.head.is_some() {
            let own = &self.config.labels;
            let fits = own.len() == classes && (labels.is_empty() || labels == own.as_slice());
            return match fits {
                true => Ok(()),
                false => Err(Error::OtherClasses {
                    model: own.join(", "),
                    adapter: match labels.is_empty() {
                        true => format!("{classes} classes"),
                        false => labels.join(", "),
                    },
                }),
            };
        }
        let labels = match labels.len() == classes {
            true => labels.to_vec(),
            false => (0..classes).map(label_name).collect(),
        };
        self.set_labels(labels)
    }

    /// Logits of the classes of each text, `[batch, classes]` in f32; `ids` and `mask` as for [`Bert::forward`].
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8::models::{Bert, BertConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let json = serde_json::json!({
    ///     "model_type": "bert", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    ///     "num_attention_heads": 4, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "bad", "1": "good"},
    /// });
    /// let config = BertConfig::parse("config.json", &json)?;
    /// let model = Bert::new(&config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
    /// let ids = Tensor::new(&[[5u32, 6, 7]], &Device::Cpu)?;
    /// assert_eq!(model.classify(&ids, &ids.ones_like()?)?.dims(), [1, 2]);
    /// assert_eq!(model.labels(), ["bad", "good"]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoClassifier`], and as [`Bert::forward`].
    pub fn classify(&self, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let head = self.head.as_ref().ok_or(Error::NoClassifier)?;
        let device: &Device = &self.device;
        let logits = in_pool(device, || -> Result<Tensor> {
            head.forward(&self.forward(ids, mask)?)
        })?;
        Ok(logits.to_dtype(DType::F32)?)
    }
}
