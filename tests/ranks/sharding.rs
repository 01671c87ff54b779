//! A small GPT whose parameters lie in parts on the ranks.

use crate::gpt::{Gpt, initial};
use crate::training::{State, adamw, config, loss_of, micro_batch, tensors_of};
use candle_core::Device;
use fp8::checkpoint::{TrainingMeta, save_gathered};
use fp8::optim::AdamW;
use fp8::ranks::{ProcessGroup, ShardedVarMap};
use fp8::{Autocast, PrepareOptions, Recipe, fp8_autocast, prepare_fp8};
use std::sync::Arc;

/// A model with its optimizer.
pub struct Sharded {
    pub map: ShardedVarMap,
    pub gpt: Gpt,
    pub optimizer: AdamW,
    pub recipe: Option<Recipe>,
    /// Whether amaxes are reduced over the ranks.
    pub in_group: bool,
}

impl Sharded {
    pub fn new(group: &ProcessGroup, recipe: Option<Recipe>) -> anyhow::Result<Self> {
        let map = ShardedVarMap::new(group, &Device::Cpu);
        let config = config();
        let gpt = Gpt::new(&config, map.var_builder())?;
        let mut initial = initial(&config, 1);
        for var in map.vars() {
            if let Some(value) = initial(var.name(), var.dims())? {
                var.set(&value)?;
            }
        }
        if recipe.is_some() {
            prepare_fp8(&gpt, &PrepareOptions::default().with_operators(true))?;
        }
        let optimizer = AdamW::from_sharded(&map, adamw())?;
        Ok(Self {
            map,
            gpt,
            optimizer,
            recipe,
            in_group: true,
        })
    }

    pub fn step(&mut self, step: usize) -> anyhow::Result<f32> {
        let group = self.map.group().clone();
        let rank = group.rank();
        let guard = self.recipe.clone().map(|recipe| {
            let autocast = Autocast::new(recipe).micro_batch(rank as u32);
            fp8_autocast(match self.in_group {
                true => autocast.reduction_group(Arc::new(group)),
                false => autocast,
            })
        });
        let guard = guard.transpose()?;
        let loss = loss_of(&self.gpt, &micro_batch(step, rank)?)?;
        let value = loss.to_scalar()?;
        let grads = fp8::backward(&loss)?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        self.optimizer.apply(&grads)?;
        Ok(value)
    }

    pub fn meta(&self) -> TrainingMeta {
        TrainingMeta {
            step: 0,
            recipe: self.recipe.clone(),
            random: serde_json::Value::Null,
            extra: serde_json::Value::Null,
        }
    }

    /// Weights, optimizer and FP8 state of all ranks, as bits; on rank 0.
    pub fn state(&self) -> anyhow::Result<State> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("state.safetensors");
        save_gathered(&path, &self.gpt, &self.map, &self.optimizer, &self.meta())?;
        match self.map.group().rank() {
            0 => tensors_of(&path),
            _ => Ok(State::new()),
        }
    }
}

/// Every rank's losses, and on rank 0 the state at the end.
pub fn on_parts(
    group: &ProcessGroup,
    recipe: Option<Recipe>,
    steps: usize,
) -> anyhow::Result<(Vec<f32>, State)> {
    let mut training = Sharded::new(group, recipe)?;
    let losses = (0..steps).map(|step| training.step(step));
    let losses = losses.collect::<anyhow::Result<_>>()?;
    Ok((losses, training.state()?))
}
