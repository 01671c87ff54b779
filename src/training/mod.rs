//! Training runs: data, a trainer, the loop around it and the files that it writes.
//!
//! | item | what it is |
//! |---|---|
//! | [`Trainer`] | a model, its optimizer and its recipe; makes steps, validates, saves, resumes |
//! | [`TrainerConfig`] | steps, schedule, optimizer, recipe, micro-batches |
//! | [`Objective`] | what is learned: batches and their loss |
//! | [`TrainableModel`], [`Trained`] | a model opened from a file, with variables as parameters; the source that writes its trained values |
//! | [`Dataset`] | batches of text files, chats and labelled texts |
//! | [`NextToken`] | the objective of language models |
//! | [`Classify`], [`Contrast`] | the objectives of encoders: labels of texts, embeddings of queries and their texts |
//! | [`train`] | drives one or several [`Learner`]s, taking turns, until the last step or a stop |
//! | [`RunFolder`], [`Metrics`] | the files of a run: checkpoints, `metrics.jsonl`, `summary.json`, `loss.svg` |
//!
//! [`crate::guide::fine_tuning`] goes through a run.

mod base;
mod classify;
mod config;
mod contrast;
mod data;
mod encoder;
mod error;
mod folder;
mod initial;
mod language_model;
mod learner;
mod lines;
mod metrics;
mod objective;
mod plot;
mod progress;
mod rows;
mod stats;
mod trained;
mod trainer;
mod turns;
mod vars;

pub use base::TrainableModel;
pub use classify::Classify;
pub use config::TrainerConfig;
pub use contrast::Contrast;
pub use data::{
    Batch, DataError, Dataset, DatasetOptions, DatasetSummary, IGNORED, Place, Task, Validation,
    is_json_lines,
};
pub use error::{Error, NotFinite, Result};
pub use folder::RunFolder;
pub use initial::initialize_adapter;
pub use language_model::NextToken;
pub use learner::{Learner, StepRecord};
pub use lines::any_number;
pub use metrics::{Line, Metrics};
pub use objective::{Measured, Objective, Part};
pub use plot::loss_svg;
pub use progress::{Events, Progress, Silent, Stop};
pub use rows::Rows;
pub use stats::{append_stats, trim_stats};
pub use trained::Trained;
pub use trainer::Trainer;
pub use turns::{Ended, TurnOptions, train};
