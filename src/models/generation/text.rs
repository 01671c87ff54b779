//! Generation of text: tokens become text as they come, whole characters only.

use super::options::GenerationOptions;
use super::row::FinishReason;
use super::tokens::{Stop, generate};
use crate::models::error::{Error, TextError};
use crate::models::families::CausalLm;
use crate::models::text::Tokenizer;
use std::borrow::Cow;
use std::ops::ControlFlow;

/// The character that a decoder writes for bytes that are not (or not yet) valid UTF-8.
const REPLACEMENT: char = '\u{FFFD}';

/// So many at the end of a text are not the bytes of a character whose end may still come, which are three at most.
const INVALID: usize = 8;

/// Turns the tokens of a row into text as they arrive.
///
/// Some characters span several tokens, so one token may yield no text and the next the text of several. Text that could be the
/// beginning of a stop text is held back too.
///
/// ```no_run
/// use fp8::models::{TextStream, Tokenizer};
///
/// let tokenizer = Tokenizer::open("model")?;
/// let mut stream = TextStream::new(&tokenizer, &[]);
/// for id in tokenizer.encode("Hello 😀", false)? {
///     print!("{}", stream.push(id)?);
/// }
/// println!("{}", stream.finish()?);
/// # Ok::<(), fp8::models::Error>(())
/// ```
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Tokens before this one are out; those from here to `read` are decoded again as context for the next ones.
    context: usize,
    /// The text of tokens before this one is in `held` or already returned.
    read: usize,
    /// Text that may turn out to be part of a stop text.
    held: String,
    stops: Cow<'a, [String]>,
    stopped: bool,
}

impl<'a> TextStream<'a> {
    /// A stream that ends before the first of `stops` in the text. Special tokens give no text.
    pub fn new(tokenizer: &'a Tokenizer, stops: impl Into<Cow<'a, [String]>>) -> Self {
        Self {
            tokenizer,
            ids: vec![],
            context: 0,
            read: 0,
            held: String::new(),
            stops: stops.into(),
            stopped: false,
        }
    }

    /// Takes a token and returns the text that is now certain: often the token's own, sometimes none.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        self.ids.push(id);
        self.advance(false)
    }

    /// Returns the text held back; for the end of the tokens. Invalid bytes become U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn finish(&mut self) -> Result<String, TextError> {
        self.advance(true)
    }

    fn advance(&mut self, all: bool) -> Result<String, TextError> {
        if self.stopped {
            return Ok(String::new());
        }
        self.take_text(all)?;
        Ok(self.release(all))
    }

    /// Whether one of `stops` has appeared; no text follows it.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Moves the text of the tokens since `read` to `held`, unless it may end within a character.
    fn take_text(&mut self, all: bool) -> Result<(), TextError> {
        let decode = |ids: &[u32]| self.tokenizer.decode(ids, true);
        // A decoder may treat the first token specially (drop a leading space), so the tokens taken last are decoded too, without
        // and with the new ones.
        let before = decode(&self.ids[self.context..self.read])?;
        let now = decode(&self.ids[self.context..])?;
        let cut = now
            .chars()
            .rev()
            .take_while(|&c| c == REPLACEMENT)
            .take(INVALID);
        if (1..INVALID).contains(&cut.count()) && !all {
            return Ok(());
        }
        match now.strip_prefix(&before) {
            // Only special tokens, which change no text: the context stays that of the next text token, and stays short.
            Some("")
                if !all
                    && !self
                        .tokenizer
                        .decode(&self.ids[self.read..], false)?
                        .is_empty() =>
            {
                self.ids.truncate(self.read);
            }
            Some("") if !all => {}
            Some(new) => {
                self.held.push_str(new);
                self.context = self.read;
            }
            // The new tokens changed how the old ones decode (invalid bytes): decode the new ones alone.
            None => {
                self.held += &decode(&self.ids[self.read..])?;
                self.context = self.read;
            }
        }
        self.read = self.ids.len();
        Ok(())
    }

    /// [`TextStream::push`] for a token of generation: also the rest of the text if it is the last one, and why the text ends.
    pub(crate) fn take(
        &mut self,
        token: u32,
        finish: Option<FinishReason>,
    ) -> Result<(String, Option<FinishReason>), TextError> {
        let mut text = self.push(token)?;
        if finish.is_some() {
            text += &self.finish()?;
        }
        let stopped = self.stopped().then_some(FinishReason::StopString);
        Ok((text, stopped.or(finish)))
    }

    /// Takes the part of `held` that cannot belong to a stop text any more.
    fn release(&mut self, all: bool) -> String {
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop));
        if let Some(end) = found.min() {
            self.stopped = true;
            self.held.truncate(end);
            return std::mem::take(&mut self.held);
        }
        let overlaps = self.stops.iter().map(|stop| overlap(&self.held, stop));
        let kept = overlaps.max().filter(|_| !all).unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Length in bytes of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let mut starts = stop.char_indices().map(|(at, _)| at).rev();
    let length = starts.find(|&length| text.ends_with(&stop[..length]));
    length.unwrap_or(0)
}

