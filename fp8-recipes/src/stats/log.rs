//! Statistics of every n-th step in a file.

use super::{CastStats, StatsReport};
use crate::FilesError;
use crate::atomic::FileError;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Appends the measurements of a [`CastStats`] to a file of JSON lines, every n-th step: one line for each layer and operand, a
/// [`StatsRow`](super::StatsRow) with its `step`.
///
/// A file that cannot be written does not stop the training: the first failure is logged as a warning (`tracing`), and nothing more
/// is written. An existing file is appended to, so that a resumed run continues it. [`StatsCurves`](super::StatsCurves) reads it.
///
/// ```
/// # use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes::{Autocast, CastStats, PrepareOptions, RecipeName, StatsCurves, StatsLog, StatsQuantity, nn, prepare_fp8, with_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("stats.jsonl");
/// # let x = Tensor::randn(0f32, 1., (4, 32), &Device::Cpu)?;
/// # let layer = nn::Linear::new(Tensor::randn(0f32, 1., (16, 32), &Device::Cpu)?, None).with_path("fc");
/// # prepare_fp8(&layer, &PrepareOptions::default())?;
/// let stats = CastStats::default();
/// let mut log = StatsLog::to_file(&path).every(10);
/// for step in 0..40 {
///     let mut autocast = Autocast::new(RecipeName::Tensorwise);
///     if log.is_due(step) {
///         autocast = autocast.with_stats(&stats); // the other steps measure nothing
///     }
///     with_fp8(autocast, || layer.forward(&x))?;
///     if let Some(report) = log.record(step, &stats) {
///         println!("{report}"); // the table
///     }
/// }
/// let curves = StatsCurves::from_file(&path)?;
/// assert_eq!(curves.steps(), [0, 10, 20, 30]);
/// std::fs::write(path.with_extension("svg"), curves.to_svg(StatsQuantity::Sqnr))?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct StatsLog {
    path: PathBuf,
    every: u64,
    file: LogFile,
}

#[derive(Debug)]
enum LogFile {
    Unopened,
    Open(File),
    Failed(FileError),
}

impl StatsLog {
    /// A log of every step into the file `path`, which is opened by the first [`StatsLog::record`].
    pub fn to_file(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_path_buf(),
            every: 1,
            file: LogFile::Unopened,
        }
    }

    /// A log of the steps that are multiples of `steps`; 0 counts as 1.
    #[must_use]
    pub fn every(self, steps: u64) -> Self {
        Self {
            every: steps.max(1),
            ..self
        }
    }

    /// Whether `step` is to be measured and recorded.
    pub fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every)
    }

    /// Takes the measurements and writes them as step `step`. Returns None, and takes nothing, if the step is not due.
    ///
    /// A failure to write is logged once and kept in [`StatsLog::failure`].
    pub fn record(&mut self, step: u64, stats: &CastStats) -> Option<StatsReport> {
        if !self.is_due(step) {
            return None;
        }
        let report = stats.take();
        if let Err(error) = self.append(step, &report) {
            tracing::warn!("statistics are no longer written: {error}");
            self.file = LogFile::Failed(error);
        }
        Some(report)
    }

    /// The error that stopped the writing, if any.
    pub fn failure(&self) -> Option<&FileError> {
        match &self.file {
            LogFile::Failed(error) => Some(error),
            _ => None,
        }
    }

    fn append(&mut self, step: u64, report: &StatsReport) -> Result<(), FileError> {
        let mut lines = Vec::new();
        for row in &report.rows {
            let mut line = serde_json::json!(row);
            line["step"] = step.into();
            lines.extend(line.to_string().into_bytes());
            lines.push(b'\n');
        }
        if let LogFile::Unopened = self.file {
            self.file = LogFile::Open(open(&self.path)?);
        }
        match &mut self.file {
            LogFile::Open(file) => file
                .write_all(&lines)
                .map_err(|source| failed(&self.path, "append to the file", source)),
            _ => Ok(()),
        }
    }
}

fn failed(path: &Path, action: &'static str, source: io::Error) -> FileError {
    FileError::Io {
        path: path.to_path_buf(),
        action,
        source,
    }
}

/// Opens the file at the beginning of a line: a killed run may have left a partial one.
fn open(path: &Path) -> Result<File, FileError> {
    // Opening a named pipe would block until there is a reader.
    if path.exists() {
        crate::read::open_regular(path).map_err(|error| match error {
            FilesError::Read { source, .. } => failed(path, "open the file", source),
            _ => FileError::WrongKind {
                path: path.to_path_buf(),
                expected: "regular file",
            },
        })?;
    }
    let mut options = OpenOptions::new();
    let file = options.read(true).append(true).create(true).open(path);
    let mut file = file.map_err(|source| failed(path, "open the file", source))?;
    let at_line = |file: &mut File| -> io::Result<()> {
        if file.metadata()?.len() == 0 {
            return Ok(());
        }
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        match last == *b"\n" {
            true => Ok(()),
            false => file.write_all(b"\n"),
        }
    };
    at_line(&mut file).map_err(|source| failed(path, "append to the file", source))?;
    Ok(file)
}
