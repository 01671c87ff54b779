//! The model card that goes with a written model: `README.md` with the head that the Hugging Face hub reads.

mod front_matter;
mod nested;

use crate::atomic::write_atomic;
use crate::error::Result;
use crate::read::{MAX_CONFIG, read_text_if_present};
use front_matter::FrontMatter;
use nested::nested;
use std::fmt::Write;
use std::path::Path;

/// The name of the file.
pub const CARD_FILE: &str = "README.md";

/// How a model relates to its base, in the hub's words (`base_model_relation`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Relation {
    /// The same weights in fewer bits.
    Quantized,
    /// Its weights, trained further.
    Finetune,
    /// An adapter for it.
    Adapter,
    /// The base with an adapter added to its weights.
    Merge,
}

impl Relation {
    fn name(self) -> &'static str {
        match self {
            Self::Quantized => "quantized",
            Self::Finetune => "finetune",
            Self::Adapter => "adapter",
            Self::Merge => "merge",
        }
    }

    /// What a model is to its base, as a sentence.
    fn sentence(self, base: &str) -> String {
        match self {
            Self::Quantized => format!("This is `{base}`, quantized."),
            Self::Finetune => format!("This is `{base}`, trained further."),
            Self::Adapter => format!("This is an adapter for `{base}`, which it needs to run."),
            Self::Merge => format!("This is `{base}` with an adapter added to its weights."),
        }
    }
}

/// A figure of a model, with that of its base.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Measure {
    /// What was measured, and on what.
    pub what: String,
    /// For the base, where it has a meaning.
    pub base: Option<f64>,
    /// For the model.
    pub model: f64,
}

impl Measure {
    /// A figure of the model, with that of its base.
    pub fn new(what: impl Into<String>, base: impl Into<Option<f64>>, model: f64) -> Self {
        Self {
            what: what.into(),
            base: base.into(),
            model,
        }
    }
}

/// A model card: what a model was made from, how, and what was measured.
///
/// The source's own card is kept: its text, as the last section of the new one, and the entries of its head (license, language, tags, ..)
/// except for those about its own base and results.
///
/// ```
/// use fp8_files::rewrite::{Measure, ModelCard, Relation};
/// let card = ModelCard::new("smol-fp8", "SmolLM2-135M", Relation::Quantized)
///     .with_hub_base(Some("HuggingFaceTB/SmolLM2-135M".into()))
///     .with_command("fp8 quantize SmolLM2-135M --out smol-fp8")
///     .with_source("---\nlicense: apache-2.0\n---\nA small model.\n")
///     .with_measure(Measure::new("Perplexity on john.txt", 15.2, 15.6));
/// let text = card.to_string();
/// assert!(text.starts_with("---\nlicense: apache-2.0\nbase_model: HuggingFaceTB/SmolLM2-135M\n"));
/// assert!(text.contains("| Perplexity on john.txt | 15.2 | 15.6 |"));
/// assert!(text.ends_with("A small model.\n"));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCard {
    name: String,
    base: String,
    relation: Relation,
    hub_base: Option<String>,
    tags: Vec<String>,
    facts: Vec<(String, String)>,
    high_precision: Vec<String>,
    command: Option<String>,
    measures: Vec<Measure>,
    versions: Vec<(String, String)>,
    source: String,
}

