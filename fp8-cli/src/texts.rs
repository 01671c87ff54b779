//! The texts on which models are measured: plain text, or JSON lines as `fp8 train --data` reads them.

use crate::source::MAX_TEXT;
use crate::usage::Usage;
use anyhow::{Context, Result, bail};
use fp8::models::gguf::is_gguf;
use fp8::models::{Bert, CausalLm, Llama, Tokenizer};
use fp8::read::{MAX_CONFIG, read_text, read_text_if_present};
use fp8::training::{
    Dataset, DatasetOptions, DatasetSummary, IGNORED, Task, Validation, is_json_lines,
};
use serde_json::Value;
use std::path::Path;

/// Tokens that a model sees at once, if it has as many positions.
pub const WINDOW: usize = 512;

/// Tokens that a language model sees at once.
pub struct Piece {
    pub ids: Vec<u32>,
    /// For each token whether it is to be predicted from those before it.
    pub predicted: Vec<bool>,
}

impl Piece {
    /// How many tokens are to be predicted.
    pub fn count(&self) -> usize {
        self.predicted.iter().filter(|&&yes| yes).count()
    }
}

/// A text in pieces.
pub struct Pieces {
    pub pieces: Vec<Piece>,
    /// The most tokens of a piece.
    pub window: usize,
}

impl Pieces {
    /// The text of the file `path`, in windows of the given size or of as many tokens as usual. From plain text the first `tokens` are read.
    pub fn open(
        path: &Path,
        tokenizer: &Tokenizer,
        model: &Llama,
        window: Option<usize>,
        tokens: Option<usize>,
    ) -> Result<Self> {
        let positions = model.max_positions().unwrap_or(usize::MAX);
        let lines = is_json_lines(path);
        // The last token of a window of plain text is only predicted, never read.
        let most = match lines {
            true => positions,
            false => positions.saturating_add(1),
        };
        let window = window.unwrap_or(WINDOW.min(positions).max(2));
        if window > most {
            bail!(Usage(format!(
                "--window is {window}, and the model has {positions} positions: pass --window {most} or less"
            )));
        }
        if lines && tokens.is_some() {
            bail!(Usage(format!(
                "--tokens is for plain text, and {} has JSON lines",
                path.display()
            )));
        }
        let pieces = match lines {
            true => {
                let data = dataset(path, tokenizer, window, Some(Task::LanguageModel))?;
                warn_of_lost(path, data.summary(), window);
                of_lines(&data)
            }
            false => of_text(path, tokenizer, window, tokens)?,
        };
        let all = || pieces.iter().flat_map(|piece| &piece.ids);
        if let Some(id) = all().find(|&&id| id as usize >= model.vocab_size()) {
            bail!(
                "the tokenizer gives token {id}, the model has {}: they do not belong together",
                model.vocab_size()
            );
        }
        Ok(Self { pieces, window })
    }
}

/// The text of a file, read as `fp8 train` reads it: without the byte order mark that some editors put before it.
pub fn read(path: &Path) -> Result<String> {
    let text = read_text(path, MAX_TEXT)?;
    Ok(match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_string(),
        None => text,
    })
}

/// All tokens of a text, one document after the other.
pub fn tokens(path: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    if is_json_lines(path) {
        let data = dataset(path, tokenizer, WINDOW, Some(Task::LanguageModel))?;
        let pieces = of_lines(&data).into_iter();
        return Ok(pieces.flat_map(|piece| piece.ids).collect());
    }
    Ok(tokenizer.encode(&read(path)?, true)?)
}

/// Fails now for what would otherwise fail when a model has run for a while. `is_encoder`: whether the text is for one.
pub fn check(path: &Path, tokenizer: &Tokenizer, is_encoder: bool) -> Result<()> {
    if is_json_lines(path) {
        let task = (!is_encoder).then_some(Task::LanguageModel);
        dataset(path, tokenizer, WINDOW, task)?;
        return Ok(());
    }
    of_text(path, tokenizer, WINDOW, None).map(drop)
}

/// The most tokens of a text that the encoder in `folder` reads: the length for which sentence-transformers trained it, else its positions.
pub fn longest_of(folder: &Path, model: &Bert) -> Result<usize> {
    let positions = model.config().max_position_embeddings;
    let trained = trained_length(folder)?.unwrap_or(positions);
    Ok(trained.min(positions))
}

/// `max_seq_length` of sentence-transformers, if the folder of a model has it.
pub fn trained_length(model: &Path) -> Result<Option<usize>> {
    if is_gguf(model) {
        return Ok(None);
    }
    let path = model.join("sentence_bert_config.json");
    let json = read_text_if_present(&path, MAX_CONFIG)?
        .map(|text| serde_json::from_str::<Value>(&text))
        .transpose()
        .with_context(|| path.display().to_string())?;
    let length = json.and_then(|json| json["max_seq_length"].as_u64());
    Ok(length.map(|length| length as usize))
}

