//! How one layer computes in a step.

use super::settings::Settings;
use fp8_candle::state::StepCells;
use std::sync::Arc;

/// How one layer computes in the step that it has signed in with.
#[derive(Debug)]
pub(crate) struct LayerStep {
    /// The settings of the guard, with the layer's own recipe if it has one.
    pub(crate) settings: Settings,
    /// The cells that its casts record into.
    pub(crate) cells: Arc<StepCells>,
    /// How the casts of input, weight and output are recorded or replayed.
    pub(super) casts: Option<[fp8_candle::Replay; 3]>,
    /// Whether this use of the layer is replayed.
    pub(crate) replays: bool,
}
