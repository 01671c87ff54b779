//! The state of one layer or operator, and the tables that it is in.

use super::options::{LayerChoice, PrepareOptions};
use super::report::Note;
use crate::autocast::{Fp8State, LayerRecipe};
use crate::error::Result;
use candle_core::Device;
use fp8_candle::weight_version::WeightVersion;
use fp8_candle::{Role, StateTable};
use std::sync::Arc;

/// What layers and operators of a model share.
pub(super) struct Shared<'a> {
    pub(super) options: &'a PrepareOptions,
    /// By these, an optimizer of the model's parameters finds its tables.
    pub(super) parameters: Arc<[WeightVersion]>,
    /// One for each device.
    pub(super) tables: Vec<Arc<StateTable>>,
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
    /// None for an operator without tensors, which any table serves.
    pub(super) device: Option<&'a Device>,
    /// Other names of its weight.
    pub(super) tied: Vec<String>,
}

impl Shared<'_> {
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