impl ModelCard {
    /// A card of the model `name`, which was made from `base`.
    pub fn new(name: impl Into<String>, base: impl Into<String>, relation: Relation) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_string();
        Self {
            name: name.into(),
            base: base.into(),
            relation,
            hub_base: None,
            tags: vec![],
            facts: vec![],
            high_precision: vec![],
            command: None,
            measures: vec![],
            versions: vec![("fp8".into(), version)],
            source: String::new(),
        }
    }

    /// Sets the base's name on the hub, `owner/name`. Without it the head names no base: the hub refuses paths.
    #[must_use]
    pub fn with_hub_base(mut self, name: Option<String>) -> Self {
        self.hub_base = name;
        self
    }

    /// Adds tags to those of the source.
    #[must_use]
    pub fn with_tags<S: Into<String>>(mut self, tags: impl IntoIterator<Item = S>) -> Self {
        self.tags.extend(tags.into_iter().map(Into::into));
        self
    }

    /// Adds a row to the table of facts.
    #[must_use]
    pub fn with_fact(mut self, what: impl Into<String>, value: impl Into<String>) -> Self {
        self.facts.push((what.into(), value.into()));
        self
    }

    /// Sets the layers that are in high precision.
    #[must_use]
    pub fn with_high_precision(mut self, paths: &[String]) -> Self {
        self.high_precision = paths.to_vec();
        self
    }

    /// Sets the command that made the model.
    #[must_use]
    pub fn with_command(mut self, command: impl Into<String>) -> Self {
        self.command = Some(command.into());
        self
    }

    /// Adds a figure.
    #[must_use]
    pub fn with_measure(mut self, measure: Measure) -> Self {
        self.measures.push(measure);
        self
    }

    /// Sets the card of the source, head and text.
    #[must_use]
    pub fn with_source(mut self, card: impl Into<String>) -> Self {
        self.source = card.into();
        self
    }

    /// [`ModelCard::with_source`] of a model's directory, if there is one with a card.
    ///
    /// # Errors
    /// If the card cannot be read.
    pub fn with_source_of(self, dir: Option<&Path>) -> Result<Self> {
        let Some(dir) = dir else {
            return Ok(self);
        };
        let card = read_text_if_present(dir.join(CARD_FILE), MAX_CONFIG)?;
        Ok(self.with_source(card.unwrap_or_default()))
    }

    /// Writes the card into a directory, whole or not at all.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, dir: impl AsRef<Path>) -> Result<()> {
        let text = self.to_string();
        let path = dir.as_ref().join(CARD_FILE);
        Ok(write_atomic(path, |out| out.write_all(text.as_bytes()))?)
    }

    /// The base's name on the hub, or that of its folder.
    fn named_base(&self) -> &str {
        self.hub_base.as_ref().unwrap_or(&self.base)
    }

    fn head(&self, mut head: FrontMatter) -> FrontMatter {
        // These are about the source.
        for key in ["base_model", "base_model_relation", "model-index"] {
            head.remove(key);
        }
        if let Some(base) = &self.hub_base {
            head.set("base_model", base);
            head.set("base_model_relation", self.relation.name());
        }
        match self.relation {
            Relation::Adapter => head.set("library_name", "peft"),
            _ => head.set_new("library_name", "transformers"),
        }
        let tags: Vec<&str> = self.tags.iter().map(String::as_str).collect();
        if !tags.is_empty() {
            head.add("tags", &tags);
        }
        head
    }

    fn body(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        let base = self.named_base();
        writeln!(text, "\n# {}\n", self.name)?;
        writeln!(text, "{}\n", self.relation.sentence(base))?;
        writeln!(text, "| | |\n|---|---|")?;
        writeln!(text, "| Base | `{}` |", cell(base))?;
        for (what, value) in &self.facts {
            writeln!(text, "| {} | {} |", cell(what), cell(value))?;
        }
        for (what, version) in &self.versions {
            writeln!(text, "| Version of {} | {} |", cell(what), cell(version))?;
        }
        if let Some(command) = &self.command {
            writeln!(
                text,
                "\n## How it was made\n\nThis command wrote it:\n\n```bash\n{command}\n```"
            )?;
        }
        if !self.measures.is_empty() {
            writeln!(
                text,
                "\n## Measured\n\n| | base | this model |\n|---|---|---|"
            )?;
            for measure in &self.measures {
                let base = measure.base.map_or(String::new(), figure);
                let (what, model) = (cell(&measure.what), figure(measure.model));
                writeln!(text, "| {what} | {base} | {model} |")?;
            }
        }
        if !self.high_precision.is_empty() {
            writeln!(text, "\n## Layers in high precision\n")?;
            for group in grouped(&self.high_precision) {
                writeln!(text, "- `{group}`")?;
            }
        }
        Ok(text)
    }
}

impl std::fmt::Display for ModelCard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (head, below) = FrontMatter::split(&self.source);
        write!(f, "{}{}", self.head(head), self.body()?)?;
        match below.trim() {
            "" => Ok(()),
            below => write!(
                f,
                "\n## Card of the base\n\nFrom here on this is the card of `{}`: names, figures and code below are that model's.\n\n{}",
                self.named_base(),
                nested(below)
            ),
        }
    }
}

