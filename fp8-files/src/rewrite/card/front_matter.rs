//! The YAML at the head of a model card. Entries are kept exactly as they are written, so that nothing is lost.

/// Entries in order, each with its lines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct FrontMatter(Vec<(String, Vec<String>)>);

/// The line before and after the entries.
const FENCE: &str = "---";

impl FrontMatter {
    /// The entries of a card and the text below them. A card without a closed head has no entries.
    pub(super) fn split(card: &str) -> (Self, &str) {
        let card = card.strip_prefix('\u{feff}').unwrap_or(card);
        let mut lines = card.split_inclusive('\n');
        let mut at = match lines.next() {
            Some(first) if first.trim_end() == FENCE => first.len(),
            _ => return (Self::default(), card),
        };
        let mut entries: Vec<(String, Vec<String>)> = vec![];
        for line in lines {
            at += line.len();
            let text = line.trim_end();
            if text == FENCE {
                return (Self(entries), &card[at..]);
            }
            match (key(text), entries.last_mut()) {
                (Some(key), _) => entries.push((key.to_string(), vec![text.to_string()])),
                (None, Some((_, lines))) => lines.push(text.to_string()),
                // Comments before the first entry.
                (None, None) => {}
            }
        }
        (Self::default(), card)
    }

    pub(super) fn remove(&mut self, key: &str) {
        self.0.retain(|(own, _)| own != key);
    }

    /// Sets an entry to a text.
    pub(super) fn set(&mut self, key: &str, value: &str) {
        let line = format!("{key}: {}", quoted(value));
        self.replace(key, vec![line]);
    }

    /// Sets an entry, unless there is one.
    pub(super) fn set_new(&mut self, key: &str, value: &str) {
        if !self.0.iter().any(|(own, _)| own == key) {
            self.set(key, value);
        }
    }

    /// Adds items to a list of texts.
    pub(super) fn add(&mut self, key: &str, items: &[&str]) {
        let old = self.0.iter().find(|(own, _)| own == key);
        let mut all: Vec<String> = old.map(|(_, lines)| listed(lines)).unwrap_or_default();
        for item in items {
            let item = quoted(item);
            if !all.contains(&item) {
                all.push(item);
            }
        }
        let lines = all.iter().map(|item| format!("- {item}"));
        let lines = std::iter::once(format!("{key}:")).chain(lines).collect();
        self.replace(key, lines);
    }

    fn replace(&mut self, key: &str, lines: Vec<String>) {
        match self.0.iter_mut().find(|(own, _)| own == key) {
            Some((_, own)) => *own = lines,
            None => self.0.push((key.to_string(), lines)),
        }
    }
}

impl std::fmt::Display for FrontMatter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{FENCE}")?;
        for line in self.0.iter().flat_map(|(_, lines)| lines) {
            writeln!(f, "{line}")?;
        }
        writeln!(f, "{FENCE}")
    }
}

/// The key of a line that begins an entry.
fn key(line: &str) -> Option<&str> {
    let key = line.split_once(':').map(|(key, _)| key)?;
    let own = |c: char| c.is_ascii_alphanumeric() || ['_', '-', '.'].contains(&c);
    let begins = key.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    (begins && key.chars().all(own)).then_some(key)
}

/// The items of a list, which is written in lines, in brackets or as a single item.
fn listed(lines: &[String]) -> Vec<String> {
    let Some((first, rest)) = lines.split_first() else {
        return vec![];
    };
    let value = first.split_once(':').map_or("", |(_, value)| value.trim());
    let mut text = value.to_string();
    let is_flow = value.starts_with('[');
    if is_flow {
        text.extend(rest.iter().map(|line| line.trim()));
        let inner = text.trim_start_matches('[').trim_end_matches(']');
        let items = inner.split(',').map(str::trim);
        return items.filter(|item| !item.is_empty()).map(same).collect();
    }
    let items = rest.iter().filter_map(|line| line.trim().strip_prefix('-'));
    let items = std::iter::once(value).chain(items.map(str::trim));
    items.filter(|item| !item.is_empty()).map(same).collect()
}

/// An item as [`quoted`] writes it, if it is a plain or a quoted text; others stay as they are.
fn same(item: &str) -> String {
    let inner = ['"', '\''].iter().find_map(|quote| {
        let inner = item.strip_prefix(*quote)?.strip_suffix(*quote)?;
        (!inner.contains(['"', '\'', '\\'])).then_some(inner)
    });
    match inner {
        Some(inner) => quoted(inner),
        None => item.to_string(),
    }
}

/// A text as YAML: plain where it can only be a text, else in JSON's quotes, which YAML has too.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || ['_', '-', '.', '/'].contains(&c);
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(plain);
    // What YAML reads as truth values and null.
    const OTHERS: [&str; 9] = ["true", "false", "yes", "no", "on", "off", "null", "y", "n"];
    match is_plain && !OTHERS.contains(&text.to_ascii_lowercase().as_str()) {
        true => text.to_string(),
        false => serde_json::Value::from(text).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_kept_as_they_are() {
        let card = "---\n# a comment\nlicense: apache-2.0\nlanguage:\n- en\n- \"no\"\n\nextra:\n  a: 1\n---\n# Title\ntext\n";
        let (mut head, body) = FrontMatter::split(card);
        assert_eq!(body, "# Title\ntext\n");
        head.set("license", "mit");
        head.set_new("language", "de");
        head.set("base_model", "owner/name");
        head.remove("extra");
        let expected =
            "---\nlicense: mit\nlanguage:\n- en\n- \"no\"\n\nbase_model: owner/name\n---\n";
        assert_eq!(head.to_string(), expected);
    }

    #[test]
    fn cards_without_a_head_are_texts() {
        for card in ["", "# Title\n", "---\nlicense: mit\n", "--- \ntitle"] {
            assert_eq!(FrontMatter::split(card), (FrontMatter::default(), card));
        }
    }

    #[test]
    fn items_are_added_to_lists_of_every_form() {
        let add = |entry: &str| {
            let card = format!("---\n{entry}\n---\n");
            let (mut head, _) = FrontMatter::split(&card);
            head.add("tags", &["fp8", "no"]);
            head.to_string()
        };
        let expected = |own: &str| format!("---\ntags:\n{own}- fp8\n- \"no\"\n---\n");
        assert_eq!(add("tags: [a, \"b\"]"), expected("- a\n- b\n"));
        assert_eq!(add("tags:\n  - a\n  - 'b'"), expected("- a\n- b\n"));
        assert_eq!(add("tags: a"), expected("- a\n"));
        assert_eq!(
            add("tags:\n- a:b\n- fp8"),
            "---\ntags:\n- a:b\n- fp8\n- \"no\"\n---\n"
        );
        assert_eq!(add("tags:"), expected(""));
        let (mut head, _) = FrontMatter::split("");
        head.add("tags", &["a b"]);
        assert_eq!(head.to_string(), "---\ntags:\n- \"a b\"\n---\n");
    }
}
