//! Generation of text: tokens become text as they come, whole characters only.

use super::options::GenerationOptions;
use super::tokens::{FinishReason, Stop, generate};
use crate::models::error::{Result, TextError};
use crate::models::families::CausalLm;
use crate::models::text::Tokenizer;
use std::ops::ControlFlow;

/// The character that a decoder puts where bytes are no UTF-8, which may be the first bytes of one.
const REPLACEMENT: char = '\u{FFFD}';

/// The text of a row of tokens, as they come.
///
/// Some characters are several tokens, so a token gives no text, or that of several. What could be the beginning of a text
/// that is to end the row is held back too.
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
/// # Ok::<(), fp8::models::TextError>(())
/// ```
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Tokens before this one are only context: their text has been taken, and says how the next ones read.
    context: usize,
    /// Tokens before this one have their text in `held` or out.
    read: usize,
    /// Text that may turn out to belong to a stop text.
    held: String,
    stops: &'a [String],
    stopped: bool,
}

impl<'a> TextStream<'a> {
    /// A stream that ends before the first of `stops` in the text. Special tokens give no text.
    pub fn new(tokenizer: &'a Tokenizer, stops: &'a [String]) -> Self {
        Self {
            tokenizer,
            ids: vec![],
            context: 0,
            read: 0,
            held: String::new(),
            stops,
            stopped: false,
        }
    }

    /// Takes a token and returns the text that is certain now; often that of the token, sometimes none.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn push(&mut self, id: u32) -> std::result::Result<String, TextError> {
        if self.stopped {
            return Ok(String::new());
        }
        self.ids.push(id);
        self.take_text(false)?;
        Ok(self.release(false))
    }

    /// The text that was held back, when no token follows. Bytes that are no character come as U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn finish(&mut self) -> std::result::Result<String, TextError> {
        if self.stopped {
            return Ok(String::new());
        }
        self.take_text(true)?;
        Ok(self.release(true))
    }

    /// Whether a text of `stops` has come up; nothing follows then.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Moves the text of the tokens since `read` to `held`, unless its end may be half a character.
    fn take_text(&mut self, all: bool) -> std::result::Result<(), TextError> {
        let decode = |ids: &[u32]| self.tokenizer.decode(ids, true);
        // A decoder may treat the first token in its own way (it drops a leading space), so the last ones that were taken
        // are decoded along, without and with the new ones.
        let before = decode(&self.ids[self.context..self.read])?;
        let now = decode(&self.ids[self.context..])?;
        if now.ends_with(REPLACEMENT) && !all {
            return Ok(());
        }
        match now.strip_prefix(&before) {
            // Only special tokens: the context still says how the next text token reads.
            Some("") if !all => {}
            Some(new) => {
                self.held.push_str(new);
                self.context = self.read;
            }
            // The new tokens changed how the old ones read (bytes that are no text): the new ones count alone.
            None => {
                self.held += &decode(&self.ids[self.read..])?;
                self.context = self.read;
            }
        }
        self.read = self.ids.len();
        Ok(())
    }

    /// The part of `held` that no stop text can reach any more.
    fn release(&mut self, all: bool) -> String {
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop));
        if let Some(end) = found.min() {
            self.stopped = true;
            self.held.truncate(end);
            return std::mem::take(&mut self.held);
        }
        let kept = match all {
            true => 0,
            false => self
                .stops
                .iter()
                .map(|stop| overlap(&self.held, stop))
                .max()
                .unwrap_or(0),
        };
        let rest = self.held.split_off(self.held.len() - kept);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Bytes of the longest end of `text` that `stop` begins with.
fn overlap(text: &str, stop: &str) -> usize {
    let starts = stop.char_indices().map(|(at, _)| at).rev();
    starts
        .into_iter()
        .find(|&length| text.ends_with(&stop[..length]))
        .unwrap_or(0)
}

