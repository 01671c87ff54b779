//! Fine-tuning: the data.
//!
//! [`Dataset`] makes batches of text files, chats and labelled texts; [`crate::guide::training_data`] has the formats.

mod data;

pub use data::{
    Batch, DataError, Dataset, DatasetOptions, DatasetSummary, IGNORED, Place, Task, Validation,
};
