//! Whether a layer is faster in FP8 than in high precision, measured on this machine.
//!
//! | file | concern |
//! |---|---|
//! | `case.rs` | what is timed |
//! | `timing.rs` | the times and the decision |
//! | `measure.rs`, `upstream.rs` | timing it |
//! | `store.rs` | times that are known |
//! | `machine.rs`, `cache.rs` | those of this machine, in a file |
//! | `serve.rs` | which layers of a checkpoint are decoded |

mod cache;
mod case;
mod machine;
mod measure;
mod serve;
mod store;
mod timing;

pub use case::{Computation, LayerCase};
pub use serve::{ServedLayer, ServingReport, decode_where_faster};
pub use store::LayerTimings;
pub use timing::LayerTiming;
