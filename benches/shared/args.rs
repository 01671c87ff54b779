//! What both benches take on the command line.

use std::path::PathBuf;

#[derive(Clone, Debug, clap::Args)]
pub struct Common {
    /// Write the rows as a JSON array, whole or not at all
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Fewer rounds; on the CPU also a smaller cast from memory, no slow columns, and large models only if --filter names them
    #[arg(long)]
    pub quick: bool,
    /// Only cases whose name contains TEXT
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

impl Common {
    /// Whether the filter lets a case through.
    pub fn wants(&self, case: &str) -> bool {
        self.filter.as_ref().is_none_or(|text| case.contains(text))
    }
}
