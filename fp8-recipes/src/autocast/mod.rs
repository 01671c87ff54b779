//! The autocast guard: inside it, prepared layers compute in FP8.
//!
//! The guard is bound to its thread (neither Send nor Sync); other threads enter the same context through an
//! [`AutocastHandle`]. Unlike Transformer Engine's it is not process-global: two threads may train two models with two
//! recipes. It decides whether layers compute in FP8 and by which recipe; scales and histories are in the model's
//! [`StateTable`](fp8_candle::StateTable).
//!
//! # Steps
//! An outermost training guard is one step: the scales of inputs and weights are updated when it closes, those of output
//! gradients when the model is next used under such a guard. [`end_step`] updates both at once, also inside a guard, so that one
//! guard may enclose a whole training loop. A failed step changes nothing: [`AutocastGuard::abort`], a panic, an
//! error inside [`with_fp8`], a guard that is dropped although it would wait for other ranks.
//!
//! # Threads
//! While a worker of a rayon pool waits, in this library or in candle, it runs other tasks of its pool on the same stack, which
//! would then see its guard. So guards cannot open there; [`AutocastHandle::run`] carries a context into such a task. This holds
//! for a pool of one thread too: its worker runs other tasks while it waits for another pool or yields.

mod beginnings;
mod config;
mod context;
mod ended_step;
mod guard;
mod handle;
mod job;
mod kept;
mod operator;
mod plan;
mod prepared;
mod replay;
mod session;
mod settings;
mod state;
mod step;
mod summary;
mod uses;

pub use config::Autocast;
pub(crate) use context::{Context, current};
pub use context::{is_fp8_enabled, is_guard_open, is_recomputing};
pub use fp8_candle::state::NonFinite;
pub use fp8_candle::state::{ReductionGroup, SingleProcess};
pub use guard::{AutocastGuard, fp8_autocast};
pub use handle::AutocastHandle;
pub(crate) use job::take_dropped;
pub(crate) use plan::{OperatorCasts, linear_plan};
pub(crate) use prepared::Prepared;
pub(crate) use replay::RunLog;
pub(crate) use settings::{LayerStep, Mode};
pub(crate) use state::LayerRecipe;
pub use state::{Calibration, Fp8State};
pub(crate) use step::unfinished_steps;
pub use step::{end_step, with_fp8};
pub use summary::StepSummary;
