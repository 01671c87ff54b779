//! Generation of tokens, for many prompts at once.

use super::options::GenerationOptions;
use super::sampling::Sampler;
use crate::models::error::{Result, TextError};
use crate::models::families::CausalLm;
use crate::models::layers::KvCache;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

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
    /// The callback ended it.
    Stopped,
}

/// What the callback of [`generate`] stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// The row of this token.
    Row,
    /// All rows.
    All,
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

/// Continues each prompt; outputs come in the order of the prompts.
///
/// All prompts run as one batch without padding: prompts of equal length are read together, one length after the other, and then each
/// step adds a token to every row at its own position. (A model without [`CausalLm::takes_unequal_rows`] runs one length after the other.)
/// With greedy choice each prompt gets the tokens that it would get alone, with two exceptions: models whose dynamic scales span all rows
/// of a batch, and products whose f32 sums round differently for another number of rows.
/// A row that has ended gets no further tokens; its batch runs until all rows have ended.
///
/// A row ends after `max_new_tokens`, with a stop token (the model's own [`CausalLm::eos_tokens`] where the options name none), or at the model's
/// [`CausalLm::max_positions`]. The cache takes memory as it fills.
///
/// `on_token` is called with each new token as soon as it is chosen. If it returns `Break`, the row of the token or all rows end with
/// [`FinishReason::Stopped`] and keep the tokens they have.
///
/// # Errors
/// [`TextError`] before anything is computed: invalid options, an empty prompt, an unknown token, a prompt longer than the model's
/// positions, a cache too small for prompt and new tokens. Later: NaN logits, and the model's own errors.
///
/// ```no_run
/// use fp8::models::{GenerationOptions, Llama, generate};
/// use std::ops::ControlFlow;
///
/// # #[expect(dead_code)]
/// # fn example(model: &Llama) -> fp8::models::Result<()> {
/// let prompts = vec![vec![1, 5, 9], vec![1, 7]]; // of any lengths
/// let options = GenerationOptions::default().with_max_new_tokens(8);
/// let outputs = generate(model, &prompts, &options, &mut |token| {
///     println!("prompt {} goes on with {}", token.prompt, token.id);
///     ControlFlow::Continue(())
/// })?;
/// assert!(outputs[0].tokens.len() <= 8);
/// # Ok(()) }
/// ```
pub fn generate(
    model: &dyn CausalLm,
    prompts: &[Vec<u32>],
    options: &GenerationOptions,
    on_token: &mut dyn FnMut(Token) -> ControlFlow<Stop>,
) -> Result<Vec<Output>> {
    check(model, prompts, options)?;
    let ends = Ends {
        stop_tokens: match options.stop_tokens.is_empty() && !options.ignore_eos {
            true => model.eos_tokens(),
            false => &options.stop_tokens,
        },
        max_new_tokens: options.max_new_tokens,
        positions: model.max_positions().unwrap_or(usize::MAX),
    };
    let mut by_length: BTreeMap<usize, Vec<Row<'_>>> = BTreeMap::new();
    for (prompt, ids) in prompts.iter().enumerate() {
        let row = Row::new(prompt, ids, options, ends);
        by_length.entry(ids.len()).or_default().push(row);
    }
    let batches: Vec<Vec<Row<'_>>> = match model.takes_unequal_rows() && !prompts.is_empty() {
        // Shorter prompts first, so that equal ones are neighbours.
        true => vec![by_length.into_values().flatten().collect()],
        false => by_length.into_values().collect(),
    };
    let mut outputs: Vec<Option<Output>> = vec![None; prompts.len()];
    let mut stopped = options.max_new_tokens == 0;
    for mut rows in batches {
        if !stopped {
            stopped = run(model, &mut rows, options, on_token)?;
        }
        for row in rows {
            let prompt = row.prompt;
            outputs[prompt] = Some(row.output(options));
        }
    }
    Ok(outputs.into_iter().flatten().collect())
}

