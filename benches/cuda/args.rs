//! The command line.

use crate::common::Common;
use clap::Parser;

/// CUDA benchmark of FP8 for candle against candle's bf16
#[derive(Clone, Debug, Parser)]
#[command(after_help = "\
Contestants take turns; times are medians between two CUDA events. Products, casts and ops are queued behind a copy, so
that the host's part does not show; layers and optimizers are timed as a program runs them. A ratio is the other's time
over ours. The ratios of linear layers leave out what candle takes to hand the output's gradient over, which is timed
beside them; ours_ms and against_ms contain it. For attention's
backward pass ours_ms, too, is without what handing gradients over takes.

JSON row: {case, metric, value, bar, ours_ms, against_ms, tflop_per_s, gb_per_s}, null where there is nothing; `bar` is
the least value asked for, and for the metric `ms` the most.")]
pub struct Args {
    #[command(flatten)]
    pub common: Common,
    /// Divide every size by N, a power of two, to see that everything runs; times and bars then mean nothing
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = power_of_two)]
    pub shrink: usize,
}

fn power_of_two(text: &str) -> Result<usize, String> {
    let number = text
        .parse()
        .ok()
        .filter(|number: &usize| number.is_power_of_two());
    number.ok_or_else(|| "expected a power of two".to_string())
}
