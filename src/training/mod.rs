//! Training runs: data, a trainer, the loop around it and the files that it writes.
//!
//! | item | what it is |
//! |---|---|
//! | [`Trainer`] | a model, its optimizer and its recipe; makes steps, validates, saves, resumes |
//! | [`TrainerConfig`] | steps, schedule, optimizer, recipe, micro-batches |
//! | [`Objective`] | what is learned: batches and their loss |
//! | [`TrainableModel`], [`Trained`] | a model of a file with variables as parameters; the file of its trained values |
//! | [`Dataset`] | batches of text files, chats and labelled texts |
//! | [`NextToken`] | the objective of language models |
//! | [`train`] | drives one or several [`Learner`]s, taking turns, until the last step or a stop |
//! | [`RunFolder`], [`Metrics`] | the files of a run: checkpoints, `metrics.jsonl`, `summary.json`, `loss.svg` |
//!
//! [`crate::guide::fine_tuning`] goes through a run.

mod base;
mod config;
mod data;
mod error;
mod folder;
mod language_model;
mod learner;
mod metrics;
mod objective;
mod plot;
mod progress;
mod stats;
mod trainer;
mod turns;

pub use base::{TrainableModel, Trained, initialize_adapter};
pub use config::TrainerConfig;
pub use data::{
    Batch, DataError, Dataset, DatasetOptions, DatasetSummary, IGNORED, Place, Task, Validation,
};
pub use error::{Error, NotFinite, Result};
pub use folder::RunFolder;
pub use language_model::{NextToken, Rows};
pub use learner::{Learner, StepRecord};
pub use metrics::{Line, Metrics};
pub use objective::{Objective, Part};
pub use plot::loss_svg;
pub use progress::{Events, Progress, Silent, Stop};
pub use stats::{append_stats, trim_stats};
pub use trainer::Trainer;
pub use turns::{Ended, TurnOptions, train};
