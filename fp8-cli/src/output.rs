//! Where a rewrite goes, and how its report is printed.

use crate::usage::{Usage, first_given};
use anyhow::Result;
use fp8::atomic::keep_apart;
use fp8::models::gguf::is_gguf;
use fp8::rewrite::{WriteOptions, WriteReport};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Options of every command that writes a model.
#[derive(clap::Args)]
pub struct Target {
    /// Directory to write, missing or empty; with `fp8 convert --to gguf` the file
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Replace a model in that directory, together with all other files there, or the file
    #[arg(long)]
    overwrite: bool,
    /// Bytes of tensors in one file [default: 5000000000]
    #[arg(long, value_name = "N")]
    shard_bytes: Option<u64>,
    /// Leave out scales of KV caches
    #[arg(long)]
    drop_kv_scales: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

impl Target {
    pub fn options(&self) -> WriteOptions {
        let options = WriteOptions::new();
        let shard_bytes = self.shard_bytes.unwrap_or(options.shard_bytes);
        options
            .with_overwrite(self.overwrite)
            .with_shard_bytes(shard_bytes)
            .with_drop_kv_scales(self.drop_kv_scales)
    }

    /// The first given flag that is about directories of FP8, if any.
    pub fn of_directories(&self) -> Option<&'static str> {
        let given = [
            (self.shard_bytes.is_some(), "--shard-bytes"),
            (self.drop_kv_scales, "--drop-kv-scales"),
        ];
        first_given(given)
    }

    /// The flag that is about caches, if it was given.
    pub fn of_caches(&self) -> Option<&'static str> {
        self.drop_kv_scales.then_some("--drop-kv-scales")
    }

    /// Fails if the directory could replace or change one of the paths that the command reads, or has the name of a GGUF file.
    pub fn check<'a>(&self, inputs: impl IntoIterator<Item = &'a Path>) -> Result<()> {
        let out = &self.out;
        if is_gguf(out) {
            let way = "`fp8 convert DIR --to gguf` makes a GGUF file of it";
            let text = format!(
                "--out is {}: this command writes a directory; {way}",
                out.display()
            );
            return Err(Usage(text).into());
        }
        separate(out, inputs)
    }

    pub fn overwrites(&self) -> bool {
        self.overwrite
    }

    pub fn as_json(&self) -> bool {
        self.json
    }

    fn warn_of_rounding(&self, report: &WriteReport) {
        show_updates(report);
        let plain = |path: &&String| !report.update_errors.contains_key(*path);
        let again: Vec<&String> = report.requantized.iter().filter(plain).collect();
        if let [first, ..] = again.as_slice() {
            let count = again.len();
            let error = 100. * report.requantization_error.unwrap_or_default();
            let way = match report.update_errors.is_empty() {
                true => "; `fp8 convert` keeps codes as they are",
                false => "",
            };
            eprintln!(
                "warning: {count} layers were FP8 before and are rounded a second time (first {first}), with a relative error of at most \
                 {error:.3}%{way}"
            );
        }
    }

    pub fn print(&self, report: &WriteReport) -> Result<()> {
        self.warn_of_rounding(report);
        if self.json {
            let value = json!({
                "directory": report.directory.to_string_lossy(),
                "files": report.files,
                "quantized": report.quantized,
                "requantized": report.requantized,
                "requantization_error": report.requantization_error,
                "update_errors": report.update_errors,
                "ignored": report.ignored,
                "dequantized": report.dequantized,
                "unread_by_vllm": report.unread_by_vllm,
                "unmatched": report.unmatched,
                "exact_inputs": report.exact_inputs,
                "bytes": report.bytes,
            });
            return print_json(&value);
        }
        let mut text = String::new();
        for pattern in &report.unmatched {
            eprintln!("warning: no linear layer is named by `{pattern}`");
        }
        if let Some(first) = report.exact_inputs.first() {
            eprintln!(
                "warning: input scales of {} layers (`{first}` is the first) are powers of two in the source, but not in the output format",
                report.exact_inputs.len()
            );
        }
        // Dequantizing a whole folder was the request.
        if let (Some(first), false) = (report.dequantized.first(), report.quantized.is_empty()) {
            eprintln!(
                "warning: FP8 weights of the source that are in high precision in the output: {} (first {first})",
                report.dequantized.len()
            );
        }
        if let Some(first) = report.unread_by_vllm.first() {
            eprintln!(
                "warning: vLLM does not read {} of the layers as FP8 in this spelling (first {first})",
                report.unread_by_vllm.len()
            );
        }
        let mut experts = (report.ignored.iter()).filter(|path| path.ends_with(".experts"));
        if let (Some(first), false) = (experts.next(), report.quantized.is_empty()) {
            eprintln!(
                "warning: the experts of {} layers stay in high precision, because this model_type keeps all of a layer in one tensor (first {first})",
                1 + experts.count()
            );
        }
        let (layers, bytes) = (report.quantized.len(), size(report.bytes));
        writeln!(
            text,
            "{}: {layers} layers in FP8, {bytes}",
            report.directory.display()
        )?;
        for file in &report.files {
            writeln!(text, "  {file}")?;
        }
        print(&text)
    }
}

/// The share of an adapter's update that rounding may change before it is a warning.
const MUCH: f32 = 0.1;

/// Says what rounding to FP8 has left of an adapter's updates of FP8 layers, and names the worst layer.
fn show_updates(report: &WriteReport) {
    let errors = &report.update_errors;
    let worst = errors.iter().max_by(|one, other| one.1.total_cmp(other.1));
    let Some((path, worst)) = worst else {
        return;
    };
    let count = errors.len();
    let mean = errors.values().sum::<f32>() / count as f32;
    let much = errors.values().filter(|error| **error > MUCH).count();
    let (mean, worst) = (100. * mean, 100. * worst);
    let said = format!(
        "{count} layers with an update were FP8 before; rounding to FP8 again changes the updates by {mean:.1}% on average, and by at \
         most {worst:.1}% (`{path}`)"
    );
    match much {
        0 => eprintln!("{said}"),
        _ => eprintln!(
            "warning: {said}; {much} of them by more than {:.0}%: steps of FP8 are larger than small updates. Merge into the model in high \
             precision that the base was made from, or use the adapter beside the base",
            100. * MUCH
        ),
    }
}

/// Fails if writing to `out` could replace or change one of the paths that the command reads.
pub fn separate<'a>(out: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    match keep_apart(out, inputs) {
        Err(error) => Err(Usage(format!("--out: {error}")).into()),
        Ok(()) => Ok(()),
    }
}

/// Prints text; a reader that has closed the pipe, such as `head`, is not an error.
pub fn print(text: &str) -> Result<()> {
    use std::io::{ErrorKind, Write};
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    // What is left for the end of the program is lost without a word if there is no room for it.
    match written.and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::Error::from(error).context("writing to stdout"))
        }
        _ => Ok(()),
    }
}

pub fn print_json(value: &Value) -> Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// Bytes in readable units.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1000. {
            break;
        }
        (value, unit) = (value / 1000., next);
    }
    match unit {
        "B" => format!("{bytes} B"),
        _ => format!("{value:.1} {unit}"),
    }
}

/// Rows under a header; the first `left` columns are aligned to the left, the others to the right.
pub fn table(header: &[&str], left: usize, rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let header: Vec<String> = header.iter().map(|cell| cell.to_string()).collect();
    let mut text = String::new();
    for row in std::iter::once(&header).chain(rows) {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, width))| match column < left {
            true => format!("{cell:<width$}"),
            false => format!("{cell:>width$}"),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        text += line.trim_end();
        text += "\n";
    }
    text
}
