//! The command line.

use anyhow::{Context, Result, bail};
use std::path::PathBuf;

/// What `--help` prints.
pub const HELP: &str = "\
CPU benchmark of FP8 for candle against candle's f32, bf16 and Q8_0

Usage: cargo bench --bench cpu -- [OPTIONS]

Options:
  --json FILE    Write the rows as a JSON array, whole or not at all
  --quick        Fewer rounds, a smaller cast from memory, no slow columns; large models only if --filter names them
  --filter TEXT  Only cases whose name contains TEXT
  --help         Print this

Contestants take turns in one process; times are medians. Rows of one thread are in CPU time of that thread, the
others in wall time with the default number of threads (RAYON_NUM_THREADS, else one per core).

JSON row: {case, threads, metric, value, bar, ours_ms, candle_f32_ms, candle_bf16_ms, q8_0_ms, peak_fraction}, null
where there is nothing; a higher value is better and `bar` is what is asked of it.
";

/// The cases of one child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// GEMMs, layers and, on one thread, casts.
    Kernels,
    /// Compute-bound GEMMs only, for the forced instruction sets.
    Gemms,
    /// Training and generation.
    Models,
}

impl Group {
    const ALL: [Self; 3] = [Self::Kernels, Self::Gemms, Self::Models];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernels => "kernels",
            Self::Gemms => "gemms",
            Self::Models => "models",
        }
    }
}

/// The options.
#[derive(Clone, Debug, Default)]
pub struct Args {
    /// Where the JSON goes.
    pub json: Option<PathBuf>,
    /// Fewer rounds.
    pub quick: bool,
    /// Part of a case's name.
    pub filter: Option<String>,
    /// Set by the parent: print the rows of this group as JSON lines.
    pub child: Option<Group>,
}

impl Args {
    /// Reads the options; None if help is asked for.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Self>> {
        let mut parsed = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--json" => parsed.json = Some(value()?.into()),
                "--filter" => parsed.filter = Some(value()?),
                "--child" => {
                    let name = value()?;
                    let group = Group::ALL.into_iter().find(|group| group.name() == name);
                    parsed.child = Some(group.with_context(|| format!("no group {name}"))?);
                }
                "--quick" => parsed.quick = true,
                // Passed by cargo.
                "--bench" => {}
                "--help" | "-h" => return Ok(None),
                other => bail!("unknown argument {other}, see --help"),
            }
        }
        Ok(Some(parsed))
    }

    /// Whether a case is asked for.
    pub fn wants(&self, case: &str) -> bool {
        self.filter.as_ref().is_none_or(|text| case.contains(text))
    }
}
