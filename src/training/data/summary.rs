//! What a dataset has, in numbers and words.

use std::fmt;

/// Counts of a dataset; its text is a description for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DatasetSummary {
    /// Documents of all files: a text file, or a line of JSON.
    pub documents: usize,
    /// Rows to train on, each seen once in an epoch.
    pub rows: usize,
    /// Tokens in these rows, without padding.
    pub tokens: usize,
    /// Padding in these rows.
    pub padding: usize,
    /// Tokens of these rows that a model learns to predict.
    pub predicted: usize,
    /// Rows that are held out or come from validation files.
    pub validation_rows: usize,
    /// Tokens in these rows, without padding.
    pub validation_tokens: usize,
    /// Tokens of these rows that are predicted.
    pub validation_predicted: usize,
    /// Classes; 0 for language models.
    pub classes: usize,
    /// Chats, completions and labelled texts that were cut at the end to fit into a row. Other texts are cut into pieces.
    pub truncated: usize,
    /// Tokens that were cut off.
    pub truncated_tokens: usize,
    /// Documents and pieces that were left out, because there is no token to predict in them: those of a single token, and truncated
    /// chats and completions whose prompt fills the row.
    pub unused: usize,
    /// Their tokens.
    pub unused_tokens: usize,
    /// Labels of texts that a language model learns: it learns the texts alone.
    pub unused_labels: usize,
}

/// A count and its noun.
fn counted(count: usize, noun: &str) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    let plural = match (count, noun.ends_with('s')) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{text} {noun}{plural}")
}

impl fmt::Display for DatasetSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let full = self.tokens + self.padding;
        write!(
            f,
            "{}: {} of {} to train on ({:.1}% padding",
            counted(self.documents, "document"),
            counted(self.rows, "row"),
            counted(self.tokens, "token"),
            100. * self.padding as f64 / full.max(1) as f64,
        )?;
        if self.classes == 0 && self.predicted > 0 {
            write!(f, ", {} predicted", counted(self.predicted, "token"))?;
        }
        f.write_str(")")?;
        match self.validation_rows {
            0 => f.write_str(", none for validation")?,
            rows => write!(
                f,
                ", {} of {} for validation",
                counted(rows, "row"),
                counted(self.validation_tokens, "token")
            )?,
        }
        if self.classes > 0 {
            write!(f, "; {}", counted(self.classes, "class"))?;
        }
        if self.truncated > 0 {
            write!(
                f,
                "; {} truncated by {}",
                counted(self.truncated, "document"),
                counted(self.truncated_tokens, "token")
            )?;
        }
        if self.unused > 0 {
            write!(
                f,
                "; {} of {} left out, without a token to predict",
                counted(self.unused, "piece"),
                counted(self.unused_tokens, "token")
            )?;
        }
        if self.unused_labels > 0 {
            write!(
                f,
                "; {} ignored, as a language model learns texts alone",
                counted(self.unused_labels, "label")
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_says_what_is_there_and_what_is_not() {
        let mut summary = DatasetSummary {
            documents: 1,
            rows: 1234567,
            tokens: 300,
            padding: 100,
            predicted: 299,
            ..DatasetSummary::default()
        };
        let text = "1 document: 1,234,567 rows of 300 tokens to train on (25.0% padding, 299 tokens predicted), none for validation";
        assert_eq!(summary.to_string(), text);
        (
            summary.classes,
            summary.validation_rows,
            summary.validation_tokens,
        ) = (2, 1, 1000);
        (summary.truncated, summary.truncated_tokens) = (2, 1);
        (summary.unused, summary.unused_tokens) = (1, 0);
        summary.unused_labels = 3;
        let text = "1 document: 1,234,567 rows of 300 tokens to train on (25.0% padding), 1 row of 1,000 tokens for validation; 2 classes; \
            2 documents truncated by 1 token; 1 piece of 0 tokens left out, without a token to predict; 3 labels ignored, as a language model learns texts alone";
        assert_eq!(summary.to_string(), text);
    }
}
