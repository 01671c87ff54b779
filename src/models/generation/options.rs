//! How tokens are chosen, and when to stop.

use super::unused;
use crate::models::error::{Error, TextError};
use crate::models::files::{Entries, read_json};
use crate::models::text::Tokenizer;
use fp8_core::setters;
use serde_json::Value;
use std::path::Path;

/// transformers' `top_k` of files without one, or with null.
const TOP_K: usize = 50;

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
    /// The maximum number of tokens after the prompt; 128 by default.
    pub max_new_tokens: usize,
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Draws only from this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Draws only from the likeliest tokens whose probabilities add up to this; together with `top_k`, the probabilities among those that it
    /// leaves.
    pub top_p: Option<f64>,
    /// Divides positive logits of earlier tokens and multiplies negative ones; 1 has no effect.
    pub repetition_penalty: f32,
    /// The penalty looks at this many of the last tokens, prompt included; `None` looks at all.
    pub repetition_window: Option<usize>,
    /// Row `i` of a batch draws with the seed `seed + i`.
    pub seed: u64,
    /// A row ends with one of these tokens, which is the last of its output. If empty, the model's own end tokens apply
    /// ([`CausalLm::eos_tokens`](crate::models::CausalLm::eos_tokens)).
    pub stop_tokens: Vec<u32>,
    /// Without stop tokens, also ignore the end tokens of the model and of the tokenizer.
    pub ignore_eos: bool,
    /// A text ends before the first of these. It applies where there is text: in [`generate_text`](crate::models::generate_text) and in a
    /// [`Server`](crate::serving::Server) with a tokenizer.
    pub stop_strings: Vec<String>,
    /// Capacity of the cache in tokens per row; `None`: as many as prompt and new tokens need, up to the model's positions. A [`Server`](crate::serving::Server) always
    /// takes as many.
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

setters! { GenerationOptions:
    /// Sets the number of tokens after the prompt.
    with_max_new_tokens(max_new_tokens: usize);
    /// Sets the temperature; 0 takes the likeliest token.
    with_temperature(temperature: f64);
    /// Sets how many of the likeliest tokens to draw from.
    with_top_k(top_k: Option<usize>);
    /// Sets the total probability of the tokens to draw from.
    with_top_p(top_p: Option<f64>);
    /// Sets the seed of the draws.
    with_seed(seed: u64);
    /// Sets the tokens that end a row.
    with_stop_tokens(stop_tokens: impl Into<Vec<u32>>);
    /// Sets [`GenerationOptions::ignore_eos`].
    with_ignore_eos(ignore_eos: bool);
    /// Sets the texts that end a row.
    with_stop_strings(stop_strings: impl Into<Vec<String>>);
    /// Sets the capacity of the cache in tokens per row.
    with_cache_capacity(cache_capacity: Option<usize>);
}

impl GenerationOptions {
    /// Ends rows with the tokenizer's end tokens, unless the options say otherwise.
    pub(crate) fn end_as(&mut self, tokenizer: &Tokenizer) {
        if self.stop_tokens.is_empty() && !self.ignore_eos {
            self.stop_tokens = tokenizer.eos().to_vec();
        }
    }

    /// Whether tokens are drawn at random. At a temperature of 0, or so near to it that logits would overflow, the likeliest token is taken, and
    /// top-k, top-p and the seed have no effect.
    pub fn draws(&self) -> bool {
        self.temperature >= 1e-7
    }

    /// Sets the penalty for earlier tokens, and how many of the last tokens count (`None`: all).
    pub fn with_repetition_penalty(mut self, penalty: f32, window: Option<usize>) -> Self {
        self.repetition_penalty = penalty;
        self.repetition_window = window;
        self
    }

