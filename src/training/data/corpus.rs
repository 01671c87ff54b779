//! Documents as tokens and rows.

use super::chat::{chat, completion};
use super::document::{Body, Document};
use super::encode::Encoder;
use super::error::{DataError, Place};
use super::lines::COMPARED;
use super::options::{DatasetOptions, Task};
use super::order::held_out;
use super::pack::{Row, alone, cut, pack};
use super::summary::DatasetSummary;
use super::task::Classes;
use crate::models::{TextError, Tokenizer};
use rayon::prelude::*;
use std::ops::Range;

/// A document as tokens.
struct Encoded {
    ids: Vec<u32>,
    /// For each token whether a model shall learn to predict it.
    learned: Vec<bool>,
    label: Option<u32>,
    /// The tokens of each of several texts, which stay apart; none for a single text.
    texts: Vec<usize>,
    /// Tokens that did not fit into the row.
    truncated: usize,
    form: Form,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Cut into pieces, which are held out one by one.
    File,
    /// Cut into pieces, which are held out together.
    Text,
    /// One piece, truncated.
    Whole,
}

/// The tokens of all documents, and where they are.
#[derive(Default)]
pub(super) struct Corpus {
    pub tokens: Vec<u32>,
    /// For each token whether a model shall learn to predict it.
    pub learned: Vec<bool>,
    units: Vec<Unit>,
}

/// What is held out together: pieces in which there is something to learn.
struct Unit {
    pieces: Vec<Range<usize>>,
    label: Option<u32>,
    /// A piece of a plain text file.
    file: bool,
    /// The pieces are several texts, which make one row.
    together: bool,
}

/// Makes tokens of documents.
pub(super) struct Maker<'a> {
    encoder: Encoder<'a>,
    options: &'a DatasetOptions,
    /// For encoders, which see the beginning of a text.
    truncating: Option<Tokenizer>,
    classes: &'a Classes,
}

impl<'a> Maker<'a> {
    pub fn new(
        tokenizer: &'a Tokenizer,
        options: &'a DatasetOptions,
        task: Task,
        classes: &'a Classes,
    ) -> Result<Self, TextError> {
        let truncating = match task {
            Task::Classification | Task::Embedding => {
                Some(tokenizer.clone().with_max_tokens(options.context)?)
            }
            Task::LanguageModel => None,
        };
        Ok(Self {
            encoder: Encoder::new(tokenizer, options.end_of_text)?,
            options,
            truncating,
            classes,
        })
    }

    /// The tokens of documents, counted in `summary`.
    pub fn corpus(
        &self,
        documents: Vec<Document>,
        summary: &mut DatasetSummary,
    ) -> Result<Corpus, DataError> {
        let mut corpus = Corpus::default();
        summary.documents += documents.len();
        if self.truncating.is_none() {
            let labelled = |document: &&Document| matches!(document.body, Body::Labelled(..));
            summary.unused_labels += documents.iter().filter(labelled).count();
        }
        let encoded = documents
            .into_par_iter()
            .map(|document| self.encoded(document));
        // Of several errors the first one counts.
        for document in encoded.collect::<Vec<_>>() {
            corpus.add(document?, self.options.context, summary);
        }
        Ok(corpus)
    }

    fn encoded(&self, Document { place, body }: Document) -> Result<Encoded, DataError> {
        let failed = |source| DataError::Text {
            place: place.clone(),
            source,
        };
        let all = |ids: Vec<u32>| {
            let learned = vec![true; ids.len()];
            (ids, learned)
        };
        let encoder = &self.encoder;
        let ((mut ids, mut learned), form) = match &body {
            Body::Labelled(text, label) => match &self.truncating {
                Some(truncating) => {
                    let label = self.classes.number(label);
                    let texts = std::slice::from_ref(text);
                    return self.read(truncating, &place, texts, label);
                }
                None => (all(encoder.document(text).map_err(failed)?), Form::Text),
            },
            Body::Texts(texts) => match &self.truncating {
                Some(truncating) => return self.read(truncating, &place, texts, None),
                None => (all(vec![]), Form::Whole),
            },
            Body::File(text) => (all(encoder.document(text).map_err(failed)?), Form::File),
            Body::Text(text) => (all(encoder.document(text).map_err(failed)?), Form::Text),
            Body::Completion(prompt, text) => {
                let marked = completion(encoder, prompt, text).map_err(failed)?;
                (marked, Form::Whole)
            }
            Body::Chat(messages, from) => (chat(encoder, &place, messages, *from)?, Form::Whole),
        };
        let mut truncated = 0;
        if form == Form::Whole {
            truncated = ids.len().saturating_sub(self.options.context);
            ids.truncate(self.options.context);
            learned.truncate(self.options.context);
        }
        Ok(Encoded {
            ids,
            learned,
            label: None,
            texts: vec![],
            truncated,
            form,
        })
    }

