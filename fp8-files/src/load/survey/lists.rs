//! The lists of a configuration that name layers, entry by entry: those that stay in high precision, and those of a group.

use crate::load::at::At;
use crate::load::families::{Modules, lacks_layers};
use crate::load::targets::Targets;
use crate::load::{FamilyName, config};
use serde_json::{Value, json};
use std::path::Path;

/// What the list of an entry says about the layers that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// They stay in high precision.
    Ignored,
    /// They are quantized as their group says.
    Target,
}

/// An entry of a list.
pub(crate) struct Listed {
    pub(crate) kind: Kind,
    /// The file and the keys of the list.
    pub(crate) place: String,
    pub(crate) text: String,
    matcher: Matcher,
}

enum Matcher {
    Modules(Modules),
    Targets(Targets),
}

impl Listed {
    /// Whether the entry names the module at `path`.
    pub(crate) fn names(&self, path: &str) -> bool {
        match &self.matcher {
            Matcher::Modules(modules) => modules.name(path),
            // A pattern that exceeds the backtracking limit matches nothing.
            Matcher::Targets(targets) => targets.rank(path).is_ok_and(|rank| rank.is_some()),
        }
    }

    /// Whether it names a class of modules, not a path.
    pub(crate) fn is_class(&self) -> bool {
        let is_word = self
            .text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '_');
        is_word && self.text.starts_with(|c: char| c.is_ascii_uppercase())
    }

    /// Whether it is a pattern, which is often meant for several models.
    pub(crate) fn is_pattern(&self) -> bool {
        self.text.starts_with("re:")
            || self
                .text
                .contains(['*', '^', '$', '\\', '(', '[', '+', '|'])
    }
}

/// All entries of the lists in `config.json`, and of those in ModelOpt's own file if the family is read from it.
pub(super) fn of(directory: &Path, model: Option<&Value>, family: FamilyName) -> Vec<Listed> {
    let path = directory.join("config.json");
    let mut listed = vec![];
    if let Some(at) = model.and_then(|model| config::quantization(&path, model)) {
        add(&at, family, &mut listed);
        if !lacks_layers(&at) {
            return listed;
        }
    }
    let path = directory.join(config::SECOND);
    if let Ok(Some(value)) = config::json(&path) {
        add(
            &At::new(&path, "", &value).get("quantization"),
            family,
            &mut listed,
        );
    }
    listed
}

fn add(at: &At<'_>, family: FamilyName, listed: &mut Vec<Listed>) {
    const KEYS: [&str; 5] = [
        "ignore",
        "ignored_layers",
        "modules_to_not_convert",
        "exclude_modules",
        "exclude",
    ];
    for key in KEYS {
        entries(&at.get(key), Kind::Ignored, family, listed);
    }
    for (_, group) in at.get("config_groups").entries().unwrap_or_default() {
        entries(&group.get("targets"), Kind::Target, family, listed);
    }
}

fn entries(at: &At<'_>, kind: Kind, family: FamilyName, listed: &mut Vec<Listed>) {
    // A malformed list is an error of the configuration.
    for text in at.texts().unwrap_or_default() {
        let one = json!({ "list": [text] });
        let one = At::new(at.path, "", &one);
        let matcher = match family {
            FamilyName::COMPRESSED_TENSORS => {
                Targets::parse(&one.get("list")).map(Matcher::Targets)
            }
            FamilyName::MODEL_OPT | FamilyName::QUARK => {
                Modules::globs(&one, &["list"]).map(Matcher::Modules)
            }
            _ => Modules::lenient(&one, &["list"]).map(Matcher::Modules),
        };
        let Ok(matcher) = matcher else { continue };
        let file = at.path.file_name().unwrap_or_default();
        listed.push(Listed {
            kind,
            place: format!("{} `{}`", file.display(), at.key),
            text: text.to_string(),
            matcher,
        });
    }
}
