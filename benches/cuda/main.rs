//! CUDA benchmark against candle: `cargo bench --features cuda --bench cuda -- --help`.

mod args;
mod attention;
mod casts;
#[path = "../../examples/shared/clock.rs"]
mod clock;
#[path = "../shared/args.rs"]
mod common;
mod encoder;
mod gemm;
#[path = "../shared/json.rs"]
mod json;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/encoder_layer/layer.rs"]
mod layer;
mod linear;
mod ops;
mod race;
mod rows;
mod session;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/shared/spread.rs"]
mod spread;
#[allow(dead_code, reason = "the CPU bench uses the rest")]
#[path = "../shared/step.rs"]
mod step;
#[path = "../../examples/shared/upstream.rs"]
mod upstream;

use anyhow::Result;
use args::Args;
use clap::Parser;
use session::Session;

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(path) = &args.common.json {
        json::check_target(path)?;
    }
    let session = Session::new(&args)?;
    rows::print_header();
    gemm::run(&session)?;
    linear::run(&session)?;
    casts::run(&session)?;
    attention::run(&session)?;
    encoder::run(&session)?;
    ops::run(&session)?;
    let rows = session.into_rows();
    let misses = rows
        .iter()
        .filter(|row| row.passes() == Some(false))
        .count();
    let barred = rows.iter().filter(|row| row.bar.is_some()).count();
    println!("\n{} of {barred} bars reached", barred - misses);
    if let Some(path) = &args.common.json {
        json::write_json(path, &rows)?;
    }
    Ok(())
}
