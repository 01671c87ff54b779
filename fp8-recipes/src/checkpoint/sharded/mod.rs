//! Training checkpoints of parameters of which each rank holds a part.
//!
//! | file | concern |
//! |---|---|
//! | `parts.rs` | the tensors of an optimizer of parts |
//! | `gather.rs` | one file, as of whole parameters |

mod gather;
mod parts;

pub use gather::save_gathered;
