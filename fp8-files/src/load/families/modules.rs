//! Lists of modules that stay in high precision, in all families but compressed-tensors.

use crate::error::Result;
use crate::load::at::At;
use fancy_regex::Regex;

/// Which modules a list names.
#[derive(Debug, Default)]
pub(in crate::load) struct Modules {
    /// Modules, each with everything inside it.
    paths: Vec<String>,
    /// Whether an entry may lack the beginning of a path, or either of them the leading `model.`.
    lenient: bool,
    globs: Vec<String>,
    /// Anchored at the start of the path.
    expressions: Vec<Regex>,
}

impl Modules {
    /// Lists of paths under `keys`, as they are meant: a whole path (vLLM), its beginning, its end, or a regular expression for its
    /// beginning (transformers). Each match ends at the border of a module, so that `layers.1` does not match `layers.11`. Before transformers
    /// 5.21 `layers.1` matched `layers.11` too; lists that are written here avoid this.
    pub(in crate::load) fn lenient(at: &At<'_>, keys: &[&str]) -> Result<Self> {
        let mut modules = Self {
            lenient: true,
            ..Self::default()
        };
        for key in keys {
            for text in at.get(key).texts()? {
                if text.contains(['^', '$', '\\', '(', '[', '+', '|', '*', '?']) {
                    // Some lists hold globs, which may not be valid expressions.
                    let expression = Regex::new(&format!("^(?:{text})(?:\\.|$)"));
                    modules.expressions.extend(expression.ok());
                    if text.contains('*') {
                        modules.globs.push(text.into());
                    }
                } else {
                    modules.paths.push(text.into());
                }
            }
        }
        Ok(modules)
    }

    /// Lists under `keys` of paths and globs, in which `*` matches any text.
    pub(in crate::load) fn globs(at: &At<'_>, keys: &[&str]) -> Result<Self> {
        let mut modules = Self::default();
        for at in keys.iter().map(|key| at.get(key)) {
            for text in at.texts()? {
                match text.strip_prefix("re:") {
                    Some(pattern) => modules.expressions.push(at.pattern(pattern)?),
                    None if text.contains('*') => modules.globs.push(text.into()),
                    None => modules.paths.push(text.into()),
                }
            }
        }
        Ok(modules)
    }

    /// Whether the list names the layer at `path`.
    pub(in crate::load) fn name(&self, path: &str) -> bool {
        let of_path = |name: &String| {
            within(path, name)
                || self.lenient
                    && (ends_with(path, name)
                        || path
                            .strip_prefix("model.")
                            .is_some_and(|path| within(path, name))
                        || name
                            .strip_prefix("model.")
                            .is_some_and(|name| within(path, name)))
        };
        self.paths.iter().any(of_path)
            || self.globs.iter().any(|glob| matches_glob(path, glob))
            // A pattern that exceeds the backtracking limit matches nothing.
            || self.expressions.iter().any(|expression| expression.is_match(path).unwrap_or(false))
    }
}

/// Whether `path` is the module `name` or inside it.
fn within(path: &str, name: &str) -> bool {
    let rest = path.strip_prefix(name);
    !name.is_empty() && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn ends_with(path: &str, name: &str) -> bool {
    let rest = path.strip_suffix(name);
    !name.is_empty() && rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether a glob, in which `*` matches any text, matches the whole `path`.
pub(super) fn matches_glob(path: &str, glob: &str) -> bool {
    let mut parts = glob.split('*');
    let Some(mut rest) = parts.next().and_then(|first| path.strip_prefix(first)) else {
        return false;
    };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    #[test]
    fn globs() {
        for (path, glob, expected) in [
            ("model.layers.0.mlp", "model.layers.0*", true),
            ("lm_head", "*lm_head", true),
            ("model.vision.a", "*vision*", true),
            ("ab", "a*b*", true),
            ("a", "a*a", false),
            ("abc", "a*c*d", false),
            ("abc", "abc", true),
            ("abcd", "abc", false),
            ("abc", "*", true),
        ] {
            assert_eq!(matches_glob(path, glob), expected, "{path} {glob}");
        }
    }

    #[test]
    fn borders_of_modules_count() {
        let list = json!(["layers.1", "gate", "model.visual", "re*[", "layer.*head"]);
        let config = json!({ "k": list });
        let modules = Modules::lenient(&At::new(Path::new("c"), "", &config), &["k"]).unwrap();
        for (path, expected) in [
            ("model.layers.1.mlp.up_proj", true),
            ("model.layers.11.mlp.up_proj", false),
            ("model.layers.3.mlp.gate", true),
            ("model.layers.3.mlp.up_gate", false),
            ("visual.blocks.0.fc", true),
            ("layer.2.head", true),
            ("layer.2.header", false),
        ] {
            assert_eq!(modules.name(path), expected, "{path}");
        }
    }
}
