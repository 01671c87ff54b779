//! The walk of the samples through a model, block by block.

use super::found::{FoundCodes, OutputError};
use super::inputs::Viewer;
use crate::models::error::Result;
use crate::models::families::Blocks;
use crate::rewrite::{OnProgress, Progress, QuantizeOptions};
use candle_core::Tensor;
use fp8_candle::{InputScaling, StaticWeight};
use fp8_files::contents::Described;
use fp8_files::search::{InputProducts, SearchOptions, search_weight};
use std::collections::{BTreeMap, BTreeSet};

/// The layers to search, by path: how each is stored, and how its inputs are cast.
pub(super) type Wanted = BTreeMap<String, (Described, InputScaling)>;

/// The layers, with the static scales of their inputs if they have such.
pub(super) fn wanted(layers: &[Described], options: &QuantizeOptions) -> Result<Wanted> {
    let layers = layers.iter().map(|layer| {
        let input = options.input_scaling(layer)?;
        Ok((layer.path.clone(), (layer.clone(), input)))
    });
    layers.collect()
}

/// Layers that read the same input.
struct Stage {
    paths: Vec<String>,
    /// That input in high precision, for each sample; None where none of its tokens reach the layers.
    meant: Vec<Option<Tensor>>,
}

impl Stage {
    fn first(&self) -> &str {
        self.paths.first().map_or("", String::as_str)
    }

    /// Whether a router decides which tokens the layers get: others, perhaps, than in high precision.
    fn is_routed(&self) -> bool {
        self.first().contains(".experts.")
    }

    /// The layer's own name.
    fn name(&self) -> &str {
        self.first().rsplit('.').next().unwrap_or_default()
    }
}

/// Chooses the codes of all wanted layers that lie in blocks of the model.
pub(super) fn walk<B: Blocks>(
    model: &B,
    samples: &[Tensor],
    wanted: &Wanted,
    options: &SearchOptions,
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
        let stages = stages(model, block, wanted, &mut meant)?;
        for round in rounds(stages) {
            let products = products::<B>(model, &working, &round, wanted, &served)?;
            for (stage, products) in round.iter().zip(products) {
                let Some(products) = products else {
                    continue;
                };
                for layer in B::projections(&mut working) {
                    if stage.paths.iter().any(|path| path == layer.path()) {
                        let (described, input) = &wanted[layer.path()];
                        let path = layer.path().to_string();
                        let weight = layer.searchable()?.weight()?;
                        let granularity = described.scheme.weight;
                        let best = search_weight(&weight, granularity, &products, options, &path)?;
                        layer.set_codes(StaticWeight::new(&best.codes, input.clone(), &path)?);
                        found.errors.push(OutputError {
                            path: path.clone(),
                            found: best.error,
                            plain: best.plain_error,
                        });
                        found.codes.insert(path, best.codes);
                    }
                }
            }
        }
        for x in &mut served {
            *x = model.pass(&working, x)?.detach();
        }
    }
    Ok(found)
}

/// The stages of a block, in the order of their use, and the inputs of the next block.
fn stages<B: Blocks>(
    model: &B,
    block: &B::Block,
    wanted: &Wanted,
    meant: &mut [Tensor],
) -> Result<Vec<Stage>> {
    let paths: BTreeSet<&str> = wanted.keys().map(String::as_str).collect();
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

/// Stages that do not depend on each other, together: layers of the same name in all experts of a mixture.
fn rounds(stages: Vec<Stage>) -> Vec<Vec<Stage>> {
    let mut rounds: Vec<Vec<Stage>> = vec![];
    for stage in stages {
        let same = |round: &&mut Vec<Stage>| {
            let first = round.first();
            first.is_some_and(|first| first.is_routed() && first.name() == stage.name())
        };
        match rounds.iter_mut().find(same) {
            Some(round) if stage.is_routed() => round.push(stage),
            _ => rounds.push(vec![stage]),
        }
    }
    rounds
}

/// The sums that the search of each stage needs; None for one that no token reaches.
fn products<B: Blocks>(
    model: &B,
    working: &B::Block,
    round: &[Stage],
    wanted: &Wanted,
    served: &[Tensor],
) -> Result<Vec<Option<InputProducts>>> {
    let viewer = match round {
        [stage] if !stage.is_routed() => Viewer::<B>::up_to(working, stage.first()),
        _ => Viewer::new(working, &round.iter().map(Stage::first).collect()),
    };
    let mut sums: Vec<Option<InputProducts>> = round.iter().map(|_| None).collect();
    for (sample, x) in served.iter().enumerate() {
        for group in viewer.run(model, x)?.1 {
            let is_first = |stage: &Stage| group.paths.iter().any(|path| path == stage.first());
            let Some(place) = round.iter().position(is_first) else {
                continue;
            };
            let stage = &round[place];
            let (described, input) = &wanted[stage.first()];
            let meant = match &stage.meant[sample] {
                Some(meant) if !stage.is_routed() => meant,
                _ => &group.input,
            };
            let sums = match &mut sums[place] {
                Some(sums) => sums,
                empty => empty.insert(InputProducts::new(described.sizes.1)?),
            };
            sums.add(&input.multiplied(&group.input)?, meant)?;
        }
    }
    Ok(sums)
}
