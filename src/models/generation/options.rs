//! How tokens are chosen, and when to stop.

use crate::models::error::TextError;
use crate::models::files::{read_json, token_ids};
use serde_json::Value;
use std::path::Path;

/// How [`generate`](crate::models::generate()) chooses tokens and when it stops. The default is greedy: always the likeliest token.
///
/// ```
/// use fp8::models::GenerationOptions;
///
/// let options = GenerationOptions::default()
///     .with_max_new_tokens(64)
///     .with_temperature(0.7)
///     .with_top_p(Some(0.9));
/// assert_eq!(options.top_k, None);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerationOptions {
    /// The most tokens after the prompt; 128 by default.
    pub max_new_tokens: usize,
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Draws only from this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Draws only from the likeliest tokens whose probabilities add up to this.
    pub top_p: Option<f64>,
    /// Divides positive logits of earlier tokens and multiplies negative ones; 1 has no effect.
    pub repetition_penalty: f32,
    /// The penalty looks at this many of the last tokens, prompt included; `None` looks at all.
    pub repetition_window: Option<usize>,
    /// Row `i` of a batch draws with the seed `seed + i`.
    pub seed: u64,
    /// A row ends with one of these tokens, which is the last of its output. If empty, the model's own end tokens count
    /// ([`CausalLm::eos_tokens`](crate::models::CausalLm::eos_tokens)).
    pub stop_tokens: Vec<u32>,
    /// Without stop tokens, also ignore the end tokens of the model.
    pub ignore_eos: bool,
    /// A text ends before one of these; used by [`generate_text`](crate::models::generate_text) only.
    pub stop_strings: Vec<String>,
    /// Capacity of the cache in tokens per row; `None`: as many as prompt and new tokens need.
    pub cache_capacity: Option<usize>,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self {
            max_new_tokens: 128,
            temperature: 0.0,
            top_k: None,
            top_p: None,
            repetition_penalty: 1.0,
            repetition_window: None,
            seed: 0,
            stop_tokens: vec![],
            ignore_eos: false,
            stop_strings: vec![],
            cache_capacity: None,
        }
    }
}

impl GenerationOptions {
    /// Sets the number of tokens after the prompt.
    pub fn with_max_new_tokens(mut self, max_new_tokens: usize) -> Self {
        self.max_new_tokens = max_new_tokens;
        self
    }

    /// Sets the temperature; 0 takes the likeliest token.
    pub fn with_temperature(mut self, temperature: f64) -> Self {
        self.temperature = temperature;
        self
    }

    /// Sets how many of the likeliest tokens to draw from.
    pub fn with_top_k(mut self, top_k: Option<usize>) -> Self {
        self.top_k = top_k;
        self
    }

    /// Sets the total probability of the tokens to draw from.
    pub fn with_top_p(mut self, top_p: Option<f64>) -> Self {
        self.top_p = top_p;
        self
    }

    /// Sets the penalty for earlier tokens, and how many of the last tokens count (`None`: all).
    pub fn with_repetition_penalty(mut self, penalty: f32, window: Option<usize>) -> Self {
        self.repetition_penalty = penalty;
        self.repetition_window = window;
        self
    }

    /// Sets the seed of the draws.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the tokens that end a row.
    pub fn with_stop_tokens(mut self, stop_tokens: impl Into<Vec<u32>>) -> Self {
        self.stop_tokens = stop_tokens.into();
        self
    }

    /// Sets [`GenerationOptions::ignore_eos`].
    pub fn with_ignore_eos(mut self, ignore_eos: bool) -> Self {
        self.ignore_eos = ignore_eos;
        self
    }

    /// Sets the texts that end a row.
    pub fn with_stop_strings(mut self, stop_strings: impl Into<Vec<String>>) -> Self {
        self.stop_strings = stop_strings.into();
        self
    }

    /// Sets the capacity of the cache in tokens per row.
    pub fn with_cache_capacity(mut self, capacity: Option<usize>) -> Self {
        self.cache_capacity = capacity;
        self
    }

