//! The command line.

use anyhow::{Context, Result, bail, ensure};
use std::path::PathBuf;

/// What `--help` prints.
pub const HELP: &str = "\
CUDA benchmark of FP8 for candle against candle's bf16

Usage: cargo bench --features cuda --bench cuda -- [OPTIONS]

Options:
  --json FILE    Write the rows as a JSON array, whole or not at all
  --quick        Fewer rounds
  --filter TEXT  Only cases whose name contains TEXT
  --shrink N     Divide every size by N, to see that everything runs; its times and bars mean nothing
  --help         Print this

Contestants take turns; times are medians between two CUDA events. Products, casts and ops are queued behind a copy, so
that the host's part does not show; layers and optimizers are timed as a program runs them. A ratio is the other's time
over ours. The ratios of linear layers leave out what candle takes to hand the output's gradient over, which is timed
beside them; ours_ms and against_ms contain it.

JSON row: {case, metric, value, bar, ours_ms, against_ms, tflop_per_s, gb_per_s}, null where there is nothing; `bar` is
the least that is asked, for the metric `ms` the most.
";

/// The options.
#[derive(Clone, Debug)]
pub struct Args {
    /// Where the JSON goes.
    pub json: Option<PathBuf>,
    /// Fewer rounds.
    pub quick: bool,
    /// Part of a case's name.
    pub filter: Option<String>,
    /// What sizes are divided by.
    pub shrink: usize,
}

impl Args {
    /// Reads the options; None if help is asked for.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Self>> {
        let mut parsed = Self {
            json: None,
            quick: false,
            filter: None,
            shrink: 1,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--json" => parsed.json = Some(value()?.into()),
                "--filter" => parsed.filter = Some(value()?),
                "--shrink" => {
                    let text = value()?;
                    parsed.shrink = text.parse().with_context(|| format!("--shrink {text}"))?;
                    ensure!(
                        parsed.shrink.is_power_of_two(),
                        "--shrink {text}: not a power of two"
                    );
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
