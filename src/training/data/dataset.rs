//! Rows of tokens from files, in an order for each epoch.

use super::batch::{Batch, IGNORED};
use super::corpus::{Corpus, Maker};
use super::error::DataError;
use super::options::{DatasetOptions, Task, Validation};
use super::order::shuffled;
use super::pack::Row;
use super::source::read;
use super::summary::DatasetSummary;
use super::task::{Classes, task};
use crate::models::Tokenizer;
use rapidhash::v3::rapidhash_v3;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// The rows of text files, chats, prompts with completions or labelled texts; [`crate::guide::training_data`] has the formats.
///
/// Everything follows from the files, the tokenizer and the options: the same on every machine, with any number of threads.
///
/// ```
/// # let dir = tempfile::tempdir().unwrap();
/// # let model = dir.path();
/// # let file = model.join("lines.jsonl");
/// # std::fs::write(model.join("tokenizer.json"), r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
/// #   "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "to": 1, "be": 2, "or": 3, "not": 4}}}"#)?;
/// use fp8::models::Tokenizer;
/// use fp8::training::{Dataset, DatasetOptions, IGNORED, Validation};
///
/// std::fs::write(&file, r#"
///     {"text": "to be or not"}
///     {"text": "to be"}
/// "#)?;
/// let tokenizer = Tokenizer::open(model)?;
/// let options = DatasetOptions::new(8).with_validation(Validation::None);
/// let data = Dataset::open(&[file], &tokenizer, &options)?;
/// assert_eq!(data.rows(), 1);
/// let batch = data.train_batch(0, 1);
/// assert_eq!(batch.segments, [[4, 2, 2]]);
/// assert_eq!(batch.tokens, [1, 2, 3, 4, 1, 2, 0, 0]);
/// let no = IGNORED;
/// assert_eq!(batch.targets, [2, 3, 4, no, 2, no, no, no]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Dataset {
    corpus: Corpus,
    rows: Vec<Row>,
    validation: Vec<Row>,
    context: usize,
    seed: u64,
    task: Task,
    /// The token that fills padding.
    padding: u32,
    labels: Vec<String>,
    summary: DatasetSummary,
    /// The newest orders, with their epochs. A batch needs at most a few.
    orders: Mutex<Vec<(u64, Arc<[usize]>)>>,
}

/// How many orders are kept: that of the epoch of a step, and the next.
const ORDERS: usize = 2;

impl Dataset {
    /// Reads files and folders. `.jsonl`, `.ndjson` and `.json` are lines of JSON, all others plain text; all files of a folder are read,
    /// sorted by path, except those whose names begin with a dot.
    ///
    /// # Errors
    /// [`DataError`], which names the file, the line and what was expected.
    pub fn open(
        files: &[PathBuf],
        tokenizer: &Tokenizer,
        options: &DatasetOptions,
    ) -> Result<Self, DataError> {
        options.check()?;
        if let Some(truncation) = tokenizer.inner().get_truncation() {
            return Err(DataError::Option {
                option: "the tokenizer's number of tokens",
                value: truncation.max_length.to_string(),
                expected: "no limit: it would drop the ends of texts",
            });
        }
        let mut documents = read(files)?;
        let trained = documents.len();
        if let Validation::Files(files) = &options.validation {
            documents.extend(read(files)?);
        }
        let task = task(&documents, options.task)?;
        let classes = match task {
            Task::Classification => Classes::of(&documents, &options.labels)?,
            Task::LanguageModel | Task::Embedding => Classes::default(),
        };
        let mut summary = DatasetSummary {
            classes: classes.names.len(),
            ..DatasetSummary::default()
        };
        let maker = Maker::new(tokenizer, options, task, &classes).map_err(DataError::Tokenizer)?;
        let checked = documents.split_off(trained);
        let mut corpus = maker.corpus(documents, &mut summary)?;
        let validation = match &options.validation {
            Validation::None => Corpus::default(),
            Validation::Share(share) => corpus.hold_out(*share),
            Validation::Files(_) => corpus.append(maker.corpus(checked, &mut summary)?),
        };
        let (rows, validation) = (corpus.rows(options), validation.rows(options));
        let mut data = Self {
            corpus,
            rows,
            validation,
            context: options.context,
            seed: options.seed,
            task,
            padding: tokenizer.eos().first().copied().unwrap_or(0),
            labels: classes.names,
            summary,
            orders: Mutex::default(),
        };
        data.count(options)?;
        Ok(data)
    }

    /// Completes the summary; an error if there are no rows where there should be some.
    fn count(&mut self, options: &DatasetOptions) -> Result<(), DataError> {
        let counts = [&self.rows, &self.validation].map(|rows| {
            let tokens: usize = rows.iter().map(Row::used).sum();
            let pieces = rows.iter().flat_map(|row| row.pieces.iter().cloned());
            let learned = pieces.map(|piece| {
                self.corpus.learned[piece]
                    .iter()
                    .skip(1)
                    .filter(|&&yes| yes)
                    .count()
            });
            (rows.len(), tokens, learned.sum::<usize>())
        });
        let lines: usize = (self.rows.iter()).map(|row| self.lines(row).count()).sum();
        let summary = &mut self.summary;
        (summary.rows, summary.tokens, summary.predicted) = counts[0];
        summary.padding = lines * self.context - summary.tokens;
        (
            summary.validation_rows,
            summary.validation_tokens,
            summary.validation_predicted,
        ) = counts[1];
        let wanted = [
            ("training", true),
            (
                "validation",
                matches!(options.validation, Validation::Files(_)),
            ),
        ];
        for ((part, wanted), (rows, _, _)) in wanted.into_iter().zip(counts) {
            if wanted && rows == 0 {
                let cut = self.summary.truncated;
                let reason = match cut {
                    0 => "expected a document with at least two tokens, the second of which is to be predicted".to_string(),
                    _ => format!(
                        "{cut} of them are longer than a row and were cut off at its end, before any token to predict; expected rows of more \
                         than {} tokens (--context)",
                        self.context
                    ),
                };
                return Err(DataError::NoRows {
                    part,
                    documents: self.summary.documents,
                    reason,
                });
            }
        }
        Ok(())
    }

