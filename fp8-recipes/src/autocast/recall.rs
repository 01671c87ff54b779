//! Forward passes that run a second time: [`crate::nn::checkpoint`].
//!
//! The first run of a checkpointed function notes, for every use of a layer in the order of its uses ([`Log`]), what the layer
//! has signed in with: settings and cells, and of each cast of its forward pass the scale that came from the model's table
//! and the key of a stochastic rounding ([`CastNotes`]). The second run opens a context without a session that gives the
//! layers this instead of signing them in ([`Replay`]): so it does not matter whether the guard is still open and which
//! scales the table has by then, and no step sees the run. Casts of its forward pass are repeated as noted, unnoticed.
//! Those of the backward pass behind it are made as ever, from the same settings, and record into the same cells: they have
//! not been done before.
//!
//! Guards that are opened in a second run change how layers compute, as in the first, and have no step.
//!
//! A function within a function that is checkpointed too runs three times. Its first run is noted in both logs; when the
//! outer one runs again, its first run is a repetition by the outer log and is noted anew in one of its own.

use super::layer_step::LayerStep;
use super::settings::Settings;
use super::state::Fp8State;
use crate::config::Operand;
use crate::error::{GuardError, Result};
use fp8_candle::CastNotes;
use fp8_candle::state::StepCells;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The uses of layers in a run.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// By address of the state, which the uses hold.
    uses: Mutex<HashMap<usize, Vec<Arc<Use>>>>,
}

/// One use of a layer.
#[derive(Debug)]
struct Use {
    state: Arc<Fp8State>,
    settings: Settings,
    cells: Arc<StepCells>,
    /// Of input, weight and output.
    casts: [CastNotes; 3],
}

/// A second run.
#[derive(Debug)]
pub(crate) struct Replay {
    log: Arc<Log>,
    /// How often each layer was used in it so far.
    done: Mutex<HashMap<usize, usize>>,
}

/// What is noted and repeated on a thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recall {
    replay: Option<Arc<Replay>>,
    logs: Vec<Arc<Log>>,
}

impl Recall {
    /// The same, noted in `log` too.
    pub(super) fn noting(&self, log: &Arc<Log>) -> Self {
        let mut recall = self.clone();
        recall.logs.push(log.clone());
        recall
    }

    /// The second run of what `log` notes.
    pub(super) fn replaying(log: &Arc<Log>) -> Self {
        Self {
            replay: Some(Arc::new(Replay {
                log: log.clone(),
                done: Mutex::default(),
            })),
            logs: vec![],
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.replay.is_none() && self.logs.is_empty()
    }

    pub(super) fn replays(&self) -> bool {
        self.replay.is_some()
    }

    /// How the layer computes in a second run, None in a first one.
    pub(super) fn repeated(&self, layer: &Arc<Fp8State>) -> Result<Option<LayerStep>> {
        let Some(replay) = &self.replay else {
            return Ok(None);
        };
        let again = replay.next(layer).ok_or_else(|| GuardError::NotRepeated {
            path: layer.path().to_string(),
        })?;
        self.note(layer, &again);
        let casts = again.casts.each_ref().map(CastNotes::repeated);
        Ok(Some(LayerStep {
            settings: again.settings.clone(),
            cells: again.cells.clone(),
            casts: Some(casts),
            replays: true,
        }))
    }

    /// How the layer computes in a first run.
    pub(super) fn noted(
        &self,
        layer: &Arc<Fp8State>,
        settings: Settings,
        cells: Arc<StepCells>,
    ) -> LayerStep {
        let casts = (!self.logs.is_empty()).then(|| {
            let used = Arc::new(Use {
                state: layer.clone(),
                settings: settings.clone(),
                cells: cells.clone(),
                casts: Default::default(),
            });
            self.note(layer, &used);
            used.casts
                .each_ref()
                .map(|notes| fp8_candle::Recall::Note(notes.clone()))
        });
        LayerStep {
            settings,
            cells,
            casts,
            replays: false,
        }
    }

    fn note(&self, layer: &Arc<Fp8State>, used: &Arc<Use>) {
        for log in &self.logs {
            let mut uses = log.uses.lock().unwrap_or_else(PoisonError::into_inner);
            uses.entry(key(layer)).or_default().push(used.clone());
        }
    }
}

impl Replay {
    fn next(&self, layer: &Arc<Fp8State>) -> Option<Arc<Use>> {
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
    /// How the casts of an operand are noted or repeated; None in the backward pass and without a checkpoint.
    pub(crate) fn recall(&self, operand: Operand) -> Option<fp8_candle::Recall> {
        let [input, weight, output] = self.casts.as_ref()?;
        match operand {
            Operand::Input => Some(input.clone()),
            Operand::Weight => Some(weight.clone()),
            Operand::Output => Some(output.clone()),
            _ => None,
        }
    }
}
