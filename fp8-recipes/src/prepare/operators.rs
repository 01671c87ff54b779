//! State for operators without a GEMM of their own.

use super::options::LayerChoice;
use super::report::{LayerReport, Outcome, PrepareReport};
use super::state::{Request, Shared};
use crate::autocast::Fp8State;
use crate::config::SkipReason;
use crate::error::Result;
use crate::module::{Fp8Module, Fp8Operator, LayerKind, Visitor};
use fp8_candle::Role;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Gives state to the operators of `model`, after its layers: operators without tensors share a table with them.
pub(super) fn prepare_operators<M: Fp8Module + ?Sized>(
    model: &M,
    (shared, taken): (Shared<'_>, HashSet<String>),
    report: &mut PrepareReport,
) -> Result<()> {
    let mut preparer = OperatorPreparer {
        shared,
        by_path: HashMap::new(),
        taken,
        report,
        error: None,
    };
    model.visit(&mut preparer);
    preparer.error.map_or(Ok(()), Err)
}

struct OperatorPreparer<'a, 'r> {
    shared: Shared<'a>,
    by_path: HashMap<String, (LayerKind, Arc<Fp8State>)>,
    /// Paths of converted layers, whose rows have the same names.
    taken: HashSet<String>,
    report: &'r mut PrepareReport,
    error: Option<crate::Error>,
}

impl OperatorPreparer<'_, '_> {
    fn outcome(&mut self, operator: &dyn Fp8Operator) -> Result<Outcome> {
        let path = match operator.path() {
            None => return Ok(Outcome::Skipped(SkipReason::NoPath)),
            Some("") => return Ok(Outcome::Skipped(SkipReason::AtRoot)),
            Some(path) => path,
        };
        if let Some((pattern, LayerChoice::Off)) = self.shared.options.choice(path) {
            let pattern = pattern.clone();
            return Ok(Outcome::Skipped(SkipReason::Off { pattern }));
        }
        let other_kind = (self.by_path.get(path)).is_some_and(|(kind, _)| *kind != operator.kind());
        if other_kind || self.taken.contains(path) {
            return Ok(Outcome::Skipped(SkipReason::SamePath));
        }
        let (state, notes) = self.shared.state(Request {
            path,
            shared: self.by_path.get(path).map(|(_, state)| state.clone()),
            before: operator.fp8_state(),
            // No scale is kept from step to step: the row counts stochastic roundings.
            roles: &[Role::GradOutput],
            amax_history_len: 1,
            device: operator.device(),
            tied: vec![],
        })?;
        let entry = (operator.kind(), state.clone());
        self.by_path.insert(path.to_string(), entry);
        operator.set_fp8_state(Some(state));
        Ok(Outcome::Converted(notes))
    }
}

impl Visitor for OperatorPreparer<'_, '_> {
    fn operator(&mut self, operator: &dyn Fp8Operator) {
        if !self.shared.options.operators {
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
}
