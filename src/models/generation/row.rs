//! One prompt and what follows it: when it ends, and the choice of its tokens.

use super::options::GenerationOptions;
use super::sampling::Sampler;
use crate::models::error::{Result, TextError};
use crate::models::families::CausalLm;
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// A token that was just chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Token {
    /// Position of its prompt among the prompts.
    pub prompt: usize,
    /// Its position among the new tokens of the prompt.
    pub index: usize,
    /// The token.
    pub id: u32,
    /// Why it is the row's last token; None if it is not.
    pub finish: Option<FinishReason>,
}

/// Why a row ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// `max_new_tokens` were made.
    Length,
    /// The last token is one of the stop tokens.
    StopToken,
    /// One of the `stop_strings` appeared in the text.
    StopString,
    /// The model has no positions for more tokens ([`CausalLm::max_positions`]).
    Positions,
    /// The caller ended it.
    Stopped,
}

/// The continuation of one prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// The new tokens, a stop token included.
    pub tokens: Vec<u32>,
    /// Why they ended.
    pub finish: FinishReason,
}

/// Rejects a prompt that cannot be continued; `prompt` is its place in messages.
pub(crate) fn check_prompt(
    model: &dyn CausalLm,
    prompt: usize,
    ids: &[u32],
    options: &GenerationOptions,
) -> Result<()> {
    let vocab_size = model.vocab_size();
    if ids.is_empty() {
        return Err(TextError::EmptyPrompt { prompt }.into());
    }
    if let Some(&token) = ids.iter().find(|&&id| id as usize >= vocab_size) {
        let error = TextError::UnknownToken {
            prompt,
            token,
            vocab_size,
        };
        return Err(error.into());
    }
    if let Some(positions) = model.max_positions().filter(|&most| ids.len() > most) {
        let error = TextError::TooManyTokens {
            prompt,
            tokens: ids.len(),
            positions,
        };
        return Err(error.into());
    }
    let capacity = options.cache_capacity.unwrap_or(usize::MAX);
    // The last token never enters the cache, but a caller who asks for n new tokens after m expects to need room for m + n.
    let needed = ids.len().checked_add(options.max_new_tokens);
    if needed.is_none_or(|needed| needed > capacity) {
        let error = TextError::CacheTooSmall {
            prompt,
            tokens: ids.len(),
            max_new_tokens: options.max_new_tokens,
            capacity,
        };
        return Err(error.into());
    }
    Ok(())
}

/// What ends a row.
#[derive(Clone)]
pub(crate) struct Ends {
    stop_tokens: Arc<[u32]>,
    max_new_tokens: usize,
    /// Tokens that the model has positions for.
    positions: usize,
}

impl Ends {
    pub(crate) fn new(model: &dyn CausalLm, options: &GenerationOptions) -> Self {
        let stop_tokens = match options.stop_tokens.is_empty() && !options.ignore_eos {
            true => model.eos_tokens(),
            false => &options.stop_tokens,
        };
        Self {
            stop_tokens: stop_tokens.into(),
            max_new_tokens: options.max_new_tokens,
            positions: model.max_positions().unwrap_or(usize::MAX),
        }
    }
}

/// One prompt and what follows it.
pub(crate) struct Row {
    pub(super) prompt: usize,
    /// Prompt and new tokens.
    pub(crate) ids: Vec<u32>,
    /// Index of the first new token.
    pub(super) start: usize,
    sampler: Sampler,
    ends: Ends,
    pub(crate) finish: Option<FinishReason>,
}

impl Row {
    pub(crate) fn new(prompt: usize, ids: &[u32], options: &GenerationOptions, ends: Ends) -> Self {
        Self {
            prompt,
            ids: ids.to_vec(),
            start: ids.len(),
            sampler: Sampler::new(options, prompt),
            ends,
            finish: None,
        }
    }

    /// Chooses a token and decides whether it is the last one.
    pub(crate) fn next(&mut self, logits: Vec<f32>) -> Result<Token> {
        let id = self.sampler.choose(logits, &self.ids, self.prompt)?;
        let index = self.ids.len() - self.start;
        self.ids.push(id);
        if self.ends.stop_tokens.contains(&id) {
            self.finish = Some(FinishReason::StopToken);
        } else if index + 1 == self.ends.max_new_tokens {
            self.finish = Some(FinishReason::Length);
        } else if self.ids.len() >= self.ends.positions {
            self.finish = Some(FinishReason::Positions);
        }
        Ok(Token {
            prompt: self.prompt,
            index,
            id,
            finish: self.finish,
        })
    }

    pub(super) fn output(mut self, options: &GenerationOptions) -> Output {
        let otherwise = match options.max_new_tokens {
            0 => FinishReason::Length,
            _ => FinishReason::Stopped,
        };
        Output {
            tokens: self.ids.split_off(self.start),
            finish: self.finish.unwrap_or(otherwise),
        }
    }
}

/// Checks the shape of the logits of `rows` rows and copies them to the host.
pub(crate) fn checked(logits: Tensor, rows: usize, model: &dyn CausalLm) -> Result<Vec<Vec<f32>>> {
    let expected = [rows, model.vocab_size()];
    if logits.dims() != expected {
        return Err(TextError::LogitsShape {
            actual: logits.dims().to_vec(),
            expected: expected.to_vec(),
        }
        .into());
    }
    Ok(logits.to_dtype(DType::F32)?.to_vec2::<f32>()?)
}