fn check(model: &dyn CausalLm, prompts: &[Vec<u32>], options: &GenerationOptions) -> Result<()> {
    options.check()?;
    let vocab_size = model.vocab_size();
    for (prompt, ids) in prompts.iter().enumerate() {
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
    }
    Ok(())
}

/// What ends a row.
#[derive(Clone, Copy)]
struct Ends<'a> {
    stop_tokens: &'a [u32],
    max_new_tokens: usize,
    /// Tokens that the model has positions for.
    positions: usize,
}

/// One prompt and what follows it.
struct Row<'a> {
    prompt: usize,
    /// Prompt and new tokens.
    ids: Vec<u32>,
    /// Index of the first new token.
    start: usize,
    sampler: Sampler,
    ends: Ends<'a>,
    finish: Option<FinishReason>,
}

impl<'a> Row<'a> {
    fn new(prompt: usize, ids: &[u32], options: &GenerationOptions, ends: Ends<'a>) -> Self {
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
    fn next(&mut self, logits: Vec<f32>) -> Result<Token> {
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

    fn output(mut self, options: &GenerationOptions) -> Output {
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

/// Runs rows until all have ended; prompts of equal length must be neighbours. True if the callback ended everything.
fn run(
    model: &dyn CausalLm,
    rows: &mut [Row<'_>],
    options: &GenerationOptions,
    on_token: &mut dyn FnMut(Token) -> ControlFlow<Stop>,
) -> Result<bool> {
    let longest = rows.iter().map(|row| row.start).max().unwrap_or(0);
    let capacity = options
        .cache_capacity
        .unwrap_or(longest + options.max_new_tokens);
    let mut cache = model.new_cache(rows.len(), capacity)?;
    let mut logits = read_prompts(model, rows, longest, &mut cache)?;
    loop {
        for (row, logits) in rows.iter_mut().zip(logits) {
            if row.finish.is_some() {
                continue;
            }
            match on_token(row.next(logits)?) {
                ControlFlow::Continue(()) => {}
                ControlFlow::Break(Stop::Row) => {
                    row.finish.get_or_insert(FinishReason::Stopped);
                }
                ControlFlow::Break(Stop::All) => return Ok(true),
            }
        }
        if rows.iter().all(|row| row.finish.is_some()) {
            return Ok(false);
        }
        // Rows that have ended are fed their last token; their logits are ignored.
        let last: Vec<u32> = rows.iter().map(|row| row.ids[row.ids.len() - 1]).collect();
        let ids = Tensor::from_vec(last, (rows.len(), 1), model.device())?;
        logits = checked(model.last_logits(&ids, &mut cache)?, rows.len(), model)?;
    }
}

/// Logits of the last token of each prompt.
fn read_prompts(
    model: &dyn CausalLm,
    rows: &[Row<'_>],
    longest: usize,
    cache: &mut KvCache,
) -> Result<Vec<Vec<f32>>> {
    let read = |rows: &[Row<'_>], cache: &mut KvCache| {
        let ids: Vec<u32> = rows.iter().flat_map(|row| row.ids.clone()).collect();
        let shape = (rows.len(), ids.len() / rows.len());
        let ids = Tensor::from_vec(ids, shape, model.device())?;
        checked(model.last_logits(&ids, cache)?, rows.len(), model)
    };
    let lengths: Vec<&[Row<'_>]> = rows.chunk_by(|a, b| a.start == b.start).collect();
    if let [rows] = *lengths {
        return read(rows, cache);
    }
    cache.reserve(longest)?;
    let (mut logits, mut start) = (vec![], 0);
    for rows in lengths {
        let mut part = cache.part(start, rows.len())?;
        logits.extend(read(rows, &mut part)?);
        cache.take_seen(start, &part);
        start += rows.len();
    }
    Ok(logits)
}

/// Checks the shape of the logits of `rows` rows and copies them to the host.
fn checked(logits: Tensor, rows: usize, model: &dyn CausalLm) -> Result<Vec<Vec<f32>>> {
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
