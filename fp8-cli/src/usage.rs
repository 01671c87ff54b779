//! Invalid arguments: they end the program with code 2, as in other tools; other errors with 1.

use crate::requests::Request;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::process::ExitCode;

/// An error that shows only when all arguments are seen together.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// A run that was asked to stop, after it has said so.
#[derive(Debug)]
pub struct Interrupted(pub Request);

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("stopped")
    }
}

impl std::error::Error for Interrupted {}

/// The first of some flags that was given.
pub fn first_given(flags: impl IntoIterator<Item = (bool, &'static str)>) -> Option<&'static str> {
    let mut flags = flags.into_iter();
    flags.find_map(|(given, flag)| given.then_some(flag))
}

/// Numbers for which `fits` holds; `expected` says which.
pub fn number(
    expected: &'static str,
    fits: fn(f64) -> bool,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync {
    move |text| match text.parse() {
        Ok(number) if fits(number) => Ok(number),
        _ => Err(format!("expected {expected}")),
    }
}

/// Numbers of steps from 1 on.
pub fn steps(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("expected a whole number of at least 1".into()),
    }
}

/// Whole numbers from `least` on.
pub fn at_least(least: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync {
    move |text| match text.parse() {
        Ok(number) if number >= least => Ok(number),
        _ => Err(format!("expected a whole number of at least {least}")),
    }
}

/// Prints help and version as clap does, and any error in one line. `command` is the command that was given, if there is one of that name.
pub fn refuse(error: &clap::Error, command: Option<&str>) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let line = match error.kind() {
        ErrorKind::ValueValidation => out_of_range(error),
        ErrorKind::ArgumentConflict if alone(error).is_some() => alone(error).unwrap_or_default(),
        _ => {
            let text = error.render().to_string();
            let what = text.split("\n\n").next().unwrap_or_default();
            let line: Vec<&str> = what.split_whitespace().collect();
            let line = line.join(" ");
            match line.strip_prefix("error: ") {
                Some(line) => line.to_string() + &meant(error),
                // Without arguments clap's error is the help text.
                None => "a command is missing".to_string(),
            }
        }
    };
    let end = if line.ends_with('?') { "" } else { "." };
    let help = command.map_or("fp8 --help".to_string(), |name| {
        format!("fp8 {name} --help")
    });
    eprintln!("error: {line}{end} Try `{help}`");
    ExitCode::from(2)
}

/// The message for a flag that no other may stand beside: clap does not name the others.
fn alone(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    if !matches!(
        error.get(ContextKind::PriorArg),
        None | Some(ContextValue::None)
    ) {
        return None;
    }
    let flag = flag.split(' ').next().unwrap_or_default();
    let words = std::env::args_os().skip(1);
    let others = words.filter_map(|word| {
        let word = word.to_string_lossy();
        let name = word.split('=').next().unwrap_or_default().to_string();
        (name.starts_with("--") && name != flag).then_some(name)
    });
    let others: Vec<String> = others.collect();
    let others = match others.is_empty() {
        true => "all other arguments".to_string(),
        false => others.join(", "),
    };
    Some(format!(
        "{flag} takes the settings that are stored there: leave out {others}"
    ))
}

/// The message for a value that its flag's parser rejected.
fn out_of_range(error: &clap::Error) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    // clap appends the value's name to the flag.
    let flag = text(ContextKind::InvalidArg).split(' ').next();
    let (flag, value) = (flag.unwrap_or_default(), text(ContextKind::InvalidValue));
    let why = std::error::Error::source(error).map_or(String::new(), |why| format!(": {why}"));
    format!("{flag} is {value}{why}")
}

/// The command, flag or value that was likely meant.
fn meant(error: &clap::Error) -> String {
    let kinds = [
        ContextKind::SuggestedSubcommand,
        ContextKind::SuggestedArg,
        ContextKind::SuggestedValue,
    ];
    let near = kinds.into_iter().find_map(|kind| match error.get(kind)? {
        ContextValue::String(near) => Some(near.clone()),
        // The likeliest suggestion is the last.
        ContextValue::Strings(near) => near.last().cloned(),
        _ => None,
    });
    near.map_or(String::new(), |near| format!("; did you mean {near}?"))
}
