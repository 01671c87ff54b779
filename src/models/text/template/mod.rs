//! Chat templates: programs that come with a model's files, run within bounds.
//!
//! Fuel alone is not enough: doubling a string forty times makes a terabyte. So each operator, filter, method and output that may create
//! or read much first asks a [`Budget`] (`guard.rs` writes these calls into the syntax tree), on a thread with a stack of known size.

mod budget;
mod filters;
mod generation;
mod guard;

use super::caught::caught;
use super::chat::{ChatMessage, SpecialTokens};
use crate::models::error::TextError;
use budget::Budget;
use minijinja::machinery::{CodeGenerator, eval, make_string_output, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value, context, escape_formatter};
use serde::Deserialize;
use std::path::PathBuf;

/// Bytes of the longest template. Known models have up to 40,000.
pub(super) const MAX_SOURCE: usize = 128 << 10;
/// Instructions of one chat.
const FUEL: u64 = 10_000_000;
/// Parsing recurses once per byte at worst, `-------x`, in frames of less than a kilobyte.
const STACK: usize = 512 << 20;
/// Bytes of an error's message: a template may raise one of any length.
const MAX_REASON: usize = 2000;

/// The template of a model.
#[derive(Debug, Clone)]
pub(super) struct Template {
    path: PathBuf,
    source: String,
}

impl Template {
    /// The template of the file at `path`.
    pub fn new(path: PathBuf, source: String) -> Self {
        Self { path, source }
    }

    /// Formats messages as the model expects them, with the beginning of an answer if `answer`.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        answer: bool,
        special: &SpecialTokens,
    ) -> Result<String, TextError> {
        let work = || render(&self.source, messages, answer, special);
        self.on_a_stack(work).map_err(|mut reason| {
            if reason.len() > MAX_REASON {
                reason.truncate(reason.floor_char_boundary(MAX_REASON));
                reason += "...";
            }
            TextError::ChatTemplate {
                path: self.path.clone(),
                reason,
            }
        })
    }

    fn on_a_stack(
        &self,
        work: impl FnOnce() -> Result<String, Error> + Send,
    ) -> Result<String, String> {
        if self.source.len() > MAX_SOURCE {
            let bytes = self.source.len();
            return Err(format!(
                "it has {bytes} bytes, expected at most {MAX_SOURCE}"
            ));
        }
        let work = || caught(|| work().map_err(text));
        std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().stack_size(STACK);
            let thread = builder.spawn_scoped(scope, work);
            let thread = thread.map_err(|error| format!("no stack to run it: {error}"))?;
            let result = thread.join().unwrap_or_else(|_| Err("it panics".into()));
            result.unwrap_or_else(Err)
        })
    }
}

/// An error with its causes.
fn text(error: Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// Renders with the settings and functions that transformers gives templates.
fn render(
    source: &str,
    messages: &[ChatMessage],
    answer: bool,
    special: &SpecialTokens,
) -> Result<String, Error> {
    let budget = Budget::new();
    let source = &*generation::without_marks(source);
    let mut jinja = Environment::new();
    jinja.set_fuel(Some(FUEL));
    jinja.add_function("raise_exception", |text: String| -> Result<String, _> {
        Err(Error::new(ErrorKind::InvalidOperation, text))
    });
    guard::add(&mut jinja, &budget);
    filters::add(&mut jinja, &budget);
    jinja.set_formatter({
        let budget = budget.clone();
        move |out, state, value| {
            // An escaped character takes up to six.
            let escaped = !matches!(state.auto_escape(), AutoEscape::None);
            budget.make(budget.size(value)? * if escaped { 6 } else { 1 })?;
            escape_formatter(out, state, value)
        }
    });
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    let name = "chat template";
    let tree = guard::guarded(&parse(source, name, syntax)?)?;
    let mut code = CodeGenerator::new(name, source);
    code.compile_stmt(&tree);
    let (instructions, blocks) = code.finish();
    let messages: Vec<Value> = messages
        .iter()
        .map(|message| context! { role => &message.role, content => &message.content })
        .collect();
    let special = special.iter().map(|(name, tokens)| {
        let tokens = Value::deserialize(tokens);
        Ok((
            name.as_str(),
            tokens.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?,
        ))
    });
    let special = Value::from_pairs(special.collect::<Result<Vec<_>, Error>>()?);
    // Tools and documents are there, and none.
    let root = context! {
        messages, tools => (), documents => (), add_generation_prompt => answer, ..special
    };
    let mut text = String::new();
    let out = &mut make_string_output(&mut text);
    eval(&jinja, &instructions, root, &blocks, out, AutoEscape::None)?;
    Ok(text)
}

#[cfg(test)]
mod tests;
