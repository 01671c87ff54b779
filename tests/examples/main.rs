//! The parts of the examples that touch a user's files, and how their errors read.

mod files;
mod train_gpt;

#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/calibrate/main.rs"]
mod calibrate;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/candle_sources.rs"]
mod candle_sources;
#[path = "../../examples/train_gpt/choice.rs"]
mod choice;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/train_gpt/data.rs"]
mod data;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/gpt/mod.rs"]
mod gpt;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/train_gpt/record.rs"]
mod record;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/shared/runs.rs"]
mod runs;
#[path = "../../examples/train_gpt/size.rs"]
mod size;
#[path = "../../examples/shared/vocabulary.rs"]
mod vocabulary;
