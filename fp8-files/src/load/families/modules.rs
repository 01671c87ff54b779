//! Lists of modules that stay in high precision, as families other than compressed-tensors write them.

use crate::error::Result;
use crate::load::family::At;
use fancy_regex::Regex;

/// Which modules a list names.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// Names of modules: the module itself and all within it.
    paths: Vec<String>,
    /// Whether a path may lack its beginning, or the leading `model.`.
    lenient: bool,
    globs: Vec<String>,
    /// From the start of the path up to the end of a module's name.
    expressions: Vec<Regex>,
}

impl Modules {
    /// A list of paths, as vLLM and transformers read it: of a whole path, of its beginning, of its end, or a regular
    /// expression of its beginning. Each time up to the border of a module, so that `layers.1` is not `layers.11`.
    pub(super) fn add_lenient(&mut self, at: &At<'_>) -> Result<()> {
        self.lenient = true;
        for text in at.texts()? {
            if text.contains(['^', '$', '\\', '(', '[', '+', '|', '*', '?']) {
                // Lists hold globs as well, which are not always expressions.
                let expression = Regex::new(&format!("^(?:{text})(?:\\.|$)"));
                self.expressions.extend(expression.ok());
                if text.contains('*') {
                    self.globs.push(text.into());
                }
            } else {
                self.paths.push(text.into());
            }
        }
        Ok(())
    }

    /// A list of paths and globs, whose `*` is any text.
    pub(super) fn add_globs(&mut self, at: &At<'_>) -> Result<()> {
        for text in at.texts()? {
            match text.strip_prefix("re:") {
                Some(pattern) => {
                    let expression = Regex::new(&format!("^(?:{pattern})"))
                        .map_err(|error| at.unsupported(&format!("a pattern ({error})")))?;
                    self.expressions.push(expression);
                }
                None if text.contains('*') => self.globs.push(text.into()),
                None => self.paths.push(text.into()),
            }
        }
        Ok(())
    }

    /// Whether the list names the layer at `path`.
    pub(super) fn name(&self, path: &str) -> bool {
        let of_path = |name: &String| {
            let without = |text: &str| text.strip_prefix("model.").map(str::to_string);
            within(path, name)
                || self.lenient
                    && (ends_with(path, name)
                        || without(path).is_some_and(|path| within(&path, name))
                        || without(name).is_some_and(|name| within(path, &name)))
        };
        self.paths.iter().any(of_path)
            || self.globs.iter().any(|glob| matches_glob(path, glob))
            // A pattern that gives up names nothing.
            || self.expressions.iter().any(|expression| expression.is_match(path).unwrap_or(false))
    }
}

/// Whether `path` is the module `name` or in it.
fn within(path: &str, name: &str) -> bool {
    let rest = path.strip_prefix(name);
    !name.is_empty() && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn ends_with(path: &str, name: &str) -> bool {
    let rest = path.strip_suffix(name);
    !name.is_empty() && rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether a glob, whose `*` stands for any text, matches the whole of `path`.
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
        let mut modules = Modules::default();
        modules
            .add_lenient(&At::new(Path::new("c"), "k", &list))
            .unwrap();
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
