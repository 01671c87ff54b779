//! State for operators without a GEMM of their own.

use super::options::LayerChoice;
use super::{LayerReport, Note, Outcome, PrepareOptions, PrepareReport, Preparer};
use crate::autocast::{Fp8State, LayerRecipe};
use crate::config::SkipReason;
use crate::error::Result;
use crate::module::{Fp8Layer, Fp8Operator, LayerKind, Visitor};
use candle_core::{Device, Tensor};
use fp8_candle::weight_version::WeightVersion;
use fp8_candle::{Role, StateTable};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Visits a model after its layers have state: operators without tensors share a table with them.
pub(super) struct OperatorPreparer<'a> {
    options: &'a PrepareOptions,
    parameters: Arc<[WeightVersion]>,
    tables: Vec<Arc<StateTable>>,
    by_path: HashMap<String, (LayerKind, Arc<Fp8State>)>,
    /// Paths of converted layers, whose rows have the same names.
    taken: HashSet<String>,
    report: PrepareReport,
    error: Option<crate::Error>,
}

impl<'a> Preparer<'a> {
    pub(super) fn for_operators(self) -> OperatorPreparer<'a> {
        OperatorPreparer {
            options: self.options,
            parameters: self.parameters,
            tables: self.tables,
            by_path: HashMap::new(),
            taken: self.by_path.into_keys().collect(),
            report: self.report,
            error: None,
        }
    }
}

impl OperatorPreparer<'_> {
    pub(super) fn finish(self) -> Result<PrepareReport> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.report),
        }
    }

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

    fn outcome(&mut self, operator: &dyn Fp8Operator) -> Result<Outcome> {
        let path = match operator.path() {
            None => return Ok(Outcome::Skipped(SkipReason::NoPath)),
            Some("") => return Ok(Outcome::Skipped(SkipReason::AtRoot)),
            Some(path) => path,
        };
        let choice = self.options.choice(path);
        if let Some((pattern, LayerChoice::Off)) = choice {
            let pattern = pattern.clone();
            return Ok(Outcome::Skipped(SkipReason::Off { pattern }));
        }
        let other_kind = (self.by_path.get(path)).is_some_and(|(kind, _)| *kind != operator.kind());
        if other_kind || self.taken.contains(path) {
            return Ok(Outcome::Skipped(SkipReason::SamePath));
        }
        let mut notes = vec![];
        let own = match choice {
            Some((_, LayerChoice::Recipe(recipe))) => Some(LayerRecipe {
                recipe: (**recipe).clone(),
                config: recipe.resolve()?.into(),
            }),
            _ => None,
        };
        if let Some(own) = &own {
            notes.push(Note::OwnRecipe(own.recipe.clone().into()));
        }
        let state = match (self.by_path.get(path), operator.fp8_state()) {
            (Some((_, state)), _) => {
                notes.push(Note::SharedState);
                state.clone()
            }
            (None, Some(state)) => {
                notes.push(Note::PreparedBefore);
                state
            }
            (None, None) => {
                let table = self.table(operator.device())?;
                // No scale is kept from step to step: the row counts stochastic roundings.
                let roles = &[Role::GradOutput];
                Arc::new(Fp8State::new(path.into(), roles, 1, &table)?)
            }
        };
        let fused = self.options.is_output_fused(path);
        if fused {
            notes.push(Note::OutputFused);
        }
        state.set_output_fused(fused);
        state.set_own_recipe(own);
        state.hold_parameters(&self.parameters);
        let entry = (operator.kind(), state.clone());
        self.by_path.insert(path.to_string(), entry);
        operator.set_fp8_state(Some(state));
        Ok(Outcome::Converted(notes))
    }
}

impl Visitor for OperatorPreparer<'_> {
    fn layer(&mut self, _: &dyn Fp8Layer) {}

    fn operator(&mut self, operator: &dyn Fp8Operator) {
        if !self.options.operators {
            operator.set_fp8_state(None);
            return;
        }
        if self.error.is_some() {
            return;
        }
        match self.outcome(operator) {
            Ok(outcome) => {
                if matches!(outcome, Outcome::Skipped(_)) {
                    operator.set_fp8_state(None);
                }
                self.report.layers.push(LayerReport {
                    path: operator.path().map(str::to_string),
                    kind: operator.kind(),
                    out_features: 0,
                    in_features: 0,
                    outcome,
                });
            }
            Err(error) => self.error = Some(error),
        }
    }

    fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
}