/// New text of one prompt.
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8::models::{Llama, LlamaConfig};
/// # let json = serde_json::json!({ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
/// #     "num_hidden_layers": 1, "num_attention_heads": 2 });
/// # let config = LlamaConfig::parse("config.json", &json)?;
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// # let model = Llama::new(&config, vb)?;
/// # use fp8::models::Tokenizer;
/// # let dir = tempfile::tempdir()?;
/// # let json = r#"{ "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "Whitespace" }, "model": { "type": "WordLevel",
/// #     "vocab": { "<unk>": 0, "<s>": 1, "</s>": 2, "in": 3, "the": 4, "beginning": 5 }, "unk_token": "<unk>" } }"#;
/// # std::fs::write(dir.path().join("tokenizer.json"), json)?;
/// # let json = r#"{ "bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}</s>" }"#;
/// # std::fs::write(dir.path().join("tokenizer_config.json"), json)?;
/// # let tokenizer = Tokenizer::open(dir.path())?;
/// use fp8::models::{GenerationOptions, generate_text};
/// use std::ops::ControlFlow;
///
/// let options = GenerationOptions::default().with_max_new_tokens(3);
/// let mut last = None;
/// generate_text(&model, &tokenizer, &[vec![3]], &options, &mut |piece| {
///     print!("{}", piece.text); // as it comes
///     last = piece.finish;
///     ControlFlow::Continue(())
/// })?;
/// assert!(last.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TextPiece {
    /// Position of its prompt among the prompts.
    pub prompt: usize,
    /// The text, which may be empty.
    pub text: String,
    /// Why nothing follows, if nothing does.
    pub finish: Option<FinishReason>,
}

/// What followed one prompt.
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8::models::{Llama, LlamaConfig};
/// # let json = serde_json::json!({ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
/// #     "num_hidden_layers": 1, "num_attention_heads": 2 });
/// # let config = LlamaConfig::parse("config.json", &json)?;
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// # let model = Llama::new(&config, vb)?;
/// # use fp8::models::Tokenizer;
/// # let dir = tempfile::tempdir()?;
/// # let json = r#"{ "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "Whitespace" }, "model": { "type": "WordLevel",
/// #     "vocab": { "<unk>": 0, "<s>": 1, "</s>": 2, "in": 3, "the": 4, "beginning": 5 }, "unk_token": "<unk>" } }"#;
/// # std::fs::write(dir.path().join("tokenizer.json"), json)?;
/// # let json = r#"{ "bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}</s>" }"#;
/// # std::fs::write(dir.path().join("tokenizer_config.json"), json)?;
/// # let tokenizer = Tokenizer::open(dir.path())?;
/// use fp8::models::{GenerationOptions, generate_text};
/// use std::ops::ControlFlow;
///
/// let options = GenerationOptions::default().with_max_new_tokens(3);
/// let outputs = generate_text(&model, &tokenizer, &[vec![3]], &options, &mut |_| ControlFlow::Continue(()))?;
/// let decoded = tokenizer.decode(&outputs[0].tokens, true)?;
/// assert_eq!(outputs[0].text, decoded);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TextOutput {
    /// The text, up to a stop text.
    pub text: String,
    /// The tokens, those of a stop text and a stop token included.
    pub tokens: Vec<u32>,
    /// Why they ended.
    pub finish: FinishReason,
}

/// As [`generate`](crate::models::generate()), for prompts that are tokens already and answers that are text; `on_text` is called for each token, with
/// the text that is certain by then. A row ends with the tokenizer's end tokens too.
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
) -> Result<Vec<TextOutput>> {
    let mut options = options.clone();
    if options.stop_tokens.is_empty() {
        options.stop_tokens = tokenizer.eos().to_vec();
    }
    let stops = &options.stop_strings;
    let mut streams: Vec<TextStream<'_>> = prompts
        .iter()
        .map(|_| TextStream::new(tokenizer, stops))
        .collect();
    let mut texts = vec![String::new(); prompts.len()];
    let mut fault = None;
    let outputs = generate(model, prompts, &options, &mut |token| {
        let stream = &mut streams[token.prompt];
        let mut step = || -> std::result::Result<TextPiece, TextError> {
            let mut text = stream.push(token.id)?;
            if token.finish.is_some() {
                text += &stream.finish()?;
            }
            let stopped = stream.stopped().then_some(FinishReason::StopString);
            Ok(TextPiece {
                prompt: token.prompt,
                text,
                finish: stopped.or(token.finish),
            })
        };
        match step() {
            Ok(piece) => {
                texts[piece.prompt] += &piece.text;
                match on_text(piece) {
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
        // A row that the caller ended may hold text back; for the others this is empty.
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
