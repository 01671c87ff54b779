//! A small GPT that several ranks train, and what one process does with as many micro-batches.

use crate::gpt::{Gpt, GptConfig, initial};
use crate::parameters::set_plain;
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, save_training};
use fp8::nn::ops;
use fp8::optim::{
    AdamW, AdamWConfig, DataParallel, DataParallelOptions, DecayScope, GradAccumulator,
};
use fp8::ranks::ProcessGroup;
use fp8::{Autocast, PrepareOptions, Recipe, RecipeName, end_step, fp8_autocast, prepare_fp8};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

pub fn config() -> GptConfig {
    GptConfig {
        vocab_size: 32,
        // Recipes with blocks of 128 need whole ones.
        hidden_size: 128,
        num_layers: 2,
        num_heads: 2,
        context: 8,
        ..GptConfig::default()
    }
}

/// High precision, and every recipe.
pub fn recipes() -> impl Iterator<Item = Option<&'static str>> {
    let names = RecipeName::ALL.into_iter().map(|name| Some(name.as_str()));
    std::iter::once(None).chain(names)
}

/// Numbers of ranks. Four add and gather in another order than two, which has nothing to do with the recipe.
pub fn numbers_of_ranks(recipe: Option<&str>) -> &'static [usize] {
    match recipe {
        None | Some("delayed") => &[2, 4],
        _ => &[2],
    }
}

/// Tensors of a training checkpoint, as bytes.
pub type State = BTreeMap<String, Vec<u8>>;
/// The optimizer. With this norm, some steps are clipped and others are not.
pub fn adamw() -> AdamWConfig {
    AdamWConfig {
        lr: 3e-3,
        max_grad_norm: Some(1.),
        decay_scope: DecayScope::Matrices,
        ..AdamWConfig::default()
    }
}

pub fn loss_of(gpt: &Gpt, tokens: &(Tensor, Tensor)) -> anyhow::Result<Tensor> {
    Ok(ops::cross_entropy(&gpt.forward(&tokens.0)?, &tokens.1)?)
}

/// The tensors of a file, as bits.
pub fn tensors_of(path: &Path) -> anyhow::Result<State> {
    let bytes = std::fs::read(path)?;
    let file = safetensors::SafeTensors::deserialize(&bytes)?;
    let tensors = file.tensors().into_iter();
    Ok(tensors
        .map(|(name, tensor)| (name, tensor.data().to_vec()))
        .collect())
}

/// A model with its optimizer.
pub struct Training {
    pub vars: VarMap,
    pub gpt: Gpt,
    pub optimizer: AdamW,
    pub recipe: Option<Recipe>,
}

impl Training {
    pub fn new(recipe: Option<&str>) -> anyhow::Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let gpt = Gpt::new(&config(), vb)?;
        set_plain(&vars, initial(&config(), 1))?;
        let recipe = recipe.map(str::parse::<Recipe>).transpose()?;
        if recipe.is_some() {
            prepare_fp8(&gpt, &PrepareOptions::default().with_operators(true))?;
        }
        let optimizer = AdamW::from_varmap(&vars, adamw())?;
        Ok(Self {
            vars,
            gpt,
            optimizer,
            recipe,
        })
    }

    fn loss(&self, tokens: &(Tensor, Tensor)) -> anyhow::Result<Tensor> {
        loss_of(&self.gpt, tokens)
    }

    fn autocast(&self, micro_batch: usize) -> Option<Autocast> {
        let recipe = self.recipe.clone()?;
        Some(Autocast::new(recipe).micro_batch(micro_batch as u32))
    }

    /// A step of one process with several micro-batches in one guard; the losses of each.
    pub fn step_of_one(&mut self, step: usize, micro_batches: usize) -> anyhow::Result<Vec<f32>> {
        let mut accumulator = GradAccumulator::new(&self.vars);
        let outer = self.autocast(0).map(fp8_autocast).transpose()?;
        let mut losses = vec![];
        for i in 0..micro_batches {
            let inner = self.autocast(i).map(fp8_autocast).transpose()?;
            let loss = self.loss(&micro_batch(step, i)?)?;
            losses.push(loss.to_scalar()?);
            accumulator.add(fp8::backward(&loss)?)?;
            if let Some(guard) = inner {
                guard.close()?;
            }
        }
        if let Some(guard) = outer {
            guard.close()?;
        }
        self.optimizer.apply(&accumulator.finish_mean()?)?;
        Ok(losses)
    }

    /// A step of one rank of a group, which has one micro-batch.
    pub fn step_of_rank(
        &mut self,
        step: usize,
        parallel: &mut DataParallel,
    ) -> anyhow::Result<f32> {
        let group = parallel.group().clone();
        let rank = group.rank();
        let guard = self
            .autocast(rank)
            .map(|autocast| fp8_autocast(autocast.reduction_group(Arc::new(group))));
        let guard = guard.transpose()?;
        let loss = self.loss(&micro_batch(step, rank)?)?;
        let value = loss.to_scalar()?;
        let grads = parallel.backward(&loss)?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        self.optimizer.apply(&grads)?;
        Ok(value)
    }

    /// Weights, optimizer and FP8 state, as bits.
    pub fn state(&self) -> anyhow::Result<State> {
        end_step()?;
        let meta = TrainingMeta {
            step: 0,
            recipe: self.recipe.clone(),
            random: serde_json::Value::Null,
            extra: serde_json::Value::Null,
        };
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("state.safetensors");
        save_training(&path, &self.gpt, &self.vars, &self.optimizer, &meta)?;
        tensors_of(&path)
    }
}

/// Every rank's losses and its state at the end.
pub fn on_ranks(
    group: &ProcessGroup,
    recipe: Option<&str>,
    steps: usize,
    options: DataParallelOptions,
) -> anyhow::Result<(Vec<f32>, State)> {
    let mut training = Training::new(recipe)?;
    let mut parallel = DataParallel::new(group, &training.vars, options)?;
    let losses = (0..steps).map(|step| training.step_of_rank(step, &mut parallel));
    let losses = losses.collect::<anyhow::Result<_>>()?;
    Ok((losses, training.state()?))
}

/// Tokens that follow a rule, other ones for each micro-batch.
pub fn micro_batch(step: usize, i: usize) -> candle_core::Result<(Tensor, Tensor)> {
    let begin = (17 * step + 5 * i) as u32;
    let tokens = |offset: u32| {
        let at = |j: u32| (begin + j / 8 * 3 + (j % 8 + offset) * (5 + begin % 3)) % 32;
        let values: Vec<u32> = (0..2 * 8).map(at).collect();
        Tensor::from_vec(values, (2, 8), &Device::Cpu)
    };
    Ok((tokens(0)?, tokens(1)?))
}
