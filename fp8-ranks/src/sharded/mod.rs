//! Parameters in parts: each rank holds a range of every parameter, and layers gather what they compute with.
//!
//! | file | concern |
//! |---|---|
//! | `layout.rs` | which rank holds which elements |
//! | `trace.rs` | what the ranks have communicated, so that they notice when they disagree |
//! | `var.rs` | a parameter: gathering its value, scattering its gradient, how layers find it |
//! | `weight.rs` | a parameter as the weight of a linear layer, fetched in each pass |
//! | `map.rs` | parameters by name, and the `VarBuilder` that makes them |

mod layout;
mod map;
mod trace;
mod var;
mod weight;

pub use layout::{BLOCK, Layout};
pub use map::ShardedVarMap;
pub use var::ShardedVar;
