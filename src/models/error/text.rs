//! Errors of generation and of text.

use std::path::PathBuf;

/// What can go wrong between a text and the tokens of a model, and in choosing tokens.
///
/// ```
/// use fp8::models::{GenerationOptions, TextError};
/// let error = GenerationOptions::default().with_top_p(Some(2.)).check().unwrap_err();
/// assert!(matches!(error, TextError::Option { option: "top_p", .. }));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// An option of generation has a value that means nothing.
    #[error("{option} is {value}: expected {expected}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// What it can be.
        expected: &'static str,
    },

    /// A prompt without tokens: there is nothing that a next token could follow.
    #[error("prompt {prompt} has no tokens")]
    EmptyPrompt {
        /// Its position among the prompts.
        prompt: usize,
    },

    /// A token that the model does not have.
    #[error("prompt {prompt} holds token {token}, and the model has {vocab_size} tokens")]
    UnknownToken {
        /// The prompt's position.
        prompt: usize,
        /// The token's number.
        token: u32,
        /// Number of the model's tokens.
        vocab_size: usize,
    },

    /// A prompt of more tokens than the model has positions for.
    #[error("prompt {prompt} has {tokens} tokens, and the model has {positions} positions")]
    TooManyTokens {
        /// Which prompt.
        prompt: usize,
        /// Its tokens.
        tokens: usize,
        /// What the model has.
        positions: usize,
    },

    /// Prompt and new tokens together do not fit into the cache.
    #[error(
        "prompt {prompt} has {tokens} tokens and {max_new_tokens} are to follow, but the cache holds {capacity}"
    )]
    CacheTooSmall {
        /// The prompt's position.
        prompt: usize,
        /// Its tokens.
        tokens: usize,
        /// Tokens that may follow.
        max_new_tokens: usize,
        /// What the cache holds.
        capacity: usize,
    },

    /// The model returned logits of another shape.
    #[error("the model returned logits of shape {actual:?}, expected {expected:?}")]
    LogitsShape {
        /// The shape returned.
        actual: Vec<usize>,
        /// `[batch, vocab]`.
        expected: Vec<usize>,
    },

    /// A logit is NaN or infinite upwards: no choice among them would mean anything.
    #[error("prompt {prompt}: the logit of token {token} is {value} after {position} tokens")]
    NotFinite {
        /// The prompt's position.
        prompt: usize,
        /// The token whose logit it is.
        token: usize,
        /// The logit.
        value: f32,
        /// Tokens before it, those of the prompt included.
        position: usize,
    },

    /// A file cannot be read, is longer than any of its kind, or is none: a named pipe, a device.
    #[error(transparent)]
    File(Box<crate::Error>),

    /// A JSON file is broken, or an entry of it is of another kind.
    #[error("{path}: {reason}", path = .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The entry and what is wrong with it.
        reason: String,
    },

    /// `tokenizer.json` is broken, or encoding or decoding failed.
    #[error("{path}: {reason}", path = .path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// The tokenizer's own words.
        reason: String,
    },

    /// A chat was to be written in the model's form, and the files have none.
    #[error("{path}: the model has no chat template", path = .path.display())]
    NoChatTemplate {
        /// The directory of the model.
        path: PathBuf,
    },

    /// The chat template does not compile or does not take these messages.
    #[error("{path}: the chat template fails: {reason}", path = .path.display())]
    ChatTemplate {
        /// The file that has it.
        path: PathBuf,
        /// The template's own words, or which bound it went beyond.
        reason: String,
    },
}

impl From<crate::Error> for TextError {
    fn from(error: crate::Error) -> Self {
        Self::File(error.into())
    }
}
