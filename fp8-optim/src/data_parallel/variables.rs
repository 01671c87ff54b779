//! The variables of a model, in an order that all ranks share.

use crate::error::{OptimError, Result};
use crate::gradients::vars_of;
use crate::veto::{CastVeto, JudgedCasts};
use candle_core::{Device, Tensor, TensorId, Var};
use candle_nn::VarMap;
use fp8_candle::weight_version::{WeightVersion, announce_change};
use fp8_ranks::{ProcessGroup, ReduceOp};
use rapidhash::v3::rapidhash_v3;
use std::collections::{HashMap, HashSet};

/// Variables of float dtypes, sorted by name. A tied variable, which has two names, is listed once.
#[derive(Debug)]
pub(super) struct Variables {
    all: Vec<(String, Var)>,
    index: HashMap<TensorId, usize>,
}

impl Variables {
    pub(super) fn of(vars: &VarMap) -> Self {
        let mut all = vars_of(vars);
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut seen = HashSet::new();
        all.retain(|(_, var)| var.dtype().is_float() && seen.insert(var.id()));
        let index = all.iter().enumerate();
        let index = index.map(|(i, (_, var))| (var.id(), i)).collect();
        Self { all, index }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn name(&self, index: usize) -> &str {
        &self.all[index].0
    }

    pub(super) fn var(&self, index: usize) -> &Var {
        &self.all[index].1
    }

    pub(super) fn index_of(&self, id: TensorId) -> Option<usize> {
        self.index.get(&id).copied()
    }

    /// Whether a cast of the latest step has seen Inf or NaN that was not `judged` before, in a model that has these variables.
    pub(super) fn has_veto(&self, judged: &mut JudgedCasts) -> Result<bool> {
        let versions: Vec<WeightVersion> = (self.all.iter())
            .map(|(_, var)| WeightVersion::of(var))
            .collect();
        let mut found = false;
        let (veto, now) = CastVeto::of(versions.iter(), judged)?;
        for mark in veto.marks()? {
            found |= mark.to_scalar::<f64>()?.is_nan();
        }
        *judged = now;
        Ok(found)
    }

    /// Checks that all ranks have the same variables.
    ///
    /// # Errors
    /// [`OptimError::OtherVariables`], on all ranks.
    pub(super) fn check_ranks(&self, group: &ProcessGroup) -> Result<()> {
        let own: Vec<String> = (self.all.iter())
            .map(|(name, var)| format!("{name}: {:?} {:?}", var.dtype(), var.dims()))
            .collect();
        let text = own.join("\n");
        let hash = rapidhash_v3(text.as_bytes());
        let (high, low) = ((hash >> 32) as u32, hash as u32);
        // The maximum leaves a number and its complement both unchanged only if all ranks have the same number.
        let check = Tensor::new(&[high, !high, low, !low], &Device::Cpu)?;
        let all = group.all_reduce(&check, ReduceOp::Max)?;
        if all.to_vec1::<u32>()? == check.to_vec1::<u32>()? {
            return Ok(());
        }
        // All ranks have seen the difference.
        let first = group.broadcast_bytes(Some(text.as_bytes()), 0)?;
        let first = String::from_utf8_lossy(&first).into_owned();
        let others: Vec<&str> = first.lines().collect();
        let extra = |a: &[String], b: &[&str]| {
            let found = a.iter().find(|line| !b.contains(&line.as_str()));
            found.cloned()
        };
        let missing = others
            .iter()
            .find(|line| !own.iter().any(|own| own == *line));
        Err(OptimError::OtherVariables {
            rank: group.rank(),
            here: extra(&own, &others),
            there: missing.map(|line| line.to_string()),
        })
    }

    /// Gives all ranks the values of rank 0.
    pub(super) fn broadcast(&self, group: &ProcessGroup) -> Result<()> {
        for (_, var) in &self.all {
            let values = group.broadcast(var.as_tensor(), 0)?;
            if group.rank() != 0 {
                var.set(&values)?;
                announce_change(var);
            }
        }
        Ok(())
    }
}
