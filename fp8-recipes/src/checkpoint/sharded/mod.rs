//! Training checkpoints of parameters of which each rank holds a part.
//!
//! | file | concern |
//! |---|---|
//! | `index.rs` | which file holds which elements |
//! | `parts.rs` | the tensors of an optimizer of parts |
//! | `save.rs`, `resume.rs` | a file for each rank, and the index; any number of ranks reads them |
//! | `gather.rs` | one file, as of whole parameters |

mod gather;
mod index;
mod parts;
mod resume;
mod save;

pub use gather::save_gathered;
pub use resume::resume_sharded;
pub use save::save_sharded;