/// The tokens of each line of a plain text for an encoder, or of each text in JSON lines.
pub fn for_encoder(
    path: &Path,
    (tokenizer, longest): (&Tokenizer, usize),
) -> Result<Vec<Vec<u32>>> {
    if is_json_lines(path) {
        let data = dataset(path, tokenizer, longest, None)?;
        warn_of_lost(path, data.summary(), longest);
        let mut texts = vec![];
        for batch in data.validation_batches(1) {
            for row in 0..batch.rows {
                let start = row * batch.context;
                let end = start + batch.context - batch.padding[row];
                texts.push(batch.tokens[start..end].to_vec());
            }
        }
        return Ok(texts);
    }
    let mut encoder = Encoder::new(tokenizer.clone(), longest)?;
    let text = read(path)?;
    let mut texts = vec![];
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let ids = encoder.encode(line)?;
        if !ids.is_empty() {
            texts.push(ids);
        }
    }
    encoder.warn_of_cut();
    Ok(texts)
}

/// A tokenizer that cuts texts to the length that a model reads, and counts them.
pub struct Encoder {
    whole: Tokenizer,
    cutting: Tokenizer,
    longest: usize,
    cut: usize,
    texts: usize,
}

impl Encoder {
    /// Texts get `longest` tokens at most, those of the tokenizer's template among them.
    pub fn new(tokenizer: Tokenizer, longest: usize) -> Result<Self> {
        Ok(Self {
            cutting: tokenizer.clone().with_max_tokens(longest)?,
            whole: tokenizer,
            longest,
            cut: 0,
            texts: 0,
        })
    }

    pub fn encode(&mut self, text: &str) -> Result<Vec<u32>> {
        let ids = self.cutting.encode(text, true)?;
        let is_cut =
            ids.len() >= self.longest && self.whole.encode(text, true)?.len() > self.longest;
        self.texts += 1;
        self.cut += usize::from(is_cut);
        Ok(ids)
    }

    /// Says how many texts were cut, if any were.
    pub fn warn_of_cut(&self) {
        let (cut, texts, longest) = (self.cut, self.texts, self.longest);
        if cut > 0 {
            eprintln!(
                "warning: texts longer than {longest} tokens are cut at their ends: {cut} of {texts}"
            );
        }
    }
}

/// The data of a validation on the file.
fn dataset(
    path: &Path,
    tokenizer: &Tokenizer,
    context: usize,
    task: Option<Task>,
) -> Result<Dataset> {
    let files = vec![path.to_path_buf()];
    let options = DatasetOptions::new(context)
        .with_task(task)
        .with_validation(Validation::Files(files.clone()));
    Ok(Dataset::open(&files, tokenizer, &options)?)
}

/// Says what of the documents of JSON lines is not measured. They were read as the data and as its validation, so that all counts are
/// twice as large; a row has `longest` tokens.
pub fn warn_of_lost(path: &Path, summary: &DatasetSummary, longest: usize) {
    let [documents, cut, cut_tokens, unused, unused_tokens] = [
        summary.documents,
        summary.truncated,
        summary.truncated_tokens,
        summary.unused,
        summary.unused_tokens,
    ]
    .map(|count| count / 2);
    let path = path.display();
    if cut > 0 {
        eprintln!(
            "warning: {path}: documents longer than {longest} tokens are cut at their ends: {cut} of {documents}, by {cut_tokens} tokens in all"
        );
    }
    if unused > 0 {
        eprintln!(
            "warning: {path}: pieces in which there is nothing to measure are left out: {unused}, of {unused_tokens} tokens in all"
        );
    }
}

/// Each document, or piece of one, by itself: tokens do not attend to other documents of their row.
fn of_lines(data: &Dataset) -> Vec<Piece> {
    let mut pieces = vec![];
    for batch in data.validation_batches(1) {
        let mut start = 0;
        for &length in batch.segments.iter().flatten() {
            let end = start + length;
            let targets = batch.targets[start..end].iter();
            // The target of a token is the one after it.
            let next = targets.take(length - 1).map(|&target| target != IGNORED);
            let predicted: Vec<bool> = std::iter::once(false).chain(next).collect();
            if predicted.contains(&true) {
                pieces.push(Piece {
                    ids: batch.tokens[start..end].to_vec(),
                    predicted,
                });
            }
            start = end;
        }
    }
    pieces
}

fn of_text(
    path: &Path,
    tokenizer: &Tokenizer,
    window: usize,
    tokens: Option<usize>,
) -> Result<Vec<Piece>> {
    let ids = encode(tokenizer, &read(path)?, tokens)?;
    if ids.len() < 2 {
        bail!(
            "{} has fewer than two tokens: expected at least 2 tokens to compare",
            path.display()
        );
    }
    // A last window of one token has nothing to predict.
    let windows = ids.chunks(window).filter(|window| window.len() > 1);
    let piece = |window: &[u32]| Piece {
        ids: window.to_vec(),
        predicted: (0..window.len()).map(|at| at > 0).collect(),
    };
    Ok(windows.map(piece).collect())
}

/// The first tokens of a text. Tokenizes no more of a long text than needed.
fn encode(tokenizer: &Tokenizer, text: &str, tokens: Option<usize>) -> Result<Vec<u32>> {
    let Some(tokens) = tokens else {
        return Ok(tokenizer.encode(text, true)?);
    };
    // Tokens have some four bytes; the last tokens of a part may differ from those of the whole text.
    let mut part = tokens.saturating_add(16).saturating_mul(16).min(text.len());
    while !text.is_char_boundary(part) {
        part += 1;
    }
    let mut ids = tokenizer.encode(&text[..part], true)?;
    if part < text.len() && ids.len() < tokens.saturating_add(16) {
        ids = tokenizer.encode(text, true)?;
    }
    ids.truncate(tokens);
    Ok(ids)
}
