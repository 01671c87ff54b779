//! Rows of tokens, and the targets that a model learns to predict.

use std::ops::Range;

/// The target where nothing is predicted.
pub const IGNORED: u32 = u32::MAX;

/// Rows of tokens, one after another, with their targets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Batch {
    /// Number of rows.
    pub rows: usize,
    /// Tokens of each row.
    pub context: usize,
    /// `rows * context` tokens.
    pub tokens: Vec<u32>,
    /// The token that follows each token in its document, as many as `tokens`. [`IGNORED`] at the last token of a segment, before tokens
    /// that a model does not have to predict (prompts), in padding, and everywhere in labelled texts.
    pub targets: Vec<u32>,
    /// For each row the lengths of its segments, which sum to `context`. Tokens of a segment must not attend to other segments. The last
    /// segment is padding if the row has any.
    pub segments: Vec<Vec<usize>>,
    /// Rows that follow each other and belong together: 1, or for [`Task::Embedding`](crate::training::Task::Embedding) 2, a query and
    /// its text, or 3, with a text that does not belong to it.
    pub group: usize,
    /// For each row how many tokens at its end are padding.
    pub padding: Vec<usize>,
    /// For classification the class of each row, a position in [`Dataset::labels`](crate::training::Dataset::labels).
    pub labels: Option<Vec<u32>>,
}

impl Batch {
    /// Number of targets that are not [`IGNORED`].
    pub fn predicted(&self) -> usize {
        let predicted = self.targets.iter().filter(|&&target| target != IGNORED);
        predicted.count()
    }

    /// The batch of some of the rows.
    ///
    /// # Panics
    /// If there are not as many rows.
    pub fn part(&self, rows: Range<usize>) -> Self {
        let elements = rows.start * self.context..rows.end * self.context;
        let labels = self.labels.as_ref();
        Self {
            rows: rows.len(),
            context: self.context,
            group: self.group,
            tokens: self.tokens[elements.clone()].to_vec(),
            targets: self.targets[elements].to_vec(),
            segments: self.segments[rows.clone()].to_vec(),
            padding: self.padding[rows.clone()].to_vec(),
            labels: labels.map(|labels| labels[rows].to_vec()),
        }
    }
}
