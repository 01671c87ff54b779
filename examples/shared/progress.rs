//! Progress of some work: a bar if stderr is a terminal, else a line every few seconds.

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// The time between two lines.
const PAUSE: Duration = Duration::from_secs(5);

/// Progress that is shown until this is dropped.
pub struct Progress {
    what: String,
    bar: ProgressBar,
    /// When the last line was written; `None` on a terminal.
    last: Option<Instant>,
}

impl Progress {
    /// `what` names the work; `units` is the part of the bar's template that counts, such as `{pos}/{len}`.
    pub fn new(what: &str, units: &str) -> Result<Self> {
        let bar = ProgressBar::new(0);
        let style = format!("{{prefix}} {{bar:30}} {units} {{eta}} {{msg}}");
        bar.set_style(ProgressStyle::with_template(&style)?);
        bar.set_prefix(what.to_string());
        let last = (!std::io::stderr().is_terminal()).then(Instant::now);
        let what = what.to_string();
        Ok(Self { what, bar, last })
    }

    /// Shows that `done` of `total` is done and that `at` is next.
    pub fn show(&mut self, done: u64, total: u64, at: &str) {
        match self.last {
            Some(last) if last.elapsed() >= PAUSE => {
                eprintln!("{}", line(&self.what, done, total, at));
                self.last = Some(Instant::now());
            }
            Some(_) => {}
            None => {
                self.bar.set_length(total);
                self.bar.set_position(done);
                self.bar.set_message(at.to_string());
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn line(what: &str, done: u64, total: u64, at: &str) -> String {
    let percent = u128::from(done) * 100 / u128::from(total.max(1));
    let line = format!("{what}: {percent}% {at}");
    line.trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_how_far_and_where() {
        assert_eq!(
            line("quantize", 3, 8, "layers.3.q"),
            "quantize: 37% layers.3.q"
        );
        assert_eq!(line("eval", 0, 0, ""), "eval: 0%");
        let mut progress = Progress::new("eval", "{pos}/{len}").unwrap();
        // As in a pipe, a pause after the last line; whole units without overflow.
        progress.last = Instant::now().checked_sub(PAUSE);
        let before = progress.last;
        progress.show(u64::MAX, u64::MAX, "");
        assert!(before.is_none() || progress.last > before);
    }
}
