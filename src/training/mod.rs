//! Training runs: data, a trainer, the loop around it and the files that it writes.
//!
//! | item | what it is |
//! |---|---|
//! | [`Trainer`] | a model, its optimizer and its recipe; makes steps, validates, saves, resumes |
//! | [`TrainerConfig`] | steps, schedule, optimizer, recipe, micro-batches |
//! | [`Task`] | what is learned: batches and their loss |
//! | [`train`] | drives one or several [`Learner`]s, taking turns, until the last step or a stop |
//! | [`RunFolder`], [`Metrics`] | the files of a run: checkpoints, `metrics.jsonl`, `summary.json`, `loss.svg` |
//!
//! [`crate::guide::fine_tuning`] goes through a run.

mod config;
mod error;
mod folder;
mod learner;
mod metrics;
mod plot;
mod progress;
mod task;
mod trainer;
mod turns;

pub use config::TrainerConfig;
pub use error::{Error, Result};
pub use folder::RunFolder;
pub use learner::{Learner, StepRecord};
pub use metrics::{Line, Metrics};
pub use plot::loss_svg;
pub use progress::{Events, Progress, Silent, Stop};
pub use task::{Part, Task};
pub use trainer::Trainer;
pub use turns::{Ended, TurnOptions, train};
