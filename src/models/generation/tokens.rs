//! Generation of tokens, for many prompts at once.

use super::options::GenerationOptions;
use super::row::{Ends, FinishReason, Output, Row, Token, check_prompt, checked};
use crate::models::error::Result;
use crate::models::families::CausalLm;
use crate::models::layers::KvCache;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// What the callback of [`generate`] stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// The row of this token.
    Row,
    /// All rows.
    All,
}

/// Continues each prompt; outputs come in the order of the prompts.
///
/// All prompts run as one batch without padding: prompts of equal length are read together, one length after the other, and then each
/// step adds a token to every row at its own position. (A model without [`CausalLm::takes_unequal_rows`] runs one length after the other.)
/// With greedy choice each prompt gets the tokens that it would get alone, on the CPU to the bit, except from models whose dynamic scales
/// span all rows of a batch. On other devices sums may round differently for another number of rows.
/// A row that has ended gets no further tokens; its batch runs until all rows have ended.
///
/// A row ends after `max_new_tokens`, with a stop token (the model's own [`CausalLm::eos_tokens`] where the options name none), or at the model's
/// [`CausalLm::max_positions`]. The cache takes memory as it fills, and needs no room for tokens beyond these positions.
///
/// `on_token` is called with each new token as soon as it is chosen. If it returns `Break`, the row of the token or all rows end with
/// [`FinishReason::Stopped`] and keep the tokens they have.
///
/// # Errors
/// [`TextError`](crate::models::TextError) before anything is computed: invalid options, an empty prompt, an unknown token, a prompt longer than the model's
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
    let ends = Ends::new(model, options);
    let mut by_length: BTreeMap<usize, Vec<Row>> = BTreeMap::new();
    for (prompt, ids) in prompts.iter().enumerate() {
        let row = Row::new(prompt, ids, options, ends.clone());
        by_length.entry(ids.len()).or_default().push(row);
    }
    let batches: Vec<Vec<Row>> = match model.takes_unequal_rows() && !prompts.is_empty() {
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
    for (prompt, ids) in prompts.iter().enumerate() {
        check_prompt(model, prompt, ids, options)?;
    }
    Ok(())
}

/// Runs rows until all have ended; prompts of equal length must be neighbours. True if the callback ended everything.
fn run(
    model: &dyn CausalLm,
    rows: &mut [Row],
    options: &GenerationOptions,
    on_token: &mut dyn FnMut(Token) -> ControlFlow<Stop>,
) -> Result<bool> {
    let starts = || rows.iter().map(|row| row.start);
    let (shortest, longest) = (starts().min().unwrap_or(0), starts().max().unwrap_or(0));
    // The row that goes on for longest. All others are fed for as long.
    let positions = model.max_positions().unwrap_or(usize::MAX);
    let new = options
        .max_new_tokens
        .min(positions.saturating_sub(shortest));
    let capacity = options.cache_capacity.unwrap_or(longest + new);
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
    rows: &[Row],
    longest: usize,
    cache: &mut KvCache,
) -> Result<Vec<Vec<f32>>> {
    let read = |rows: &[Row], cache: &mut KvCache| {
        let ids: Vec<u32> = rows.iter().flat_map(|row| row.ids.clone()).collect();
        let shape = (rows.len(), ids.len() / rows.len());
        let ids = Tensor::from_vec(ids, shape, model.device())?;
        checked(model.last_logits(&ids, cache)?, rows.len(), model)
    };
    let lengths: Vec<&[Row]> = rows.chunk_by(|a, b| a.start == b.start).collect();
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
