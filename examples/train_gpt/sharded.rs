//! A run whose parameters lie in parts on the ranks.

use crate::gpt::{Gpt, GptConfig, initial};
use crate::ranks::{Parallel, Ranks};
use crate::weights::{StepOf, loss_of};
use anyhow::{Result, bail, ensure};
use candle_core::{Device, Tensor};
use fp8::checkpoint::{TrainingMeta, resume_sharded, save_gathered, save_sharded};
use fp8::optim::{AdamW, AdamWConfig, StepReport};
use fp8::ranks::{ShardedVarMap, precompute_float8_dynamic_scale_for_fsdp};
use fp8::{Recipe, fp8_autocast};
use std::path::{Path, PathBuf};

pub struct Sharded {
    map: ShardedVarMap,
    optimizer: AdamW,
    /// Whether FP8 weights travel as codes.
    codes: bool,
}

impl Sharded {
    /// A model with the initial weights of the seed, and its optimizer.
    pub fn new(
        model: &GptConfig,
        seed: u64,
        config: AdamWConfig,
        device: &Device,
        ranks: &Ranks,
    ) -> Result<(Gpt, Self)> {
        let map = ShardedVarMap::new(&ranks.group, device);
        let gpt = Gpt::new(model, map.var_builder())?;
        let mut value = initial(model, seed);
        for var in map.vars() {
            if let Some(value) = value(var.name(), var.dims())? {
                var.set(&value)?;
            }
        }
        let optimizer = AdamW::from_sharded(&map, config)?;
        let codes = ranks.parallel == Some(Parallel::ShardedFp8);
        let sharded = Self {
            map,
            optimizer,
            codes,
        };
        Ok((gpt, sharded))
    }

    /// One step; its gradients are the means over the ranks.
    pub fn step(&mut self, gpt: &Gpt, step: &StepOf<'_>) -> Result<(Tensor, StepReport)> {
        let [(place, batch)] = step.micro_batches else {
            bail!("--parallel sharded takes one micro-batch for each rank");
        };
        let guard = (step.autocast)(*place).map(fp8_autocast).transpose()?;
        let loss = loss_of(gpt, batch)?;
        let grads = fp8::backward(&loss)?;
        if let Some(guard) = guard {
            guard.close()?;
        }
        if step.check {
            let shards = self.map.shards().into_iter();
            let missing = shards.filter(|(_, var)| grads.get(var).is_none());
            let missing: Vec<String> = missing.map(|(name, _)| name).collect();
            let missing = missing.join(", ");
            ensure!(missing.is_empty(), "no gradient reached {missing}");
        }
        self.optimizer.set_lr(step.lr)?;
        let report = self.optimizer.apply(&grads)?;
        if self.codes {
            precompute_float8_dynamic_scale_for_fsdp(&self.map)?;
        }
        Ok((loss.detach(), report))
    }

    /// Writes the parts beside `path`, from which any number of ranks resumes, and the whole to `path`.
    pub fn save(&self, path: &Path, gpt: &Gpt, meta: &TrainingMeta) -> Result<()> {
        save_sharded(parts(path), gpt, &self.map, &self.optimizer, meta)?;
        Ok(save_gathered(path, gpt, &self.map, &self.optimizer, meta)?)
    }

    pub fn resume(
        &mut self,
        path: &Path,
        gpt: &Gpt,
        recipe: Option<&Recipe>,
    ) -> Result<TrainingMeta> {
        let (map, optimizer) = (&self.map, &mut self.optimizer);
        Ok(resume_sharded(parts(path), gpt, map, optimizer, recipe)?)
    }
}

fn parts(path: &Path) -> PathBuf {
    path.with_extension("parts")
}
