//! Forward and backward of one GPT encoder layer in f32, in mixed precision and in FP8, taking turns step by step with the same
//! parameters: how long each takes, and how far the results are apart.
//!
//! fp8layers publishes the times of this example in three runs on an H100: 84 ms in f32, 45 ms in mixed precision and 35 ms in FP8, so
//! FP8 is 2.4 and 1.29 times as fast. On a CPU the default sizes are smaller.
//!
//! ```bash
//! cargo run --release --example encoder_layer
//! cargo run --release --example encoder_layer -- --published --iterations 2 --warmup 1 # minutes a turn
//! cargo run --release --features cuda --example encoder_layer -- --device cuda --fp8 delayed
//! ```

mod args;
#[path = "../shared/clock.rs"]
mod clock;
mod compare;
#[path = "../shared/device.rs"]
mod device;
#[path = "../shared/end.rs"]
mod end;
#[allow(dead_code, reason = "the CUDA bench uses the rest")]
mod layer;
mod race;
mod report;
#[path = "../shared/spread.rs"]
mod spread;
#[path = "../shared/upstream.rs"]
mod upstream;

use anyhow::Result;
use args::Args;
use clap::Parser;
use end::end;
use report::{Setup, verdict};
use std::process::ExitCode;

fn main() -> ExitCode {
    fp8::keep_freed_memory();
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let (config, runs, steps) = (args.layer()?, args.runs()?, args.steps()?);
    let device = args.device.open()?;
    candle_core::cuda::set_gemm_reduced_precision_f32(args.tf32);
    let outcomes = race::race(config, &runs, steps, &device)?;
    let setup = Setup {
        config,
        steps,
        is_cuda: device.is_cuda(),
        tf32: args.tf32,
    };
    match args.json {
        true => println!("{}", setup.json(&outcomes)?),
        false => setup.print(&outcomes)?,
    }
    let agreeing = verdict(&outcomes)?;
    if !args.json && agreeing > 0 {
        println!("All results agree within the error of their dtypes.");
    }
    Ok(())
}
