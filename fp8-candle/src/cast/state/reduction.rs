//! One reduction of a table's amaxes over ranks, and the check that all ranks reduce the same.

use super::group::ReductionGroup;
use super::table::{RowRule, StateTable};
use crate::base::data::columns::Recorded;
use crate::base::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use rapidhash::v3::rapidhash_v3;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What the amaxes of a reduction are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Forward,
    Gradients,
    Calibration,
}

impl Phase {
    const ALL: [Self; 3] = [Self::Forward, Self::Gradients, Self::Calibration];

    fn name(self) -> &'static str {
        match self {
            Self::Forward => "inputs and weights",
            Self::Gradients => "gradients",
            Self::Calibration => "a calibration",
        }
    }
}

/// One reduction of a table's amaxes.
pub(super) struct Reduction<'a> {
    pub(super) table: &'a StateTable,
    pub(super) phase: Phase,
    /// Whether this rank has used the table.
    pub(super) used: bool,
}

/// The largest number of the check: all integers up to it are exact in f32, and none has the bits of a NaN.
const LARGEST: u64 = (1 << 24) - 1;

impl Reduction<'_> {
    /// The maximum of `amaxes` over the ranks, and whether any of them has used the table.
    ///
    /// # Errors
    /// If the group fails, returns another shape or dtype, or the ranks do not reduce the same.
    pub(super) fn run(
        &self,
        group: &dyn ReductionGroup,
        amaxes: &Tensor,
    ) -> Result<(Tensor, bool)> {
        let rows = amaxes.elem_count();
        let steps = group.steps();
        let step = steps.map_or(0, |steps| steps.load(Ordering::Relaxed));
        let check = self.check(step);
        let entries = [
            f32::from(u8::from(self.used)),
            check as f32,
            (LARGEST - check) as f32,
        ];
        let entries = Tensor::new(&entries, amaxes.device())?;
        let sent = match rows {
            0 => entries.clone(),
            _ => Tensor::cat(&[amaxes, &entries], 0)?,
        };
        let reduced = group.all_reduce_max(&sent)?;
        if reduced.dims() != sent.dims() || reduced.dtype() != DType::F32 {
            return Err(Error::Reduction {
                sent: sent.elem_count(),
                got: reduced.dims().to_vec(),
                dtype: reduced.dtype(),
            });
        }
        let reduced = reduced.to_device(amaxes.device())?.contiguous()?;
        let [used, same, complement] = reduced.narrow(0, rows, 3)?.to_vec1::<f32>()?[..] else {
            return Err(Error::Internal("a reduction without its check".into()));
        };
        if same != check as f32 || complement != (LARGEST - check) as f32 {
            return Err(self.disagreement(group, step, amaxes.device()));
        }
        Ok((reduced.narrow(0, 0, rows)?.contiguous()?, used > 0.))
    }

    /// The maximum over the ranks, and whether any of them has used the table. Each group gets the amaxes of all rows in one vector, 0
    /// for rows that are not its own, so that every rank sends the same number, whatever its layers saw.
    pub(super) fn over_groups(
        &self,
        recorded: &Recorded,
        rules: &[Option<RowRule>],
    ) -> Result<(Recorded, bool)> {
        let group_of = |rule: &Option<RowRule>| rule.as_ref().and_then(|rule| rule.group.clone());
        let mut groups: Vec<Arc<dyn ReductionGroup>> = vec![];
        for group in rules.iter().filter_map(group_of) {
            if !groups
                .iter()
                .any(|other| other.identity() == group.identity())
            {
                groups.push(group);
            }
        }
        let (mut amax, mut used) = (recorded.amax.clone(), self.used);
        for group in groups {
            let mine: Vec<u8> = (rules.iter().map(group_of))
                .map(|other| {
                    other
                        .is_some_and(|other| other.identity() == group.identity())
                        .into()
                })
                .collect();
            let all_mine = mine.iter().all(|&mine| mine == 1);
            let mine = Tensor::from_slice(&mine, mine.len(), amax.device())?;
            let sent = match all_mine {
                true => amax.clone(),
                false => mine.where_cond(&amax, &amax.zeros_like()?)?,
            };
            let (reduced, any) = self.run(&*group, &sent)?;
            used |= any;
            amax = match all_mine {
                true => reduced,
                false => mine.where_cond(&reduced, &amax)?,
            };
        }
        let recorded = Recorded {
            amax,
            non_finite: recorded.non_finite.clone(),
        };
        Ok((recorded, used))
    }

    /// A number that is the same on ranks which reduce the same.
    fn check(&self, step: u64) -> u64 {
        let names = self.table.lock().names_hash;
        let words = [names, step, self.phase as u64];
        let hash = rapidhash_v3(&words.map(u64::to_le_bytes).concat());
        (hash ^ (hash >> 24) ^ (hash >> 48)) & LARGEST
    }

    fn disagreement(&self, group: &dyn ReductionGroup, step: u64, device: &Device) -> Error {
        let names = self.table.names();
        // The disagreement itself is worth more than an error of asking for its details.
        let ranks = self.of_each(group, step, device).unwrap_or_default();
        let own = || {
            vec![format!(
                "this rank: {} after {step} steps",
                self.phase.name()
            )]
        };
        Error::RanksDisagree {
            rows: names.len(),
            first: names.first().map(|name| name.to_string()),
            ranks: if ranks.is_empty() { own() } else { ranks },
        }
    }

    /// What each rank has reduced, in words; nothing if the group does not number its ranks. The check and its complement have shown
    /// the disagreement to all ranks in the same reduction, so all of them are here.
    fn of_each(
        &self,
        group: &dyn ReductionGroup,
        step: u64,
        device: &Device,
    ) -> Result<Vec<String>> {
        let (ranks, names) = (group.ranks(), self.table.lock().names_hash);
        let Some(rank) = group.rank().filter(|&rank| rank < ranks) else {
            return Ok(vec![]);
        };
        let own = [self.phase as u64, step, names].map(|number| (number & LARGEST) as f32);
        let mut sent = vec![0.; own.len() * ranks];
        sent[own.len() * rank..][..own.len()].copy_from_slice(&own);
        let sent = Tensor::from_vec(sent, own.len() * ranks, device)?;
        let all = group.all_reduce_max(&sent)?.to_vec1::<f32>()?;
        let words = |(rank, numbers): (usize, &[f32])| {
            let phase = Phase::ALL
                .into_iter()
                .find(|&phase| phase as u64 as f32 == numbers[0]);
            let phase = phase.map_or("other amaxes", Phase::name);
            let model = if numbers[2] == own[2] {
                ""
            } else {
                " of another model"
            };
            format!("rank {rank}: {phase}{model} after {} steps", numbers[1])
        };
        Ok(all.chunks_exact(own.len()).enumerate().map(words).collect())
    }
}