/// A number with six digits.
fn figure(number: f64) -> String {
    let digits = number.abs().max(1e-9).log10().floor() as i32;
    let places = (5 - digits).clamp(0, 9) as usize;
    let text = format!("{number:.places$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

/// Text in a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

/// Paths; those that differ only in numbers become one, with `*` in place of the numbers.
fn grouped(paths: &[String]) -> Vec<String> {
    let mut groups: Vec<String> = vec![];
    for path in paths {
        let parts = path.split('.').map(|part| match part.parse::<usize>() {
            Ok(_) => "*",
            Err(_) => part,
        });
        let group = parts.collect::<Vec<_>>().join(".");
        let single = paths.iter().filter(|other| *other != path).all(|other| {
            let parts = other.split('.').zip(group.split('.'));
            other.split('.').count() != group.split('.').count()
                || !parts.into_iter().all(|(a, b)| b == "*" || a == b)
        });
        let group = if single { path.clone() } else { group };
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups
}

/// The name on the hub of a model in the hub's cache, whose folders are called `models--OWNER--NAME/snapshots/..`; None for other paths.
///
/// ```
/// use fp8_files::rewrite::hub_name;
/// let cached = "/home/me/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/12ab";
/// assert_eq!(hub_name(cached).as_deref(), Some("HuggingFaceTB/SmolLM2-135M"));
/// assert_eq!(hub_name("models/SmolLM2-135M"), None);
/// ```
pub fn hub_name(path: impl AsRef<Path>) -> Option<String> {
    let mut folders = path.as_ref().components();
    folders.find_map(|folder| {
        let name = folder.as_os_str().to_str()?.strip_prefix("models--")?;
        let (owner, name) = name.split_once("--")?;
        Some(format!("{owner}/{name}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_says_what_was_made_and_keeps_that_of_the_source() {
        let source = "---\nlicense: mit\nbase_model: a/older\nmodel-index:\n- name: x\ntags: [small]\nlibrary_name: other\n---\n\n# Old\n";
        let layers = ["lm_head", "m.layers.0.gate", "m.layers.1.gate"].map(String::from);
        let card = ModelCard::new("new", "old|er", Relation::Quantized)
            .with_source(source)
            .with_tags(["fp8", "small"])
            .with_fact("Scheme", "channel-token")
            .with_high_precision(&layers)
            .with_measure(Measure::new("Cosine", None, 0.999_912_34));
        let version = env!("CARGO_PKG_VERSION");
        let expected = format!(
            "---\nlicense: mit\ntags:\n- small\n- fp8\nlibrary_name: other\n---\n\n# new\n\nThis is `old|er`, quantized.\n\n| | |\n\
             |---|---|\n| Base | `old\\|er` |\n| Scheme | channel-token |\n| Version of fp8 | {version} |\n\n## Measured\n\n| | base | this model |\n|---|---|---|\n\
             | Cosine |  | 0.999912 |\n\n## Layers in high precision\n\n- `lm_head`\n- `m.layers.*.gate`\n\n## Card of the base\n\n\
             From here on this is the card of `old|er`: names, figures and code below are that model's.\n\n### Old\n"
        );
        assert_eq!(card.to_string(), expected);
    }

    #[test]
    fn figures_have_six_digits() {
        for (number, text) in [
            (15.0, "15"),
            (15.123_456_7, "15.1235"),
            (0.000_123_456_7, "0.000123457"),
            (123_456.7, "123457"),
            (0., "0"),
        ] {
            assert_eq!(figure(number), text);
        }
    }

    #[test]
    fn a_card_is_written_whole() {
        let dir = tempfile::tempdir().unwrap();
        let card = ModelCard::new("new", "old", Relation::Merge).with_hub_base(Some("a/b".into()));
        let card = card.with_source_of(Some(dir.path())).unwrap();
        card.write(dir.path()).unwrap();
        let text = std::fs::read_to_string(dir.path().join(CARD_FILE)).unwrap();
        assert_eq!(text, card.to_string());
        assert!(text.contains("base_model: a/b\nbase_model_relation: merge\n"));
        // A card that is made from a folder with a card keeps that card.
        let next = card.with_source_of(Some(dir.path())).unwrap().to_string();
        assert!(next.contains("are that model's.\n\n### new\n"), "{next}");
    }
}