    /// The batch of a training step: `rows` rows, or for [`Task::Embedding`] as many groups of rows. It depends on nothing but the data, the
    /// seed and these numbers. All rows, in a random order for each epoch, follow each other endlessly, and step `s` takes those from
    /// `s * rows` on. So a batch may contain the end of one epoch and the beginning of the next.
    pub fn train_batch(&self, step: u64, rows: usize) -> Batch {
        let count = self.rows.len() as u128;
        let start = u128::from(step) * rows as u128;
        let picked = (start..start + rows as u128).map(|at| {
            let order = self.order((at / count) as u64);
            &self.rows[order[(at % count) as usize]]
        });
        self.batch(picked)
    }

    /// All rows of validation once, in the order of the files; the last batch may have fewer.
    pub fn validation_batches(&self, rows: usize) -> impl Iterator<Item = Batch> {
        let batches = self.validation.chunks(rows.max(1));
        batches.map(|rows| self.batch(rows.iter()))
    }

    /// The order of rows in an epoch.
    fn order(&self, epoch: u64) -> Arc<[usize]> {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = orders.iter().find(|(of, _)| *of == epoch) {
            return order.clone();
        }
        let order: Arc<[usize]> = shuffled(self.rows.len(), self.seed, epoch).into();
        orders.truncate(ORDERS - 1);
        orders.insert(0, (epoch, order.clone()));
        order
    }

    /// The pieces of each row of a batch that a row of data makes.
    fn lines<'a>(&self, row: &'a Row) -> impl Iterator<Item = &'a [Range<usize>]> {
        let pieces = match self.task {
            Task::Embedding => 1,
            Task::LanguageModel | Task::Classification => row.pieces.len().max(1),
        };
        row.pieces.chunks(pieces)
    }

    fn batch<'a>(&self, rows: impl Iterator<Item = &'a Row>) -> Batch {
        let group = |row: &Row| self.lines(row).count();
        let mut batch = Batch {
            rows: 0,
            context: self.context,
            group: self.rows.first().map_or(1, group),
            tokens: vec![],
            targets: vec![],
            segments: vec![],
            padding: vec![],
            labels: (self.task == Task::Classification).then(Vec::new),
        };
        for row in rows {
            for pieces in self.lines(row) {
                batch.rows += 1;
                let end = batch.rows * self.context;
                for piece in pieces {
                    batch.tokens.extend(&self.corpus.tokens[piece.clone()]);
                    let next = piece.start + 1..piece.end;
                    let next = next.map(|at| match self.corpus.learned[at] {
                        true => self.corpus.tokens[at],
                        false => IGNORED,
                    });
                    batch.targets.extend(next.chain([IGNORED]));
                }
                batch.tokens.resize(end, self.padding);
                batch.targets.resize(end, IGNORED);
                let used: usize = pieces.iter().map(Range::len).sum();
                let padding = self.context - used;
                let segments = pieces.iter().map(|piece| piece.len());
                let segments = segments.chain((padding > 0).then_some(padding));
                batch.segments.push(segments.collect());
                batch.padding.push(padding);
            }
            if let Some(labels) = &mut batch.labels {
                labels.extend(row.label);
            }
        }
        batch
    }

    /// Number of rows to train on, at least 1.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Number of rows for validation.
    pub fn validation_rows(&self) -> usize {
        self.validation.len()
    }

    /// Tokens of a row.
    pub fn context(&self) -> usize {
        self.context
    }

    /// What the rows are for.
    pub fn task(&self) -> Task {
        self.task
    }

    /// The names of the classes, in the order of their numbers; empty for language models.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// Counts of documents, rows and tokens, and of what was cut off or left out.
    pub fn summary(&self) -> &DatasetSummary {
        &self.summary
    }

    /// The summary in words.
    pub fn description(&self) -> String {
        self.summary.to_string()
    }

    /// A hash of all that batches depend on: rows, targets, labels and the seed. A resumed run compares it, to go on with the same data.
    pub fn fingerprint(&self) -> String {
        let mut hashes = vec![self.context as u64, self.seed, u64::from(self.padding)];
        hashes.extend(
            self.labels
                .iter()
                .map(|label| rapidhash_v3(label.as_bytes())),
        );
        for rows in [&self.rows, &self.validation] {
            hashes.push(rows.len() as u64);
            for row in rows {
                let mut bytes = vec![];
                for piece in &row.pieces {
                    bytes.extend((piece.len() as u64).to_le_bytes());
                    let ids = self.corpus.tokens[piece.clone()].iter();
                    bytes.extend(ids.flat_map(|id| id.to_le_bytes()));
                    let learned = self.corpus.learned[piece.clone()].iter();
                    bytes.extend(learned.map(|&yes| u8::from(yes)));
                }
                bytes.extend(
                    row.label
                        .map_or([255; 8], |label| u64::from(label).to_le_bytes()),
                );
                hashes.push(rapidhash_v3(&bytes));
            }
        }
        let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        format!("{:016x}", rapidhash_v3(&bytes))
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Dataset");
        debug
            .field("context", &self.context)
            .field("seed", &self.seed);
        debug
            .field("summary", &self.summary)
            .finish_non_exhaustive()
    }
}
