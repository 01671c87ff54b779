//! The state of one layer or operator, and the tables that it is in.

use super::options::{LayerChoice, PrepareOptions};
use super::report::{LayerReport, Note, Outcome, PrepareReport};
use crate::autocast::{Fp8State, LayerRecipe};
use crate::config::SkipReason;
use crate::error::{Error, Result};
use crate::module::LayerKind;
use candle_core::Device;
use fp8_candle::weight_version::WeightVersion;
use fp8_candle::{LayerShards, Role, StateTable};
use std::sync::Arc;

/// What layers and operators of a model share.
pub(super) struct Shared<'a> {
    pub(super) options: &'a PrepareOptions,
    /// By these, an optimizer of the model's parameters finds its tables.
    pub(super) parameters: Arc<[WeightVersion]>,
    /// One for each device.
    pub(super) tables: Vec<Arc<StateTable>>,
    pub(super) report: PrepareReport,
    /// The first error, after which nothing more is prepared.
    pub(super) error: Option<Error>,
}

/// A layer or operator that gets state.
pub(super) struct Request<'a> {
    pub(super) path: &'a str,
    /// The state that the same layer got earlier in this visit.
    pub(super) shared: Option<Arc<Fp8State>>,
    /// The state that it has had since an earlier preparation.
    pub(super) before: Option<Arc<Fp8State>>,
    pub(super) roles: &'a [Role],
    pub(super) amax_history_len: usize,
    /// The parts that ranks hold of its tensors.
    pub(super) shards: Option<Arc<LayerShards>>,
    /// None for an operator without tensors, which any table serves.
    pub(super) device: Option<&'a Device>,
    /// Other names of its weight.
    pub(super) tied: Vec<String>,
}

impl Shared<'_> {
    /// The path of a layer or operator, unless it is skipped by its path alone.
    pub(super) fn path<'p>(&self, path: Option<&'p str>) -> Result<&'p str, SkipReason> {
        let path = path.ok_or(SkipReason::NoPath)?;
        match self.options.choice(path) {
            _ if path.is_empty() => Err(SkipReason::AtRoot),
            Some((pattern, LayerChoice::Off)) => Err(SkipReason::Off {
                pattern: pattern.clone(),
            }),
            _ => Ok(path),
        }
    }

    /// Reports the outcome for a layer or operator; `clear` takes away the state of one that is skipped.
    pub(super) fn record(
        &mut self,
        path: Option<&str>,
        kind: LayerKind,
        (out_features, in_features): (usize, usize),
        outcome: Result<Outcome>,
        clear: impl FnOnce(),
    ) {
        match outcome {
            Ok(outcome) => {
                if matches!(outcome, Outcome::Skipped(_)) {
                    clear();
                }
                self.report.layers.push(LayerReport {
                    path: path.map(str::to_string),
                    kind,
                    out_features,
                    in_features,
                    outcome,
                });
            }
            Err(error) => self.error = Some(error),
        }
    }

    /// The state of a layer or operator, with its recipe, and what is special about it.
    pub(super) fn state(&mut self, request: Request<'_>) -> Result<(Arc<Fp8State>, Vec<Note>)> {
        let path = request.path;
        let own = match self.options.choice(path) {
            Some((_, LayerChoice::Recipe(recipe))) => Some(LayerRecipe {
                recipe: (**recipe).clone(),
                config: recipe.resolve()?.into(),
            }),
            _ => None,
        };
        let mut notes = vec![];
        notes.extend((own.as_ref()).map(|own| Note::OwnRecipe(own.recipe.clone().into())));
        if !request.tied.is_empty() {
            notes.push(Note::Tied(request.tied));
        }
        let state = match (request.shared, request.before) {
            (Some(state), _) => {
                notes.push(Note::SharedState);
                state
            }
            (None, Some(state)) => {
                notes.push(Note::PreparedBefore);
                state
            }
            (None, None) => {
                let table = self.table(request.device)?;
                let (roles, len) = (request.roles, request.amax_history_len);
                Arc::new(Fp8State::new(path.into(), roles, len, &table)?)
            }
        };
        let fused = self.options.is_output_fused(path);
        if fused {
            notes.push(Note::OutputFused);
        }
        state.set_output_fused(fused);
        state.set_shards(request.shards);
        state.set_own_recipe(own);
        state.hold_parameters(&self.parameters);
        Ok((state, notes))
    }

    /// The model's table on this device.
    fn table(&mut self, device: Option<&Device>) -> Result<Arc<StateTable>> {
        let fits = |table: &&Arc<StateTable>| {
            device.is_none_or(|device| table.device().same_device(device))
        };
        if let Some(table) = self.tables.iter().find(fits) {
            return Ok(table.clone());
        }
        let table = StateTable::new(device.unwrap_or(&Device::Cpu))?;
        self.tables.push(table.clone());
        Ok(table)
    }
}
