//! CPU benchmark against candle: `cargo bench --bench cpu -- --help`.
//!
//! The parent measures the machine's peaks and runs every group of cases in a child process of the same executable,
//! because candle and rayon fix their numbers of threads, and `fp8-core` its instruction set, once per process.

mod args;
mod attention;
mod auto;
#[path = "../../examples/shared/candle_sources.rs"]
mod candle_sources;
mod casts;
mod checkpoint;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/train_gpt/choice.rs"]
mod choice;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/clock.rs"]
mod clock;
#[path = "../shared/args.rs"]
mod common;
mod conv;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/train_gpt/data.rs"]
mod data;
mod eight_bits;
mod gemm;
mod generation;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/gpt/mod.rs"]
mod gpt;
mod growth;
mod held;
mod inputs;
#[path = "../shared/json.rs"]
mod json;
mod linear;
#[path = "../../examples/shared/parameters.rs"]
mod parameters;
mod parent;
mod peaks;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/train_gpt/ranks.rs"]
mod ranks;
mod rows;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/train_gpt/run.rs"]
mod run;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/runs.rs"]
mod runs;
mod serving;
mod session;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/train_gpt/settings.rs"]
mod settings;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/train_gpt/sharded.rs"]
mod sharded;
mod skinny;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/spread.rs"]
mod spread;
#[path = "../shared/step.rs"]
mod step;
mod timing;
mod training;
#[path = "../../examples/shared/upstream.rs"]
mod upstream;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/vocabulary.rs"]
mod vocabulary;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/train_gpt/weights.rs"]
mod weights;

use anyhow::Result;
use args::{Args, Group};
use clap::Parser;
use session::Session;

fn main() -> Result<()> {
    // For every contestant: or each large output pays for fresh pages, which take longer than the product itself.
    fp8::keep_freed_memory();
    fp8::fp8_core::Isa::from_env()?;
    let args = Args::parse();
    let Some(group) = args.child else {
        return parent::run(&args);
    };
    let session = Session::new(&args.common)?;
    match group {
        Group::Kernels => {
            gemm::run(&session)?;
            linear::run(&session)?;
            skinny::run(&session)?;
            skinny::run_from_memory(&session)?;
            conv::run(&session)?;
            attention::run(&session)?;
            auto::run(&session)?;
            casts::run(&session)
        }
        Group::Gemms => {
            gemm::run(&session)?;
            skinny::run_wide(&session)
        }
        Group::Models => {
            training::run(&session)?;
            eight_bits::run(&session)?;
            growth::run(&session)?;
            held::run(&session)?;
            generation::run(&session)?;
            checkpoint::run(&session)?;
            serving::run(&session)
        }
    }
}
