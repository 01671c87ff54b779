//! From files to batches: files, documents (`document.rs`, `source.rs`, `lines.rs`), what they are for (`task.rs`), their tokens
//! (`encode.rs`, `chat.rs`), rows (`pack.rs`), an order for each epoch (`order.rs`), batches.

mod batch;
mod chat;
mod corpus;
mod dataset;
mod document;
mod encode;
mod error;
mod lines;
mod options;
mod order;
mod pack;
mod source;
mod summary;
mod task;

pub use batch::{Batch, IGNORED};
pub use dataset::Dataset;
pub use error::{DataError, Place};
pub use options::{DatasetOptions, Task, Validation};
pub use source::is_json_lines;
pub use summary::DatasetSummary;
