//! The exit of an example: an error becomes one line on stderr.

use anyhow::{Error, Result};
use std::process::ExitCode;

/// The exit code of `result`; an error goes to stderr. `main` does not return the error itself: Rust would print a
/// backtrace, even for a missing file.
pub fn end(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, in one line.
pub fn one_line(error: &Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        // candle's errors print the backtrace that they hold, a line per frame and one per place.
        let lines = text.lines().map(str::trim).enumerate();
        let lines = lines.filter(|(number, line)| *number == 0 || !is_frame(line));
        let text = lines.map(|(_, line)| line).collect::<Vec<_>>().join(" ");
        let text = text.trim();
        // Many errors name their cause already.
        if !text.is_empty() && !line.contains(text) {
            line += if line.is_empty() { "" } else { ": " };
            line += text;
        }
    }
    line
}

/// `12: function` or `at file:line:column`, as backtraces print them.
fn is_frame(line: &str) -> bool {
    let number = line.split_once(": ").map(|(number, _)| number);
    let numbered = number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    let place = line.strip_prefix("at ").is_some_and(|place| {
        let mut parts = place.rsplit(':');
        let mut number = || parts.next().is_some_and(|n| n.parse::<u32>().is_ok());
        number() && number()
    });
    numbered || place
}
