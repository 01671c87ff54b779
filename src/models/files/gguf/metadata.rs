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

/// The integer in an entry of any integer type.
pub(super) fn integer(entry: &Entry) -> Option<i64> {
    match entry {
        Entry::I8(value) => Some((*value).into()),
        Entry::I16(value) => Some((*value).into()),
        Entry::I32(value) => Some((*value).into()),
        Entry::I64(value) => Some(*value),
        entry => entry.to_u64().ok()?.try_into().ok(),
    }
}

/// In the keys that these methods take, a leading dot stands for the architecture: `.block_count` is `llama.block_count`.
impl Metadata {
    fn key(&self, key: &str) -> String {
        match key.starts_with('.') {
            true => format!("{}{key}", self.prefix),
            false => key.to_string(),
        }
    }

    pub(super) fn error(&self, key: &str, expected: &'static str) -> GgufError {
        let key = self.key(key);
        let value = match self.entries.get(&key) {
            None => "missing".to_string(),
            Some(Entry::Array(values)) => format!("an array of {}", values.len()),
            Some(value) => format!("{value:?}"),
        };
        GgufError::Metadata {
            path: self.path.clone(),
            key,
            value,
            expected,
        }
    }

    pub(super) fn unsupported(&self, what: String) -> GgufError {
        let path = self.path.clone();
        GgufError::UnsupportedModel { path, what }
    }

    /// An entry as `read` understands it; `None` if it is missing.
    fn entry<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Entry) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let entry = self.entries.get(&self.key(key)).map(read);
        match entry {
            Some(None) => Err(self.error(key, expected)),
            found => Ok(found.flatten()),
        }
    }

    /// A count below 2^31: no model has more of anything, and products of two counts fit in usize.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>, GgufError> {
        self.entry(key, "a whole number", |entry| {
            let number = integer(entry).filter(|number| *number < 1 << 31)?;
            usize::try_from(number).ok()
        })
    }

    /// A finite number. An f32 becomes the shortest decimal that rounds to it: the number that was written before it became f32.
    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.entry(key, "a finite number", |entry| match entry {
            Entry::F32(value) if value.is_finite() => value.to_string().parse().ok(),
            Entry::F64(value) if value.is_finite() => Some(*value),
            _ => None,
        })
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.entry(key, "a text", |entry| match entry {
            Entry::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.entry(key, "true or false", |entry| entry.to_bool().ok())
    }

    pub(super) fn array(&self, key: &str) -> Result<Option<&[Entry]>, GgufError> {
        self.entry(key, "an array", |entry| match entry {
            Entry::Array(values) => Some(values.as_slice()),
            _ => None,
        })
    }

    pub(super) fn texts(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        let array = self.array(key)?;
        let array = array.ok_or_else(|| self.error(key, "an array"))?;
        let texts = array.iter().map(|value| match value {
            Entry::String(text) => Ok(text.as_str()),
            _ => Err(self.error(key, "an array of texts")),
        });
        texts.collect()
    }

    /// Reads and checks the sizes of the model.
    pub(super) fn dimensions(&self) -> Result<Dimensions, GgufError> {
        let needed = |key: &str| {
            let count = self.count(key)?.filter(|&count| count > 0);
            count.ok_or_else(|| self.error(key, "a whole number above 0"))
        };
        let heads = needed(".attention.head_count")?;
        let kv_heads = self.count(".attention.head_count_kv")?.unwrap_or(heads);
        let hidden = needed(".embedding_length")?;
        let head_dim = match self.count(".attention.key_length")? {
            Some(length) => length,
            None if hidden % heads == 0 => hidden / heads,
            None => 0,
        };
        if kv_heads == 0 || heads % kv_heads != 0 {
            return Err(self.error(
                ".attention.head_count_kv",
                "a divisor of the number of heads",
            ));
        }
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(self.error(".attention.key_length", "an even number"));
        }
        let values = self.count(".attention.value_length")?.unwrap_or(head_dim);
        let turned = self.count(".rope.dimension_count")?.unwrap_or(head_dim);
        if values != head_dim || turned != head_dim {
            let what = format!(
                "heads with {head_dim} elements of keys, {values} of values and {turned} turned by their position"
            );
            return Err(self.unsupported(what));
        }
        if let Some(experts) = self.count(".expert_count")?.filter(|&count| count > 0) {
            return Err(self.unsupported(format!("a mixture of {experts} experts")));
        }
        Ok(Dimensions {
            layers: needed(".block_count")?,
            hidden,
            intermediate: needed(".feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
        })
    }
}
