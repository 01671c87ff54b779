//! The tokenizer of a model's directory, with its special tokens and chat template.

use super::caught::caught;
use super::chat::{
    ChatMessage, SpecialTokens, chat_template, special, special_tokens, with_special_tokens,
};
use super::template::{self, Template};
use crate::models::error::{Error, GgufError, TextError};
use crate::models::files::gguf::GgufFile;
use crate::models::files::{Entries, read_json};
use crate::read::{read_text, read_text_if_present};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokenizers::{PostProcessor, TruncationParams};

/// `tokenizer.json` of a model's directory, with its special tokens and chat template.
///
/// ```no_run
/// use fp8::models::{ChatMessage, Tokenizer};
///
/// let tokenizer = Tokenizer::open("model")?;
/// let ids = tokenizer.encode("In the beginning", true)?;
/// println!("{}", tokenizer.decode(&ids, true)?);
/// let chat = tokenizer.chat(&[ChatMessage::new("user", "Hello!")])?;
/// println!("{:?}", tokenizer.encode(&chat, false)?);
/// # Ok::<(), fp8::models::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// `tokenizer.json`, or a GGUF file.
    path: PathBuf,
    bos: Option<u32>,
    eos: Vec<u32>,
    chat_template: Option<Template>,
    /// As text, for the chat template.
    special: SpecialTokens,
}

/// Bytes of the longest `tokenizer.json`. Those of 262,000 tokens have 35 million.
pub(crate) const MAX_TOKENIZER: u64 = 256 << 20;

