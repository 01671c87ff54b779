//! Training in scaled arithmetic.

mod channels;
#[path = "../../examples/train_vision/data.rs"]
#[allow(dead_code, reason = "the example loads files as well")]
mod data;
mod digits;
mod export;
mod gpt;
mod layers;
mod magnitudes;
#[path = "../../examples/scaled_mnist/net.rs"]
mod net;
#[path = "../../examples/scaled_mnist/run.rs"]
mod run;
#[path = "../../examples/scaled_mnist/watch.rs"]
#[allow(dead_code, reason = "the example draws as well")]
mod watch;
