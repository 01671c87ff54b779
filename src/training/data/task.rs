//! What documents are for, and the classes of labelled texts.

use super::document::{Body, Document, Label};
use super::error::DataError;
use super::options::Task;
use std::collections::{BTreeMap, BTreeSet};

/// What the documents are for.
pub(super) fn task(documents: &[Document], wanted: Option<Task>) -> Result<Task, DataError> {
    let texts = |document: &Document| match &document.body {
        Body::Texts(texts) => texts.len(),
        _ => 0,
    };
    let is_labelled = |document: &Document| matches!(document.body, Body::Labelled(..));
    let task = wanted.unwrap_or(
        match (
            documents.iter().any(|document| texts(document) > 0),
            documents.iter().any(is_labelled),
        ) {
            (true, _) => Task::Embedding,
            (false, true) => Task::Classification,
            (false, false) => Task::LanguageModel,
        },
    );
    let first = documents.first().map_or(0, texts);
    let fits = |document: &&Document| match task {
        Task::LanguageModel => texts(document) == 0,
        Task::Classification => is_labelled(document),
        Task::Embedding => texts(document) > 0 && texts(document) == first,
    };
    let Some(other) = documents.iter().find(|document| !fits(document)) else {
        return Ok(task);
    };
    let (found, expected) = match (task, texts(other)) {
        (Task::LanguageModel, _) => (
            "`query` and `positive`",
            "texts, chats or completions, as the task is to predict the next token",
        ),
        (Task::Classification, _) => (
            "no `label`",
            "`text` and `label` in all files, as the task is classification",
        ),
        (Task::Embedding, 0) => (
            "no `query`",
            "`query` and `positive` in all files, as the task is embedding",
        ),
        (Task::Embedding, 2) => ("no `negative`", "`negative` in all lines or in none"),
        (Task::Embedding, _) => ("a `negative`", "`negative` in all lines or in none"),
    };
    Err(DataError::Content {
        place: other.place.clone(),
        found: found.into(),
        expected: expected.into(),
    })
}

/// The classes of labelled texts.
#[derive(Default)]
pub(super) struct Classes {
    /// Their names, by number.
    pub names: Vec<String>,
    numbers: BTreeMap<Label, u32>,
}

impl Classes {
    /// The number of a label's class.
    pub fn number(&self, label: &Label) -> Option<u32> {
        self.numbers.get(label).copied()
    }

    /// All labels in order, numbers by value; or the `known` classes, if every label is one of them.
    pub fn of(documents: &[Document], known: &[String]) -> Result<Self, DataError> {
        let mut labels: BTreeSet<&Label> = BTreeSet::new();
        for document in documents {
            if let Body::Labelled(_, label) = &document.body {
                let of_other_kind = labels.first().filter(|first| {
                    std::mem::discriminant(**first) != std::mem::discriminant(label)
                });
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
                labels.insert(label);
            }
        }
        let named = |label: &Label| known.iter().position(|known| *known == label.name());
        let counted = |label: &Label| match label {
            Label::Integer(number) => (usize::try_from(*number).ok()).filter(|&n| n < known.len()),
            Label::Name(_) => None,
        };
        // All by name or all by number: one of each could be the same class.
        let numbered = |number: &dyn Fn(&Label) -> Option<usize>| {
            let numbers = labels.iter();
            let numbers = numbers.map(|&label| Some((label.clone(), number(label)? as u32)));
            numbers.collect::<Option<BTreeMap<_, _>>>()
        };
        if let Some(numbers) = numbered(&named).or_else(|| numbered(&counted)) {
            return Ok(Self {
                names: known.to_vec(),
                numbers,
            });
        }
        if let (Some(label), 1) = (labels.first(), labels.len()) {
            let label = label.name();
            return Err(DataError::OneClass { label });
        }
        Ok(Self {
            names: labels.iter().map(|label| label.name()).collect(),
            numbers: labels.into_iter().cloned().zip(0..).collect(),
        })
    }
}
