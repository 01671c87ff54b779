//! The metadata of a GGUF file: typed entries, and the sizes of the model.

use super::GgufError;
use candle_core::quantized::gguf_file::Value as Entry;
use std::collections::HashMap;
use std::path::PathBuf;

/// Sizes of the model by the metadata.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dimensions {
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

/// The entries of a file.
#[derive(Debug)]
pub(super) struct Metadata {
    /// The file, for messages.
    pub(super) path: PathBuf,
    pub(super) entries: HashMap<String, Entry>,
    /// `general.architecture`, with which the keys of an architecture begin.
    pub(super) prefix: String,
}

impl Metadata {
    /// The full key of an entry of this architecture: `llama.block_count` for `block_count`.
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(super) fn error(&self, key: &str, expected: &'static str) -> GgufError {
        let value = match self.entries.get(key) {
            None => "missing".to_string(),
            Some(Entry::Array(values)) => format!("an array of {}", values.len()),
            Some(value) => format!("{value:?}"),
        };
        GgufError::Metadata {
            path: self.path.clone(),
            key: key.to_string(),
            value,
            expected,
        }
    }

    /// A whole number of any stored type; `None` if the entry is missing.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>, GgufError> {
        let number = match self.entries.get(key) {
            None => return Ok(None),
            Some(Entry::I8(v)) => u64::try_from(*v).ok(),
            Some(Entry::I16(v)) => u64::try_from(*v).ok(),
            Some(Entry::I32(v)) => u64::try_from(*v).ok(),
            Some(Entry::I64(v)) => u64::try_from(*v).ok(),
            Some(Entry::U16(v)) => Some(u64::from(*v)),
            Some(value) => value.to_u64().ok(),
        };
        // No model is larger, and products of two such numbers fit in usize.
        let number = number.filter(|&number| number < 1 << 31);
        match number {
            Some(number) => Ok(Some(number as usize)),
            None => Err(self.error(key, "a whole number")),
        }
    }

    /// A finite number: the shortest decimal that rounds to the stored f32, which is what was written before it became f32.
    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.entries.get(key) {
            None => Ok(None),
            Some(Entry::F32(value)) if value.is_finite() => Ok(value.to_string().parse().ok()),
            Some(Entry::F64(value)) if value.is_finite() => Ok(Some(*value)),
            Some(_) => Err(self.error(key, "a finite number")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.entries.get(key) {
            None => Ok(None),
            Some(Entry::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.error(key, "a text")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.entries.get(key) {
            None => Ok(None),
            Some(Entry::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(self.error(key, "true or false")),
        }
    }

    pub(super) fn array(&self, key: &str) -> Result<&[Entry], GgufError> {
        match self.entries.get(key) {
            Some(Entry::Array(values)) => Ok(values),
            _ => Err(self.error(key, "an array")),
        }
    }

    pub(super) fn texts(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        let texts = self.array(key)?.iter().map(|value| match value {
            Entry::String(text) => Ok(text.as_str()),
            _ => Err(self.error(key, "an array of texts")),
        });
        texts.collect()
    }

    pub(super) fn unsupported(&self, what: String) -> GgufError {
        let path = self.path.clone();
        GgufError::UnsupportedModel { path, what }
    }

    /// Reads and checks the sizes of the model.
    pub(super) fn dimensions(&self) -> Result<Dimensions, GgufError> {
        let needed = |name: &str| -> Result<usize, GgufError> {
            let key = self.key(name);
            match self.count(&key)? {
                Some(value) if value > 0 => Ok(value),
                _ => Err(self.error(&key, "a whole number above 0")),
            }
        };
        let optional = |name: &str| self.count(&self.key(name));
        let heads = needed("attention.head_count")?;
        let kv_heads = optional("attention.head_count_kv")?.unwrap_or(heads);
        let hidden = needed("embedding_length")?;
        let head_dim = match optional("attention.key_length")? {
            Some(length) => length,
            None if hidden % heads == 0 => hidden / heads,
            None => 0,
        };
        if kv_heads == 0 || heads % kv_heads != 0 {
            let key = self.key("attention.head_count_kv");
            return Err(self.error(&key, "a divisor of the number of heads"));
        }
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(self.error(&self.key("attention.key_length"), "an even number"));
        }
        let values = optional("attention.value_length")?.unwrap_or(head_dim);
        let turned = optional("rope.dimension_count")?.unwrap_or(head_dim);
        if values != head_dim || turned != head_dim {
            let what = format!(
                "heads with {head_dim} elements of keys, {values} of values and {turned} turned by their position"
            );
            return Err(self.unsupported(what));
        }
        if let Some(experts) = optional("expert_count")?.filter(|&count| count > 0) {
            return Err(self.unsupported(format!("a mixture of {experts} experts")));
        }
        Ok(Dimensions {
            layers: needed("block_count")?,
            hidden,
            intermediate: needed("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
        })
    }
}
