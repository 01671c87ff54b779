//! Runs samples through a model, block by block.

use super::found::{FoundCodes, OutputError};
use super::inputs::Viewer;
use super::shifts::{self, Group};
use super::stage::{Fed, Stage, Tried};
use super::task::Task;
use super::tokens::factors;
use super::{outliers, retuning};
use crate::models::error::Result;
use crate::models::families::Blocks;
use crate::rewrite::{OnProgress, Progress};
use candle_core::Tensor;
use fp8_candle::StaticWeight;
use std::collections::BTreeSet;

/// Chooses the codes of all layers of the task that lie in blocks of the model.
pub(super) fn walk<B: Blocks>(
    model: &B,
    samples: &[Tensor],
    task: &Task<'_>,
    on_progress: &mut OnProgress<'_>,
) -> Result<FoundCodes> {
    let mut found = FoundCodes::default();
    let entered = samples.iter().map(|ids| Ok(model.enter(ids)?.detach()));
    let mut meant = entered.collect::<Result<Vec<_>>>()?;
    let mut served = meant.clone();
    let blocks = model.blocks();
    for (i, block) in blocks.iter().enumerate() {
        let (done, total) = (i as u64, blocks.len() as u64);
        Progress::report(&format!("block {i}"), done, total, on_progress)?;
        let mut working = block.clone();
        let groups = shifts::groups::<B>(block, task);
        let stages = stages(model, block, task, &mut meant)?;
        let factors = factors(&meant)?;
        for round in rounds(stages, &groups) {
            let fed = fed::<B>(model, &mut working, &round.stages, &served, &factors)?;
            take::<B>(&mut working, &round, &fed, task, &mut found)?;
        }
        for x in &mut served {
            *x = model.pass(&working, x)?.detach();
        }
    }
    Ok(found)
}

/// Searches the layers of a round and puts their codes into the block.
fn take<B: Blocks>(
    working: &mut B::Block,
    round: &Round<'_>,
    fed: &[Fed<'_>],
    task: &Task<'_>,
    found: &mut FoundCodes,
) -> Result<()> {
    let search = |shift: Option<&[f32]>| -> Result<Vec<Vec<Tried>>> {
        fed.iter().map(|fed| fed.search(shift, task)).collect()
    };
    let plain_errors = |tried: &[Vec<Tried>]| -> Vec<f64> {
        let tried = tried.iter().flatten();
        tried.map(|layer| layer.searched.plain_error).collect()
    };
    // The shift, what was found under it, and the errors of plain rounding without it.
    let (mut shift, mut best, mut plain) = (None, None, None);
    if let Some(group) = round.group {
        if let Some(new) = outliers::choose::<B>(group, working, fed, task)? {
            let (without, with) = (search(None)?, search(Some(&new))?);
            plain = Some(plain_errors(&without));
            if outliers::is_better(fed, [&without, &with], &new, task)? {
                found.shifted.push(group.norm.clone());
                (shift, best) = (Some(new), Some(with));
            } else {
                best = Some(without);
            }
        }
        if let Some(new) = retuning::choose::<B>(group, working, fed, shift.as_deref(), task)? {
            found.retuned.push(group.norm.clone());
            (shift, best) = (Some(new), None);
        }
        if let Some(shift) = &shift {
            shifts::apply::<B>(group, working, shift, found)?;
        }
    }
    let best = match best {
        Some(best) => best,
        None => search(shift.as_deref())?,
    };
    let plain = plain.unwrap_or_else(|| plain_errors(&best));
    for (layer, plain) in best.into_iter().flatten().zip(plain) {
        let Tried {
            path,
            searched,
            input,
            amax,
        } = layer;
        let mut layers = B::projections(working).into_iter();
        if let Some(own) = layers.find(|own| own.path() == path) {
            own.set_codes(StaticWeight::new(&searched.codes, input, &path)?);
        }
        found.errors.push(OutputError {
            path: path.clone(),
            found: searched.error,
            plain,
        });
        let amax = amax.map(|amax| (path.clone(), amax));
        found.chosen.input_amaxes.extend(amax);
        found.chosen.codes.insert(path, searched.codes);
    }
    Ok(())
}

/// The stages of a block, in the order of their use, and the inputs of the next block.
fn stages<B: Blocks>(
    model: &B,
    block: &B::Block,
    task: &Task<'_>,
    meant: &mut [Tensor],
) -> Result<Vec<Stage>> {
    let paths: BTreeSet<&str> = task.wanted.keys().map(String::as_str).collect();
    let viewer = Viewer::<B>::new(block, &paths);
    let mut stages: Vec<Stage> = vec![];
    let samples = meant.len();
    for (sample, x) in meant.iter_mut().enumerate() {
        let (y, groups) = viewer.run(model, x)?;
        for group in groups {
            let place = stages.iter().position(|stage| stage.paths == group.paths);
            let place = place.unwrap_or_else(|| {
                stages.push(Stage {
                    paths: group.paths,
                    meant: vec![None; samples],
                });
                stages.len() - 1
            });
            stages[place].meant[sample] = Some(group.input);
        }
        *x = y.ok_or_else(|| candle_core::Error::msg("a block without an output"))?;
    }
    Ok(stages)
}

/// Stages that do not depend on each other.
struct Round<'a> {
    /// The norm whose result they read, if it can be shifted.
    group: Option<&'a Group>,
    stages: Vec<Stage>,
}

