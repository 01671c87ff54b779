//! Parameters in parts: each rank holds a range of every parameter, and layers gather what they compute with.
//!
//! | file | concern |
//! |---|---|
//! | `layout.rs` | which rank holds which elements |
//! | `trace.rs` | what the ranks have communicated, so that they notice when they disagree |
//! | `var.rs` | a parameter: gathering its value, scattering its gradient, how layers find it |
//! | `amax.rs`, `known_amax.rs` | the amax of the whole, from which scales of FP8 codes are made |
//! | `weight.rs` | a parameter as the weight of a linear layer, fetched in each pass |
//! | `map.rs` | parameters by name, and the `VarBuilder` that makes them |

mod amax;
mod known_amax;
mod layout;
mod map;
mod trace;
mod var;
mod weight;

pub use amax::precompute_float8_dynamic_scale_for_fsdp;
pub use layout::{BLOCK, Layout};
pub use map::ShardedVarMap;
pub use var::ShardedVar;
