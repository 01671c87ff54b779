//! Invalid arguments: they end the program with code 2, as in other tools; other errors with 1.

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

/// Whole numbers from `least` on.
pub fn at_least(least: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync {
    move |text| match text.parse() {
        Ok(number) if number >= least => Ok(number),
        _ => Err(format!("expected a whole number of at least {least}")),
    }
}

/// Prints help and version as clap does, and any error in one line.
pub fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::ValueValidation {
        eprintln!("error: {}", ended(out_of_range(error)));
        return ExitCode::from(2);
    }
    let text = error.render().to_string();
    let what = text.split("\n\n").next().unwrap_or_default();
    let line: Vec<&str> = what.split_whitespace().collect();
    let line = line.join(" ");
    match line.strip_prefix("error: ") {
        Some(_) => {
            eprintln!("{}", ended(line + &meant(error)));
        }
        // Without arguments clap's error is the help text.
        None => eprintln!("error: a command is missing. Try `fp8 --help`"),
    }
    ExitCode::from(2)
}

fn ended(line: String) -> String {
    let end = if line.ends_with('?') { "" } else { "." };
    format!("{line}{end} Try `fp8 --help`")
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