    /// Reads the options from `generation_config.json` in a model's directory; the defaults if there is none. End tokens that it does
    /// not name come from `config.json`. Sampling is on if `do_sample` is true.
    ///
    /// # Errors
    /// If an existing file cannot be read, and as [`GenerationOptions::from_json`].
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let path = dir.join("generation_config.json");
        let mut options = match read_json(&path)? {
            Some(json) => Self::from_json(&json, &path)?,
            None => Self::default(),
        };
        if options.stop_tokens.is_empty() {
            let path = dir.join("config.json");
            if let Some(json) = read_json(&path)? {
                options.stop_tokens = Entries::new(&path, &json).token_ids("eos_token_id")?;
            }
        }
        Ok(options)
    }

    /// Reads the options from the content of a `generation_config.json`; `path` is for messages. Missing and null entries leave the
    /// default; temperature, top-k and top-p apply only if `do_sample` is true, as in transformers. Without a temperature it is 1 then; without a
    /// top-k it is 50, and a top-k of 0 leaves all tokens. A warning names entries that would change
    /// tokens in transformers and have no effect here, such as `min_p`, `no_repeat_ngram_size` and `suppress_tokens`, once for each path.
    ///
    /// # Errors
    /// [`Error::Config`] for an entry of the wrong type, [`TextError::Option`] for an invalid value.
    pub fn from_json(json: &Value, path: &Path) -> Result<Self, Error> {
        let entries = Entries::new(path, json);
        let number = |key| entries.read(key, "a number", Value::as_f64);
        let stop_strings = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            value => {
                let texts = value.as_array()?.iter();
                texts.map(|text| Some(text.as_str()?.to_string())).collect()
            }
        };
        let stop_strings =
            entries.read("stop_strings", "a text or a list of texts", stop_strings)?;
        let own = Self::default();
        let penalty = number("repetition_penalty")?.map(|penalty| penalty as f32);
        let mut options = Self {
            max_new_tokens: (entries.count("max_new_tokens")?).unwrap_or(own.max_new_tokens),
            repetition_penalty: penalty.unwrap_or(own.repetition_penalty),
            stop_tokens: entries.token_ids("eos_token_id")?,
            stop_strings: stop_strings.unwrap_or_default(),
            ..own
        };
        let draws = entries.flag("do_sample", false)?;
        if draws {
            options.temperature = number("temperature")?.unwrap_or(1.0);
            // As in transformers since 5.0; before, null left all tokens.
            let top_k = entries.count("top_k")?.unwrap_or(TOP_K);
            options.top_k = Some(top_k).filter(|&k| k > 0);
            options.top_p = number("top_p")?.filter(|&p| p < 1.0);
        }
        options.check()?;
        unused::warn(json, draws, path);
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
        if let Some(p) = self.top_p.filter(|&p| !(p > 0.0 && p <= 1.0)) {
            let expected = "a probability above 0 and at most 1";
            return wrong("top_p", p.to_string(), expected);
        }
        if !self.repetition_penalty.is_finite() || self.repetition_penalty <= 0.0 {
            let value = self.repetition_penalty.to_string();
            return wrong("repetition_penalty", value, "a finite number above 0");
        }
        if self.stop_strings.iter().any(String::is_empty) {
            let expected = "texts that are not empty";
            return wrong("stop_strings", "\"\"".to_string(), expected);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(json: Value) -> Result<GenerationOptions, Error> {
        GenerationOptions::from_json(&json, Path::new("generation_config.json"))
    }

    #[test]
    fn sampling_settings_apply_only_with_do_sample() -> Result<(), Error> {
        let greedy = read(json!({ "temperature": 0.6, "top_k": 20, "eos_token_id": 7 }))?;
        let expected = GenerationOptions::default().with_stop_tokens([7]);
        assert_eq!(greedy, expected);
        let json = json!({ "do_sample": true, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "max_new_tokens": 5 });
        let sampled = read(json)?;
        let expected = GenerationOptions::default()
            .with_temperature(0.6)
            .with_max_new_tokens(5);
        assert_eq!(sampled, expected);
        // A file says nothing of transformers' default.
        let top_k = |json| Ok::<_, Error>(read(json)?.top_k);
        assert_eq!(top_k(json!({ "do_sample": true }))?, Some(50));
        assert_eq!(
            top_k(json!({ "do_sample": true, "top_k": null }))?,
            Some(50)
        );
        assert_eq!(top_k(json!({ "do_sample": true, "top_k": 0 }))?, None);
        assert_eq!(top_k(json!({ "do_sample": true, "top_k": 20 }))?, Some(20));
        assert_eq!(top_k(json!({}))?, None);
        Ok(())
    }

    #[test]
    fn invalid_entries_are_refused_by_name() {
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