    /// Texts as an encoder reads them, each truncated to a row: one with a label, or several that are compared.
    fn read(
        &self,
        truncating: &Tokenizer,
        place: &Place,
        texts: &[String],
        label: Option<u32>,
    ) -> Result<Encoded, DataError> {
        let failed = |source| DataError::Text {
            place: place.clone(),
            source,
        };
        let (mut all, mut lengths, mut truncated) = (vec![], vec![], 0);
        for (text, key) in texts.iter().zip(COMPARED) {
            let mut ids = self.encoder.tokenizer.encode(text, true).map_err(failed)?;
            let over = ids.len().saturating_sub(self.options.context);
            if over > 0 {
                ids = truncating.encode(text, true).map_err(failed)?;
                truncated += over;
            }
            if ids.is_empty() && label.is_none() {
                return Err(DataError::Content {
                    place: place.clone(),
                    found: format!("`{key}` has no token"),
                    expected: "a text with at least one".into(),
                });
            }
            lengths.push(ids.len());
            all.extend(ids);
        }
        Ok(Encoded {
            learned: vec![false; all.len()],
            ids: all,
            texts: match label {
                Some(_) => vec![],
                None => lengths,
            },
            label,
            truncated,
            form: Form::Whole,
        })
    }
}

impl Corpus {
    fn add(&mut self, document: Encoded, context: usize, summary: &mut DatasetSummary) {
        summary.truncated += usize::from(document.truncated > 0);
        summary.truncated_tokens += document.truncated;
        let start = self.tokens.len();
        self.tokens.extend(&document.ids);
        self.learned.extend(&document.learned);
        let together = !document.texts.is_empty();
        let mut end = start;
        let texts = document.texts.iter().map(|length| {
            end += length;
            end - length..end
        });
        let parts: Vec<_> = match together {
            true => texts.collect(),
            false => cut(start..self.tokens.len(), context).collect(),
        };
        let mut pieces = vec![];
        for piece in parts {
            // A class is learned from any token, a token only from one before it.
            let useful = match document.label {
                Some(_) => true,
                None => together || self.learned[piece.start + 1..piece.end].contains(&true),
            };
            match useful {
                true => pieces.push(piece),
                false => {
                    summary.unused += 1;
                    summary.unused_tokens += piece.len();
                }
            }
        }
        // A document without a token has no piece.
        summary.unused += usize::from(document.ids.is_empty());
        let (label, file) = (document.label, document.form == Form::File);
        match file {
            true => self.units.extend(pieces.into_iter().map(|piece| Unit {
                pieces: vec![piece],
                label,
                file,
                together,
            })),
            false if pieces.is_empty() => {}
            false => self.units.push(Unit {
                pieces,
                label,
                file,
                together,
            }),
        }
    }

    /// All of `other` behind this; gives its units.
    pub fn append(&mut self, other: Self) -> Self {
        let start = self.tokens.len();
        self.tokens.extend(other.tokens);
        self.learned.extend(other.learned);
        let units = other.units.into_iter().map(|mut unit| {
            for piece in &mut unit.pieces {
                *piece = piece.start + start..piece.end + start;
            }
            unit
        });
        Self {
            units: units.collect(),
            ..Self::default()
        }
    }

    /// Takes a share of the units out: of those of plain text files, and of the others.
    pub fn hold_out(&mut self, share: f64) -> Self {
        let mut held = [true, false].map(|file| {
            let count = self.units.iter().filter(|unit| unit.file == file).count();
            held_out(count, share).into_iter()
        });
        let mut next = |unit: &Unit| held[usize::from(!unit.file)].next().unwrap_or(false);
        let (out, kept) = std::mem::take(&mut self.units)
            .into_iter()
            .partition(|unit| next(unit));
        self.units = kept;
        Self {
            units: out,
            ..Self::default()
        }
    }

    /// The rows of the units.
    pub fn rows(&self, options: &DatasetOptions) -> Vec<Row> {
        let pieces = || {
            let units = self.units.iter();
            units.flat_map(|unit| unit.pieces.iter().map(|piece| (piece.clone(), unit.label)))
        };
        if self.units.iter().any(|unit| unit.together) {
            let units = self.units.iter();
            let row = |unit: &Unit| Row {
                pieces: unit.pieces.clone(),
                label: None,
            };
            return units.map(row).collect();
        }
        let labelled = self.units.iter().any(|unit| unit.label.is_some());
        match options.packing && !labelled {
            true => pack(pieces().map(|(piece, _)| piece), options.context),
            false => pieces().map(|(piece, label)| alone(piece, label)).collect(),
        }
    }
}
