//! The parts of the examples that touch a user's files, how their errors read, the clients of `serve`, and the comparison of `encoder_layer`.

#![allow(
    clippy::duplicate_mod,
    reason = "two examples have a module of the same shared file"
)]

mod encoder_layer;
mod files;
mod serve;
mod train_gpt;

#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/encoder_layer/args.rs"]
mod args;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/calibrate/main.rs"]
mod calibrate;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/candle_sources.rs"]
mod candle_sources;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/train_gpt/choice.rs"]
mod choice;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/serve/clients.rs"]
mod clients;
#[path = "../../examples/shared/clock.rs"]
mod clock;
#[path = "../../examples/encoder_layer/compare.rs"]
mod compare;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/train_gpt/data.rs"]
mod data;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/device.rs"]
mod device;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/gpt/mod.rs"]
mod gpt;
#[allow(dead_code, reason = "the CUDA bench uses the rest")]
#[path = "../../examples/encoder_layer/layer.rs"]
mod layer;
#[path = "../../examples/encoder_layer/race.rs"]
mod race;
#[path = "../../examples/encoder_layer/report.rs"]
mod report;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/runs.rs"]
mod runs;
#[path = "../../examples/train_gpt/size.rs"]
mod size;
#[path = "../../examples/shared/spread.rs"]
mod spread;
#[path = "../../examples/shared/upstream.rs"]
mod upstream;
#[path = "../../examples/shared/vocabulary.rs"]
mod vocabulary;