impl Round<'_> {
    /// Whether `stage`, which reads the result of `group`, belongs here: to the same norm, or to the same layers of other experts.
    fn takes(&self, stage: &Stage, group: Option<&Group>) -> bool {
        let first = self.stages.first();
        match (self.group, group) {
            (Some(own), Some(group)) => std::ptr::eq(own, group),
            (None, None) => first.is_some_and(|first| {
                first.is_routed() && stage.is_routed() && first.name() == stage.name()
            }),
            _ => false,
        }
    }
}

/// The stages in rounds, in the order of their use.
fn rounds(stages: Vec<Stage>, groups: &[Group]) -> Vec<Round<'_>> {
    let mut rounds: Vec<Round<'_>> = vec![];
    for stage in stages {
        let reads = |group: &&Group| group.layers.iter().any(|path| path == stage.first());
        let group = groups.iter().find(reads);
        match rounds.iter_mut().find(|round| round.takes(&stage, group)) {
            Some(round) => round.stages.push(stage),
            None => rounds.push(Round {
                group,
                stages: vec![stage],
            }),
        }
    }
    rounds
}

/// The stages that some token reaches, with their inputs.
fn fed<'a, B: Blocks>(
    model: &B,
    working: &mut B::Block,
    round: &'a [Stage],
    served: &[Tensor],
    factors: &[Tensor],
) -> Result<Vec<Fed<'a>>> {
    let viewer = match round {
        [stage] if !stage.is_routed() => Viewer::<B>::up_to(working, stage.first()),
        _ => Viewer::new(working, &round.iter().map(Stage::first).collect()),
    };
    let mut inputs: Vec<Vec<(Tensor, Tensor)>> = round.iter().map(|_| vec![]).collect();
    for (sample, x) in served.iter().enumerate() {
        for group in viewer.run(model, x)?.1 {
            // Stages with the same input are shown as one where nothing that is shown lies between them.
            for (stage, inputs) in round.iter().zip(&mut inputs) {
                if !group.paths.iter().any(|path| path == stage.first()) {
                    continue;
                }
                let meant = match &stage.meant[sample] {
                    Some(meant) if !stage.is_routed() => meant.clone(),
                    _ => group.input.clone(),
                };
                inputs.push((group.input.clone(), meant));
            }
        }
    }
    let adders = B::adders(working).into_iter();
    let adders: BTreeSet<String> = adders.map(|layer| layer.path().to_string()).collect();
    let mut fed = vec![];
    for (stage, inputs) in round.iter().zip(inputs) {
        if inputs.is_empty() {
            continue;
        }
        let mut weights = vec![];
        for path in &stage.paths {
            for layer in B::projections(working) {
                if layer.path() == path {
                    weights.push(layer.searchable()?.weight()?);
                }
            }
        }
        fed.push(Fed {
            stage,
            inputs,
            factors: match adders.contains(stage.first()) {
                true => factors.to_vec(),
                false => vec![],
            },
            weights,
        });
    }
    Ok(fed)
}