impl Tokenizer {
    /// Reads `tokenizer.json` of a directory. Special tokens come from `tokenizer_config.json`, in files of older versions of
    /// transformers from `special_tokens_map.json`, ids of end tokens from
    /// `generation_config.json`, else `config.json`, else `tokenizer_config.json`; the chat template from `chat_template.jinja` or
    /// `tokenizer_config.json`. Each of these files may be missing. Padding and truncation in `tokenizer.json` are turned off, so that a
    /// text keeps exactly its own tokens.
    ///
    /// # Errors
    /// If a file cannot be read or is malformed; the error names the file.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let path = dir.join("tokenizer.json");
        let text = read_text(&path, MAX_TOKENIZER)?;
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or(Value::Null);
        let map = read_json(&dir.join("special_tokens_map.json"))?.unwrap_or(Value::Null);
        let config = with_special_tokens(config, &map);
        let jinja = dir.join("chat_template.jinja");
        let chat_template = match read_text_if_present(&jinja, template::MAX_SOURCE as u64)? {
            Some(source) => Some(Template::new(jinja, source)),
            None => chat_template(&config).map(|source| Template::new(config_path, source)),
        };
        let mut tokenizer = Self::of_json(path, &text, &config)?;
        tokenizer.chat_template = chat_template;
        let mut eos = vec![];
        for name in ["generation_config.json", "config.json"] {
            let path = dir.join(name);
            let json = read_json(&path)?.unwrap_or(Value::Null);
            let entries = Entries::new(&path, &json);
            if eos.is_empty() {
                eos = entries.token_ids("eos_token_id")?;
            }
            if tokenizer.bos.is_none() {
                tokenizer.bos = entries.token_ids("bos_token_id")?.first().copied();
            }
        }
        if !eos.is_empty() {
            tokenizer.eos = eos;
        }
        Ok(tokenizer)
    }

    /// The tokenizer in a GGUF file, with its special tokens and chat template.
    ///
    /// # Errors
    /// [`GgufError`], also for unsupported kinds of tokenizers.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, GgufError> {
        let (config, path) = (file.tokenizer_config()?, file.path().to_path_buf());
        let chat_template =
            chat_template(&config).map(|source| Template::new(path.clone(), source));
        let eos = file.end_tokens()?;
        Ok(Self {
            eos,
            ..Self::new(file.tokenizer()?, path, &config, chat_template)
        })
    }

    /// The tokenizer of a `tokenizer.json` and a `tokenizer_config.json`, without a chat template; `path` is for messages.
    pub(crate) fn of_json(path: PathBuf, json: &str, config: &Value) -> Result<Self, TextError> {
        let mut inner = guarded(&path, || load(json))?;
        inner.with_padding(None);
        guarded(&path, || inner.with_truncation(None).map(|_| ()))?;
        Ok(Self::new(inner, path, config, None))
    }

    /// With the special tokens of `config`, a `tokenizer_config.json`.
    fn new(
        inner: tokenizers::Tokenizer,
        path: PathBuf,
        config: &Value,
        chat_template: Option<Template>,
    ) -> Self {
        let id = |key: &str| inner.token_to_id(&special(config, key)?);
        Self {
            bos: id("bos_token"),
            eos: id("eos_token").into_iter().collect(),
            inner,
            path,
            chat_template,
            special: special_tokens(config),
        }
    }

    /// The tokens of a text; with `special_tokens` also those that the tokenizer adds around it.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn encode(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = guarded(&self.path, || self.inner.encode_fast(text, special_tokens))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The same tokenizer, truncating texts to `tokens` tokens, including those that it adds around a text.
    ///
    /// # Errors
    /// [`TextError::Option`] if the added tokens leave no room.
    pub fn with_max_tokens(mut self, tokens: usize) -> Result<Self, TextError> {
        let added = self.inner.get_post_processor();
        let added = added.map_or(0, |processor| processor.added_tokens(false));
        if tokens <= added {
            return Err(TextError::Option {
                option: "the number of tokens",
                value: tokens.to_string(),
                expected: "more than those that the tokenizer puts around a text",
            });
        }
        let truncation = TruncationParams {
            max_length: tokens,
            ..TruncationParams::default()
        };
        let inner = &mut self.inner;
        guarded(&self.path, || {
            inner.with_truncation(Some(truncation)).map(|_| ())
        })?;
        Ok(self)
    }

    /// The text of tokens, without special tokens if `skip_special_tokens`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        guarded(&self.path, || self.inner.decode(ids, skip_special_tokens))
    }

    /// The token that begins a text, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end a text: often one, empty if unknown.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// The id of a token; `None` if there is no such token.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, including those added to the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Whether [`Tokenizer::chat`] can write a chat.
    pub fn has_chat_template(&self) -> bool {
        self.chat_template.is_some()
    }

    /// Formats a chat with the model's template, up to where the model's answer begins. The result contains the special tokens: encode it
    /// without adding any.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`], and [`TextError::ChatTemplate`] for a template that does not compile or rejects these messages.
    pub fn chat(&self, messages: &[ChatMessage]) -> Result<String, TextError> {
        self.rendered(messages, true)
    }

    /// Formats a chat with the model's template as it is after the last message, as text to train on.
    ///
    /// # Errors
    /// As [`Tokenizer::chat`].
    pub fn transcript(&self, messages: &[ChatMessage]) -> Result<String, TextError> {
        self.rendered(messages, false)
    }

    fn rendered(&self, messages: &[ChatMessage], answer: bool) -> Result<String, TextError> {
        let Some(template) = &self.chat_template else {
            // The folder, or the GGUF file.
            let folder = self
                .path
                .parent()
                .filter(|_| self.path.ends_with("tokenizer.json"));
            let path = folder.unwrap_or(&self.path).to_path_buf();
            return Err(TextError::NoChatTemplate { path });
        };
        template.render(messages, answer, &self.special)
    }

    /// The text of the end token, empty if unknown: what a chat template writes as `eos_token`.
    pub(crate) fn eos_text(&self) -> &str {
        let text = self.special.get("eos_token").and_then(Value::as_str);
        text.unwrap_or_default()
    }

    /// The underlying tokenizer.
    pub fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }
}

/// Parses JSON first: the crate panics on text that is not JSON.
fn load(text: &str) -> tokenizers::Result<tokenizers::Tokenizer> {
    serde_json::from_str::<serde::de::IgnoredAny>(text)?;
    tokenizers::Tokenizer::from_bytes(text)
}

/// Calls the crate `tokenizers`, which may panic, and names the file at `path` in errors.
fn guarded<T>(path: &Path, call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TextError> {
    let reason = match caught(call) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(message) => format!("the tokenizer contradicts itself: {message}"),
    };
    Err(TextError::Tokenizer {
        path: path.to_path_buf(),
        reason,
    })
}
