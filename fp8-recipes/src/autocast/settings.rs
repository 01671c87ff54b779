//! The options of a guard, resolved.

use crate::config::ResolvedConfig;
use crate::stats::{CastObserver, CastStats};
use fp8_candle::state::ReductionGroup;
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
    pub(crate) config: Arc<ResolvedConfig>,
    pub(super) group: Option<Arc<dyn ReductionGroup>>,
    pub(crate) stats: Option<CastStats>,
    pub(crate) hook: Option<CastObserver>,
}
