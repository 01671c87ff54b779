//! The marks around what an assistant writes, `{% generation %}` and `{% endgeneration %}`, of which transformers makes masks for training.

use std::borrow::Cow;

/// `source` with a condition that always holds in their place, which keeps the marks' control of white space.
pub(super) fn without_marks(source: &str) -> Cow<'_, str> {
    let mut result = String::new();
    let mut copied = 0;
    for (at, _) in source.match_indices("{%") {
        let inner = &source[at + 2..];
        let tag = inner.split("%}").next().unwrap_or(inner);
        let word = tag.trim_matches(|c: char| c.is_ascii_whitespace() || c == '-' || c == '+');
        let plain = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        let start = at + 2 + (word.as_ptr() as usize - inner.as_ptr() as usize);
        result += &source[copied..start];
        result += plain;
        copied = start + word.len();
    }
    match copied {
        0 => Cow::Borrowed(source),
        _ => Cow::Owned(result + &source[copied..]),
    }
}
