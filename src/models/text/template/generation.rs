//! The marks around what an assistant writes, `{% generation %}` and `{% endgeneration %}`, of which transformers makes masks for training.

use std::borrow::Cow;

/// `source` with a block that changes nothing in their place, which keeps the marks' control of white space.
pub(super) fn without_marks(source: &str) -> Cow<'_, str> {
    let mut result = String::new();
    let mut copied = 0;
    for (at, _) in source.match_indices("{%") {
        let tag = &source[at + 2..];
        let inner = tag
            .strip_prefix(['-', '+'])
            .unwrap_or(tag)
            .trim_ascii_start();
        let Some((word, plain)) = MARKS.iter().find(|(word, _)| inner.starts_with(word)) else {
            continue;
        };
        let end = inner[word.len()..].trim_ascii_start();
        if !end
            .strip_prefix(['-', '+'])
            .unwrap_or(end)
            .starts_with("%}")
        {
            continue;
        }
        let start = source.len() - inner.len();
        result += &source[copied..start];
        result += plain;
        copied = start + word.len();
    }
    match copied {
        0 => Cow::Borrowed(source),
        _ => Cow::Owned(result + &source[copied..]),
    }
}

/// The marks, and what stands for them.
const MARKS: [(&str, &str); 2] = [("generation", "with"), ("endgeneration", "endwith")];
