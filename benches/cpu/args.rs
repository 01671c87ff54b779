//! The command line.

use crate::common::Common;
use clap::{Parser, ValueEnum};

/// The cases of one child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// GEMMs, layers and, on one thread, casts.
    Kernels,
    /// Compute-bound GEMMs only, for the forced instruction sets.
    Gemms,
    /// Training and generation.
    Models,
}

impl Group {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernels => "kernels",
            Self::Gemms => "gemms",
            Self::Models => "models",
        }
    }
}

/// CPU benchmark of FP8 for candle against candle's f32, bf16 and Q8_0
#[derive(Clone, Debug, Parser)]
#[command(after_help = "\
Contestants take turns in one process; times are medians. Rows of one thread are in CPU time of the process, the
others in wall time with the default number of threads (RAYON_NUM_THREADS, else one per core).

JSON row: {case, threads, metric, value, bar, peak_bar, q8_0_bar, ours_ms, candle_f32_ms, candle_bf16_ms, q8_0_ms,
peak_fraction}, null where there is nothing; a higher value is better. Bars are the least asked for: of the value, of the
fraction of the peak (90%), and of the time of Q8_0 over ours (1.0q). They differ with the instruction set.")]
pub struct Args {
    #[command(flatten)]
    pub common: Common,
    /// Print the rows of this group as JSON lines, for the parent process
    #[arg(long, hide = true)]
    pub child: Option<Group>,
}
