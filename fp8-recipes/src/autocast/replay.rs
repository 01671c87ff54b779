//! Forward passes that run a second time: [`crate::nn::checkpoint`].
//!
//! The first run of a recomputed function logs every use of a layer in its order ([`RunLog`]): the settings and cells that
//! the layer signed in with, and recordings of the casts of its forward pass ([`Recording`]). The second run opens a context
//! without a session that hands this to the layers instead of signing them in ([`Rerun`]). So it does not matter whether the
//! guard is still open and which scales the table has by then, and no step sees the run. Casts of its forward pass are
//! replayed without telling observers. Casts of the backward pass behind it happen for the first time: they are ordinary
//! casts by the same settings, and record into the same cells.
//!
//! Guards that are opened in a second run change how layers compute, as in the first, and have no step.
//!
//! A recomputed function within a recomputed function runs three times. Its first run is logged in both logs; when the outer one
//! runs again, its first run is replayed from the outer log and logged in a new log of its own.

use super::settings::{LayerStep, Settings};
use super::state::Fp8State;
use crate::config::Operand;
use crate::error::{GuardError, Result};
use fp8_candle::state::StepCells;
use fp8_candle::{Recording, Replay};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The uses of layers in a run.
#[derive(Debug, Default)]
pub(crate) struct RunLog {
    /// By address of the state, which the uses hold.
    uses: Mutex<HashMap<usize, Vec<Arc<LayerUse>>>>,
}

/// One use of a layer.
#[derive(Debug)]
struct LayerUse {
    state: Arc<Fp8State>,
    settings: Settings,
    cells: Arc<StepCells>,
    /// Of input, weight and output.
    casts: [Recording; 3],
}

/// A second run.
#[derive(Debug)]
pub(crate) struct Rerun {
    log: Arc<RunLog>,
    /// How often each layer was used in it so far.
    done: Mutex<HashMap<usize, usize>>,
}

/// The runs of recomputed functions that a thread is in: the second run of one, and the logs of others' first runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Runs {
    rerun: Option<Arc<Rerun>>,
    logs: Vec<Arc<RunLog>>,
}

impl Runs {
    /// The same, in a run that is logged in `log` too.
    pub(super) fn logged(&self, log: &Arc<RunLog>) -> Self {
        let mut runs = self.clone();
        runs.logs.push(log.clone());
        runs
    }

    /// A second run of what `log` has logged.
    pub(super) fn rerun(log: &Arc<RunLog>) -> Self {
        Self {
            rerun: Some(Arc::new(Rerun {
                log: log.clone(),
                done: Mutex::default(),
            })),
            logs: vec![],
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rerun.is_none() && self.logs.is_empty()
    }

    pub(super) fn replays(&self) -> bool {
        self.rerun.is_some()
    }

    /// How the layer computes in a second run, None in a first one.
    pub(super) fn replayed(&self, layer: &Arc<Fp8State>) -> Result<Option<LayerStep>> {
        let Some(rerun) = &self.rerun else {
            return Ok(None);
        };
        let again = rerun.next(layer).ok_or_else(|| GuardError::NotRepeated {
            path: layer.path().to_string(),
        })?;
        self.log(layer, &again);
        let casts = again.casts.each_ref().map(Recording::player);
        Ok(Some(LayerStep {
            settings: again.settings.clone(),
            cells: again.cells.clone(),
            casts: Some(casts),
            replays: true,
        }))
    }

    /// How the layer computes in a first run.
    pub(super) fn recorded(
        &self,
        layer: &Arc<Fp8State>,
        settings: Settings,
        cells: Arc<StepCells>,
    ) -> LayerStep {
        let casts = (!self.logs.is_empty()).then(|| {
            let used = Arc::new(LayerUse {
                state: layer.clone(),
                settings: settings.clone(),
                cells: cells.clone(),
                casts: Default::default(),
            });
            self.log(layer, &used);
            used.casts.each_ref().map(Recording::recorder)
        });
        LayerStep {
            settings,
            cells,
            casts,
            replays: false,
        }
    }

    fn log(&self, layer: &Arc<Fp8State>, used: &Arc<LayerUse>) {
        for log in &self.logs {
            let mut uses = log.uses.lock().unwrap_or_else(PoisonError::into_inner);
            uses.entry(key(layer)).or_default().push(used.clone());
        }
    }
}

impl Rerun {
    fn next(&self, layer: &Arc<Fp8State>) -> Option<Arc<LayerUse>> {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let done = done.entry(key(layer)).or_default();
        let uses = self.log.uses.lock().unwrap_or_else(PoisonError::into_inner);
        let next = uses.get(&key(layer))?.get(*done)?;
        debug_assert!(Arc::ptr_eq(&next.state, layer));
        *done += 1;
        Some(next.clone())
    }
}

fn key(layer: &Arc<Fp8State>) -> usize {
    Arc::as_ptr(layer) as usize
}

impl LayerStep {
    /// How the casts of an operand are recorded or replayed; None in the backward pass and without a checkpoint.
    pub(crate) fn replay(&self, operand: Operand) -> Option<Replay> {
        let [input, weight, output] = self.casts.as_ref()?;
        match operand {
            Operand::Input => Some(input.clone()),
            Operand::Weight => Some(weight.clone()),
            Operand::Output => Some(output.clone()),
            _ => None,
        }
    }
}