    /// Reads the options from `generation_config.json` in a model's directory; the defaults if there is none. End tokens that it does
    /// not name come from `config.json`. Sampling is on if `do_sample` is true.
    ///
    /// # Errors
    /// [`TextError::File`] and [`TextError::Json`] for an existing file that cannot be read, [`TextError::Option`] for an invalid
    /// value.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self, TextError> {
        let dir = dir.as_ref();
        let path = dir.join("generation_config.json");
        let mut options = match read_json(&path)? {
            Some(json) => Self::from_json(&json, &path)?,
            None => Self::default(),
        };
        if options.stop_tokens.is_empty() {
            let path = dir.join("config.json");
            if let Some(json) = read_json(&path)? {
                options.stop_tokens = token_ids(&json, "eos_token_id", &path)?;
            }
        }
        Ok(options)
    }

    /// Reads the options from the content of a `generation_config.json`; `path` is for messages. Missing and null entries leave the
    /// default; temperature, top-k and top-p count only if `do_sample` is true, as in transformers.
    ///
    /// # Errors
    /// [`TextError::Json`] for an entry of the wrong type, [`TextError::Option`] for an invalid value.
    pub fn from_json(json: &Value, path: &Path) -> Result<Self, TextError> {
        let wrong = |key: &str, expected: &str| TextError::Json {
            path: path.to_path_buf(),
            reason: format!("`{key}` is {}, expected {expected}", json[key]),
        };
        let number = |key: &str| match &json[key] {
            Value::Null => Ok(None),
            value => value
                .as_f64()
                .map(Some)
                .ok_or_else(|| wrong(key, "a number")),
        };
        let count = |key: &str| match &json[key] {
            Value::Null => Ok(None),
            value => match value.as_u64().map(usize::try_from) {
                Some(Ok(value)) => Ok(Some(value)),
                _ => Err(wrong(key, "a whole number")),
            },
        };
        let samples = match &json["do_sample"] {
            Value::Null => false,
            value => value
                .as_bool()
                .ok_or_else(|| wrong("do_sample", "true or false"))?,
        };
        let mut options = Self::default();
        if let Some(tokens) = count("max_new_tokens")? {
            options.max_new_tokens = tokens;
        }
        if samples {
            options.temperature = number("temperature")?.unwrap_or(1.0);
            // transformers writes 0 for "all of them".
            options.top_k = count("top_k")?.filter(|&k| k > 0);
            options.top_p = number("top_p")?.filter(|&p| p < 1.0);
        }
        if let Some(penalty) = number("repetition_penalty")? {
            options.repetition_penalty = penalty as f32;
        }
        options.stop_tokens = token_ids(json, "eos_token_id", path)?;
        options.stop_strings = match &json["stop_strings"] {
            Value::Null => vec![],
            Value::String(text) => vec![text.clone()],
            value => value
                .as_array()
                .and_then(|texts| {
                    let texts = texts.iter().map(|text| text.as_str().map(str::to_string));
                    texts.collect()
                })
                .ok_or_else(|| wrong("stop_strings", "a text or a list of texts"))?,
        };
        options.check()?;
        Ok(options)
    }

    /// Rejects invalid values.
    ///
    /// # Errors
    /// [`TextError::Option`] naming the option and what it can be.
    pub fn check(&self) -> Result<(), TextError> {
        let wrong = |option, value: String, expected| {
            Err(TextError::Option {
                option,
                value,
                expected,
            })
        };
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            let value = self.temperature.to_string();
            return wrong("temperature", value, "a finite number that is at least 0");
        }
        if self.top_k == Some(0) {
            return wrong("top_k", "0".to_string(), "at least 1");
        }
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => {
                let expected = "a probability above 0 and at most 1";
                return wrong("top_p", p.to_string(), expected);
            }
            _ => {}
        }
        if !self.repetition_penalty.is_finite() || self.repetition_penalty <= 0.0 {
            let value = self.repetition_penalty.to_string();
            return wrong("repetition_penalty", value, "a finite number above 0");
        }
        if self.stop_strings.iter().any(String::is_empty) {
            return wrong(
                "stop_strings",
                "\"\"".to_string(),
                "texts that are not empty",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(json: Value) -> Result<GenerationOptions, TextError> {
        GenerationOptions::from_json(&json, Path::new("generation_config.json"))
    }

    #[test]
    fn settings_of_sampling_count_only_where_it_is_on() -> Result<(), TextError> {
        let greedy = read(json!({ "temperature": 0.6, "top_k": 20, "eos_token_id": 7 }))?;
        let expected = GenerationOptions::default().with_stop_tokens([7]);
        assert_eq!(greedy, expected);
        let json = json!({ "do_sample": true, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "max_new_tokens": 5 });
        let sampled = read(json)?;
        let expected = GenerationOptions::default()
            .with_temperature(0.6)
            .with_max_new_tokens(5);
        assert_eq!(sampled, expected);
        Ok(())
    }

    #[test]
    fn entries_that_mean_nothing_are_refused_by_name() {
        let cases = [
            (json!({ "do_sample": 1 }), "do_sample"),
            (
                json!({ "do_sample": true, "temperature": -1 }),
                "temperature",
            ),
            (json!({ "do_sample": true, "top_p": 0.0 }), "top_p"),
            (json!({ "do_sample": true, "top_k": -3 }), "top_k"),
            (json!({ "repetition_penalty": 0 }), "repetition_penalty"),
            (json!({ "eos_token_id": [1, "x"] }), "eos_token_id"),
            (json!({ "eos_token_id": 4294967296u64 }), "eos_token_id"),
            (json!({ "stop_strings": [""] }), "stop_strings"),
        ];
        for (json, name) in cases {
            let error = read(json.clone()).expect_err(name).to_string();
            assert!(error.contains(name), "{json}: {error}");
        }
    }
}
