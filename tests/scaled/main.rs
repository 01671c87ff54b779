//! Training in scaled arithmetic.

mod channels;
mod digits;
mod export;
mod gpt;
#[path = "../../examples/images/mod.rs"]
#[allow(dead_code, reason = "the examples use the rest")]
mod images;
mod layers;
mod magnitudes;
#[path = "../../examples/scaled_mnist/net.rs"]
mod net;
#[path = "../../examples/shared/parameters.rs"]
mod parameters;
#[path = "../../examples/scaled_mnist/run.rs"]
mod run;
#[path = "../../examples/scaled_mnist/watch.rs"]
#[allow(dead_code, reason = "the example draws as well")]
mod watch;