/// New text of one prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TextPiece {
    /// Position of its prompt among the prompts.
    pub prompt: usize,
    /// The text, which may be empty.
    pub text: String,
    /// Why the text ends here; None if more may follow.
    pub finish: Option<FinishReason>,
}

/// The continuation of one prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TextOutput {
    /// The text before any stop text.
    pub text: String,
    /// The tokens, including a stop token and those of a stop text.
    pub tokens: Vec<u32>,
    /// Why they ended.
    pub finish: FinishReason,
}

/// [`generate`](crate::models::generate()) with text as the output: prompts are tokens, and `on_text` is called for each new token with the text that
/// is certain by then. Without stop tokens those of the tokenizer end a row too, unless
/// [`GenerationOptions::ignore_eos`] is set.
///
/// # Errors
/// As [`generate`](crate::models::generate()), and those of decoding.
///
/// ```no_run
/// use fp8::models::{GenerationOptions, Llama, Tokenizer, generate_text};
/// use std::ops::ControlFlow;
///
/// # #[expect(dead_code)]
/// # fn example(model: &Llama) -> Result<(), Box<dyn std::error::Error>> {
/// let tokenizer = Tokenizer::open("model")?;
/// let prompts = vec![tokenizer.encode("In the beginning", true)?];
/// let options = GenerationOptions::from_dir("model")?;
/// generate_text(model, &tokenizer, &prompts, &options, &mut |piece| {
///     print!("{}", piece.text);
///     ControlFlow::Continue(())
/// })?;
/// # Ok(()) }
/// ```
pub fn generate_text(
    model: &dyn CausalLm,
    tokenizer: &Tokenizer,
    prompts: &[Vec<u32>],
    options: &GenerationOptions,
    on_text: &mut dyn FnMut(TextPiece) -> ControlFlow<Stop>,
) -> Result<Vec<TextOutput>, Error> {
    let mut options = options.clone();
    options.end_as(tokenizer);
    let stops = &options.stop_strings;
    let mut streams: Vec<TextStream<'_>> = prompts
        .iter()
        .map(|_| TextStream::new(tokenizer, stops))
        .collect();
    let mut texts = vec![String::new(); prompts.len()];
    let mut fault = None;
    let outputs = generate(model, prompts, &options, &mut |token| {
        let stream = &mut streams[token.prompt];
        match stream.take(token.id, token.finish) {
            Ok((text, finish)) => {
                let prompt = token.prompt;
                texts[prompt] += &text;
                match on_text(TextPiece {
                    prompt,
                    text,
                    finish,
                }) {
                    ControlFlow::Continue(()) if stream.stopped() => ControlFlow::Break(Stop::Row),
                    flow => flow,
                }
            }
            Err(error) => {
                fault = Some(error);
                ControlFlow::Break(Stop::All)
            }
        }
    })?;
    if let Some(error) = fault {
        return Err(error.into());
    }
    let mut results = vec![];
    for ((output, mut text), mut stream) in outputs.into_iter().zip(texts).zip(streams) {
        // Only a row that the callback ended may still hold text back.
        text += &stream.finish()?;
        let finish = match stream.stopped() {
            true => FinishReason::StopString,
            false => output.finish,
        };
        results.push(TextOutput {
            text,
            tokens: output.tokens,
            finish,
        });
    }
    Ok(results)
}
