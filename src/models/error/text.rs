//! Errors of generation and of text.

use std::path::PathBuf;

/// An error of tokenizing, chat templates or generation.
///
/// ```
/// use fp8::models::{GenerationOptions, TextError};
/// let error = GenerationOptions::default().with_top_p(Some(2.)).check().unwrap_err();
/// assert!(matches!(error, TextError::Option { option: "top_p", .. }));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// An option of generation has an invalid value.
    #[error("{option} is {value}: expected {expected}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// The values that it can have.
        expected: &'static str,
    },

    /// A prompt has no tokens, so there is nothing to continue.
    #[error("prompt {prompt} has no tokens")]
    EmptyPrompt {
        /// Its position among the prompts.
        prompt: usize,
    },

    /// A prompt has a token that is not in the model's vocabulary.
    #[error("prompt {prompt} holds token {token}, and the model has {vocab_size} tokens")]
    UnknownToken {
        /// The prompt's position.
        prompt: usize,
        /// The token's number.
        token: u32,
        /// Number of the model's tokens.
        vocab_size: usize,
    },

    /// A prompt has more tokens than the model has positions.
    #[error("prompt {prompt} has {tokens} tokens, and the model has {positions} positions")]
    TooManyTokens {
        /// Which prompt.
        prompt: usize,
        /// Its tokens.
        tokens: usize,
        /// The model's positions.
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

    /// A logit is NaN or +Inf, or all are -Inf: no token can be chosen.
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

    /// `tokenizer.json` is malformed, or encoding or decoding failed.
    #[error("{path}: {reason}", path = .path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// The message of the crate `tokenizers`.
        reason: String,
    },

    /// The model's files have no chat template.
    #[error("{path}: the model has no chat template: use an instruct model, or add `chat_template` to its tokenizer_config.json", path = .path.display())]
    NoChatTemplate {
        /// The directory of the model.
        path: PathBuf,
    },

    /// The chat template does not compile or rejects these messages.
    #[error("{path}: the chat template fails: {reason}", path = .path.display())]
    ChatTemplate {
        /// The file that has it.
        path: PathBuf,
        /// The template's message, or the bound that it exceeded.
        reason: String,
    },
}
