//! How layers compute: the resolved options of a guard, and what a layer gets for one call.

use crate::config::ResolvedConfig;
use crate::stats::{CastObserver, CastStats};
use fp8_candle::state::{ReductionGroup, StepCells};
use std::sync::Arc;

/// How a prepared layer computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    HighPrecision,
    Calibrate,
    Fp8,
}

/// How layers inside a guard compute.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    pub(crate) training: bool,
    /// The place of the micro-batch in its step, over all ranks.
    pub(super) micro_batch: u32,
    pub(crate) config: Arc<ResolvedConfig>,
    pub(super) group: Option<Arc<dyn ReductionGroup>>,
    pub(crate) stats: Option<CastStats>,
    pub(crate) observer: Option<CastObserver>,
}

impl Settings {
    /// The ranks over which amaxes are reduced.
    pub(crate) fn group(&self) -> Option<&dyn ReductionGroup> {
        self.group.as_deref()
    }

    /// How many they are.
    pub(crate) fn reducing_ranks(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.ranks())
    }
}

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
