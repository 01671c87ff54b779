//! Documents as tokens and rows.

use super::chat::{chat, completion};
use super::document::{Body, Document, Label};
use super::encode::Encoder;
use super::error::DataError;
use super::options::{DatasetOptions, Task};
use super::order::held_out;
use super::pack::{Row, alone, cut, pack};
use super::summary::DatasetSummary;
use crate::models::{TextError, Tokenizer};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::ops::Range;

/// A document as tokens.
struct Encoded {
    ids: Vec<u32>,
    /// For each token whether a model shall learn to predict it.
    learned: Vec<bool>,
    label: Option<u32>,
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
}

/// What the documents are for.
pub(super) fn task(documents: &[Document], wanted: Option<Task>) -> Result<Task, DataError> {
    let is_labelled = |document: &Document| matches!(document.body, Body::Labelled(..));
    let task = wanted.unwrap_or(match documents.iter().any(is_labelled) {
        true => Task::Classification,
        false => Task::LanguageModel,
    });
    let unlabelled = documents.iter().find(|document| !is_labelled(document));
    match unlabelled {
        Some(document) if task == Task::Classification => Err(DataError::Content {
            place: document.place.clone(),
            found: "no `label`".into(),
            expected: "`text` and `label` in all files, as the task is classification".into(),
        }),
        _ => Ok(task),
    }
}

/// The classes: all labels in order, numbers by value.
pub(super) fn classes(documents: &[Document]) -> Result<Vec<Label>, DataError> {
    let mut classes: BTreeSet<&Label> = BTreeSet::new();
    for document in documents {
        if let Body::Labelled(_, label) = &document.body {
            let of_other_kind = classes
                .first()
                .filter(|first| std::mem::discriminant(**first) != std::mem::discriminant(label));
            if let Some(first) = of_other_kind {
                let name = |label: &Label| match label {
                    Label::Integer(number) => format!("the integer {number}"),
                    Label::Name(name) => format!("the string `{name}`"),
                };
                return Err(DataError::Content {
                    place: document.place.clone(),
                    found: format!("`label` is {}", name(label)),
                    expected: format!("labels of one kind; another label is {}", name(first)),
                });
            }
            classes.insert(label);
        }
    }
    match classes.len() {
        1 => Err(DataError::OneClass {
            label: classes
                .first()
                .map(|label| label.name())
                .unwrap_or_default(),
        }),
        _ => Ok(classes.into_iter().cloned().collect()),
    }
}

/// Makes tokens of documents.
pub(super) struct Maker<'a> {
    encoder: Encoder<'a>,
    options: &'a DatasetOptions,
    /// In classification, where texts are truncated.
    truncating: Option<Tokenizer>,
    classes: &'a [Label],
}

impl<'a> Maker<'a> {
    pub fn new(
        tokenizer: &'a Tokenizer,
        options: &'a DatasetOptions,
        task: Task,
        classes: &'a [Label],
    ) -> Result<Self, TextError> {
        let truncating = match task {
            Task::Classification => Some(tokenizer.clone().with_max_tokens(options.context)?),
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
        let (encoder, mut label) = (&self.encoder, None);
        let ((mut ids, mut learned), form) = match &body {
            Body::Labelled(text, name) => match &self.truncating {
                Some(truncating) => {
                    label = self
                        .classes
                        .binary_search(name)
                        .ok()
                        .map(|class| class as u32);
                    return self.classified(truncating, text, label).map_err(failed);
                }
                None => (all(encoder.document(text).map_err(failed)?), Form::Text),
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
            label,
            truncated,
            form,
        })
    }

    fn classified(
        &self,
        truncating: &Tokenizer,
        text: &str,
        label: Option<u32>,
    ) -> Result<Encoded, TextError> {
        let mut ids = self.encoder.tokenizer.encode(text, true)?;
        let truncated = ids.len().saturating_sub(self.options.context);
        if truncated > 0 {
            ids = truncating.encode(text, true)?;
        }
        Ok(Encoded {
            learned: vec![false; ids.len()],
            ids,
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
        let mut pieces = vec![];
        for piece in cut(start..self.tokens.len(), context) {
            // A class is learned from any token, a token only from one before it.
            let useful = match document.label {
                Some(_) => true,
                None => self.learned[piece.start + 1..piece.end].contains(&true),
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
            })),
            false if pieces.is_empty() => {}
            false => self.units.push(Unit {
                pieces,
                label,
                file,
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
        let labelled = self.units.iter().any(|unit| unit.label.is_some());
        match options.packing && !labelled {
            true => pack(pieces().map(|(piece, _)| piece), options.context),
            false => pieces().map(|(piece, label)| alone(piece, label)).collect(),
        }
    }
}
