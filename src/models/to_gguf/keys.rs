//! Entries of the metadata.

use candle_core::quantized::gguf_file::Value;

/// Entries whose keys begin with the architecture.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) architecture: &'static str,
    pub(super) entries: Vec<(String, Value)>,
}

impl Keys {
    pub(super) fn set(&mut self, key: &str, value: Value) {
        let key = format!("{}.{key}", self.architecture);
        self.entries.push((key, value));
    }

    /// Sizes are below 2^32: `Entries` bounds them.
    pub(super) fn count(&mut self, key: &str, count: usize) {
        self.set(key, Value::U32(u32::try_from(count).unwrap_or(u32::MAX)));
    }

    pub(super) fn float(&mut self, key: &str, value: f64) {
        self.set(key, Value::F32(value as f32));
    }
}
