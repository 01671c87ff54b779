//! `fp8 convert`: the same codes and scales in another spelling.

use crate::output::Target;
use crate::progress::Bar;
use crate::source::Opening;
use anyhow::Result;
use fp8::rewrite::{self, Spelling};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint
    dir: PathBuf,
    /// compressed-tensors, fp8-blocks (DeepSeek, Qwen), autofp8 or modelopt
    #[arg(long, value_name = "SPELLING")]
    to: Spelling,
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    opening: Opening,
}

pub fn run(args: &Args) -> Result<()> {
    let checkpoint = args.opening.open(&args.dir)?;
    let mut bar = Bar::new("convert")?;
    let (out, options) = (&args.target.out, args.target.options());
    let report = rewrite::convert(&checkpoint, out, args.to, &options, &mut |p| bar.show(p))?;
    drop(bar);
    args.target.print(&report)
}
