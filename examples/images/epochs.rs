//! Training in shuffled batches, and testing.

use super::data::{CLASSES, Split};
use anyhow::Result;
use candle_core::{D, Tensor};
use fp8::optim::{AdamWConfig, LrSchedule};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// How long to train, and how fast.
#[derive(Clone)]
pub struct Epochs {
    /// Passes over the training images.
    pub count: usize,
    /// Images per step.
    pub batch: usize,
    /// The largest learning rate.
    pub lr: f64,
    /// Seed of the order of images.
    pub seed: u64,
}

/// A batch of a step.
pub struct Batch {
    /// Steps before this one.
    pub step: u64,
    pub lr: f64,
    pub images: Tensor,
    pub labels: Tensor,
}

impl Epochs {
    /// The optimizer of every run; steps set the learning rate.
    pub fn optimizer(&self) -> AdamWConfig {
        AdamWConfig {
            lr: self.lr,
            weight_decay: 1e-4,
            ..AdamWConfig::default()
        }
    }

    /// Calls `step` for each batch, and `progress` after it with the steps done, the number of all steps and the loss. Returns the loss
    /// of every step, and the mean over the last epoch.
    pub fn train(
        &self,
        split: &Split,
        mut step: impl FnMut(&Batch) -> Result<f64>,
        mut progress: impl FnMut(u64, u64, f64),
    ) -> Result<(Vec<f64>, f64)> {
        let batches = split.len().div_ceil(self.batch);
        let steps = (self.count * batches) as u64;
        let schedule = LrSchedule::cosine(self.lr, (steps / 20).clamp(1, 100), steps);
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut order: Vec<u32> = (0..split.len() as u32).collect();
        let mut losses = vec![];
        for _ in 0..self.count {
            order.shuffle(&mut rng);
            for part in order.chunks(self.batch) {
                let indexes = Tensor::from_slice(part, part.len(), split.images.device())?;
                let done = losses.len() as u64;
                let loss = step(&Batch {
                    step: done,
                    lr: schedule.lr(done),
                    images: split.images.index_select(&indexes, 0)?,
                    labels: split.labels.index_select(&indexes, 0)?,
                })?;
                losses.push(loss);
                progress(done + 1, steps, loss);
            }
        }
        let last = &losses[losses.len() - batches..];
        let mean = last.iter().sum::<f64>() / last.len() as f64;
        Ok((losses, mean))
    }
}

/// The share of images whose largest logit is that of their label.
pub fn accuracy(split: &Split, logits: impl Fn(&Tensor) -> Result<Tensor>) -> Result<f64> {
    const BATCH: usize = 500;
    let mut right = 0;
    for from in (0..split.len()).step_by(BATCH) {
        let count = BATCH.min(split.len() - from);
        let logits = logits(&split.images.narrow(0, from, count)?)?;
        assert_eq!(logits.dim(1)?, CLASSES);
        let found = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
        let labels = split.labels.narrow(0, from, count)?.to_vec1::<u32>()?;
        right += found.iter().zip(&labels).filter(|(a, b)| a == b).count();
    }
    Ok(right as f64 / split.len() as f64)
}
