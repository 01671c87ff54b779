//! `fp8 convert`: the same codes and scales in another spelling.

use crate::output::Target;
use crate::progress::{BYTES, Bar};
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
    /// Where the target's configuration cannot say that input scales are powers of two, say so in metadata that only this library reads
    #[arg(long)]
    power_of_two_inputs: bool,
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    opening: Opening,
}

pub fn run(args: &Args) -> Result<()> {
    let checkpoint = args.opening.open(&args.dir)?;
    let mut bar = Bar::new("convert", BYTES)?;
    let out = &args.target.out;
    let options = args
        .target
        .options()
        .with_power_of_two_inputs(args.power_of_two_inputs);
    let report = rewrite::convert(&checkpoint, out, args.to, &options, &mut |p| bar.show(p))?;
    drop(bar);
    args.target.print(&report)
}
