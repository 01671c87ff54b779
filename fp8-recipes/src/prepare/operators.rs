//! State for operators without a GEMM of their own.

use super::options::LayerChoice;
use super::report::{Outcome, PrepareReport};
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
) -> Result<PrepareReport> {
    let mut preparer = OperatorPreparer {
        shared,
        by_path: HashMap::new(),
        taken,
    };
    model.visit(&mut preparer);
    let Shared { report, error, .. } = preparer.shared;
    error.map_or(Ok(report), Err)
}

struct OperatorPreparer<'a> {
    shared: Shared<'a>,
    by_path: HashMap<String, (LayerKind, Arc<Fp8State>)>,
    /// Paths of converted layers, whose rows have the same names.
    taken: HashSet<String>,
}

impl OperatorPreparer<'_> {
    /// Whether the operator would be cast if operators were on: it has state of an earlier preparation, or a recipe of its own that casts
    /// operators.
    fn is_expected(&self, operator: &dyn Fp8Operator) -> bool {
        let path = operator.path();
        let choice = path.and_then(|path| self.shared.options.choice(path));
        let by_recipe = match choice {
            Some((_, LayerChoice::Recipe(recipe))) => {
                recipe.resolve().is_ok_and(|config| config.cast_operators)
            }
            _ => false,
        };
        by_recipe || operator.fp8_state().is_some()
    }

    fn outcome(&mut self, operator: &dyn Fp8Operator) -> Result<Outcome> {
        let path = match self.shared.path(operator.path()) {
            Ok(path) => path,
            Err(reason) => return Ok(Outcome::Skipped(reason)),
        };
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
            shards: None,
            device: operator.device(),
            tied: vec![],
        })?;
        let entry = (operator.kind(), state.clone());
        self.by_path.insert(path.to_string(), entry);
        operator.set_fp8_state(Some(state));
        Ok(Outcome::Converted(notes))
    }
}

impl Visitor for OperatorPreparer<'_> {
    fn operator(&mut self, operator: &dyn Fp8Operator) {
        if self.shared.error.is_some() {
            return;
        }
        let outcome = match self.shared.options.operators {
            true => self.outcome(operator),
            false if self.is_expected(operator) => Ok(Outcome::Skipped(SkipReason::OperatorsOff)),
            // Most recipes cast no operators. A guard whose recipe does warns, unless the options name the operator.
            false => {
                let path = operator.path();
                if (path.and_then(|path| self.shared.options.choice(path))).is_some() {
                    operator.set_fp8_state(None);
                }
                return;
            }
        };
        let clear = || operator.set_fp8_state(None);
        let (path, kind) = (operator.path(), operator.kind());
        self.shared.record(path, kind, (0, 0), outcome, clear);
    }
}
