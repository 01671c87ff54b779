//! A text whose next byte is learned.

use crate::net::{CONTEXT, Net};
use candle_core::{Device, Module, Tensor};
use fp8::training::{Objective, Part, Result};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Positions of the validation.
const VALIDATION: usize = 1024;

/// Random positions of a text, which follow from the seed and the step.
pub struct Bytes {
    text: String,
    batch: usize,
    seed: u64,
    device: Device,
}

/// The bytes before some positions, and the bytes there.
pub type Batch = (Tensor, Tensor);

impl Bytes {
    /// Steps of `batch` positions.
    pub fn new(text: String, batch: usize, seed: u64, device: &Device) -> Self {
        let device = device.clone();
        Self {
            text,
            batch,
            seed,
            device,
        }
    }

    /// The same positions every time.
    pub fn validation(&self) -> Result<Batch> {
        self.positions(VALIDATION, u64::MAX)
    }

    fn positions(&self, size: usize, step: u64) -> Result<Batch> {
        let text = self.text.as_bytes();
        let seed = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ step;
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut bytes, mut next) = (vec![], vec![]);
        for _ in 0..size {
            let first = rng.random_range(0..text.len() - CONTEXT);
            let before = &text[first..first + CONTEXT];
            bytes.extend(before.iter().map(|&byte| u32::from(byte)));
            next.push(u32::from(text[first + CONTEXT]));
        }
        Ok((
            Tensor::from_vec(bytes, (size, CONTEXT), &self.device)?,
            Tensor::from_vec(next, size, &self.device)?,
        ))
    }
}

impl<L: Module> Objective<Net<L>> for Bytes {
    type Batch = Batch;

    fn micro_batch(&self, step: u64, part: Part) -> Result<Batch> {
        let at = |index: usize| self.batch * index / part.count;
        let (start, end) = (at(part.index), at(part.index + 1));
        let (bytes, next) = self.positions(self.batch, step)?;
        Ok((
            bytes.narrow(0, start, end - start)?,
            next.narrow(0, start, end - start)?,
        ))
    }

    fn loss(&self, net: &Net<L>, batch: &Batch) -> Result<Tensor> {
        Ok(net.loss(batch)?)
    }

    fn targets(&self, batch: &Batch) -> usize {
        batch.1.elem_count()
    }

    fn tokens(&self, batch: &Batch) -> usize {
        batch.0.elem_count()
    }

    fn validation_batches(&self) -> usize {
        1
    }

    fn validation_batch(&self, _: usize) -> Result<Batch> {
        self.validation()
    }

    fn fingerprint(&self) -> String {
        format!("{} positions, seed {}", self.batch, self.seed)
    }
}
