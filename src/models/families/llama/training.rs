//! What training adds to a Llama: packed documents, recomputed layers, a loss without all logits.

use super::Llama;
use super::causal::{Caches, Call, Part};
use super::head::Head;
use crate::models::adapters::Host;
use crate::models::error::{Error, Result};
use crate::models::layers::token_rows;
use candle_core::{DType, Tensor};
use fp8_candle::ops::{self, LinearCrossEntropyOptions};
use fp8_recipes::nn::checkpoint;

/// Logits of a head in FP8 or with an adapter that are in memory at once, in bytes of f32.
const LOGITS: usize = 64 << 20;

impl Llama {
    /// Whether the backward pass computes each layer again instead of keeping its activations: less memory, and about a third more time
    /// per step. Results are the same to the bit.
    pub fn set_recomputation(&mut self, recomputes: bool) {
        self.recomputes = recomputes;
    }

    /// Rounds the operands of products in high precision, those of attention, of the head and of layers that nothing casts to FP8, to
    /// `dtype`, which is bf16, or leaves them as they are with None, the default. Sums stay in f32, and so do the routers of experts. It holds
    /// for training, for the forward pass and for generation alike, and takes less time where the processor
    /// [multiplies bf16](fp8_candle::ops::multiplies_bf16).
    pub fn set_operands(&mut self, dtype: Option<DType>) {
        self.operands = dtype;
        for layer in self.projections() {
            layer.set_operands(dtype);
        }
    }

    /// Features of all tokens after the final norm, `[rows, tokens, hidden_size]`, where each row of `ids`, `[rows, tokens]`, is a sequence
    /// of documents: `documents` has the numbers of their tokens. A token sees only the earlier ones of its document, and positions begin
    /// with each document: the features are those of the documents alone. Differentiable.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8::models::{Llama, LlamaConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let json = serde_json::json!({
    /// #     "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
    /// #     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    /// # });
    /// # let config = LlamaConfig::parse("config.json", &json)?;
    /// # let model = Llama::new(&config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
    /// let packed = Tensor::new(&[[5u32, 6, 7, 8, 9]], &Device::Cpu)?;
    /// let features = model.features(&packed, &[vec![3, 2]])?;
    /// let second = model.features(&packed.narrow(1, 3, 2)?, &[vec![2]])?;
    /// assert_eq!(features.narrow(1, 3, 2)?.to_vec3::<f32>()?, second.to_vec3::<f32>()?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Llama::forward`], and if the lengths of a row's documents do not add up to its tokens.
    pub fn features(&self, ids: &Tensor, documents: &[Vec<usize>]) -> Result<Tensor> {
        let ids = token_rows(ids, self.config.vocab_size)?;
        let (rows, tokens) = ids.dims2()?;
        let fits = |row: &Vec<usize>| row.iter().sum::<usize>() == tokens;
        if documents.len() != rows || !documents.iter().all(fits) {
            let reason = format!(
                "documents of {documents:?} tokens do not fill {rows} rows of {tokens} tokens"
            );
            return Err(Error::TokenIds { reason });
        }
        if documents.iter().all(|row| row.len() == 1) {
            return self.run(&ids, None);
        }
        let mut start = 0;
        let lengths = documents.iter().flatten().filter(|&&count| count > 0);
        let calls = lengths.map(|&count| {
            let part = Part::Tokens { start, count };
            start += count;
            Ok(Call {
                part,
                rope: self.rope(0, count, 0)?,
                operands: self.operands,
            })
        });
        let calls = calls.collect::<Result<Vec<_>>>()?;
        let x = self.through_layers(&ids.reshape((1, rows * tokens))?, &calls, |_| Caches::None)?;
        Ok(x.reshape((rows, tokens, self.config.hidden_size))?)
    }

    /// Mean cross entropy, a scalar in f32, of the logits of some tokens against `targets`. `places` are the positions of these tokens in the
    /// flattened `features`, `[.., hidden_size]`. Logits are computed in parts, see [`ops::linear_cross_entropy`], with their gradients; under
    /// a head in FP8 or with an adapter in parts of at most 64 MiB, and again in the backward pass. Differentiable;
    /// [`Llama::loss_value`] is for a loss alone.
    ///
    /// # Errors
    /// If `places` is empty, the numbers of targets and places differ, or a place or a target does not exist.
    pub fn loss(&self, features: &Tensor, places: &[u32], targets: &[u32]) -> Result<Tensor> {
        self.loss_in(true, features, places, targets)
    }

    /// [`Llama::loss`] outside any graph, which takes a third of the time.
    ///
    /// # Errors
    /// As [`Llama::loss`].
    pub fn loss_value(&self, features: &Tensor, places: &[u32], targets: &[u32]) -> Result<Tensor> {
        let loss = self.loss_in(false, &features.detach(), places, targets)?;
        Ok(loss.detach())
    }

    fn loss_in(
        &self,
        graph: bool,
        features: &Tensor,
        places: &[u32],
        targets: &[u32],
    ) -> Result<Tensor> {
        let count = places.len();
        if count == 0 || targets.len() != count {
            let reason = format!("a loss of {} targets at {count} places", targets.len());
            return Err(Error::TokenIds { reason });
        }
        let x = features.reshape(((), self.config.hidden_size))?;
        let all = count == x.dim(0)? && places.iter().enumerate().all(|(i, &p)| i == p as usize);
        let x = match all {
            true => x,
            false => x.index_select(&Tensor::from_slice(places, count, &self.device)?, 0)?,
        };
        if let Some(matrix) = self.head.matrix() {
            let matrix = match graph {
                true => matrix.clone(),
                false => matrix.detach(),
            };
            let targets = Tensor::from_slice(targets, count, &self.device)?;
            let options = LinearCrossEntropyOptions::default().with_operands(self.operands);
            let loss = ops::linear_cross_entropy(&x, &matrix, &targets, options)?;
            return Ok(loss.to_dtype(DType::F32)?);
        }
        let most = (LOGITS / 4 / self.config.vocab_size.max(1)).max(1);
        let parts = count.div_ceil(most);
        let mut sum: Option<Tensor> = None;
        for i in 0..parts {
            // Parts of nearly equal sizes: a small last one would be slow.
            let (from, to) = (i * count / parts, (i + 1) * count / parts);
            let part = x.narrow(0, from, to - from)?;
            let targets = Tensor::from_slice(&targets[from..to], to - from, &self.device)?;
            let (head, operands) = (self.head.clone(), self.operands);
            let mean = match parts {
                1 => cross_entropy(&head, operands, &part, &targets)?,
                _ => checkpoint(move |x| cross_entropy(&head, operands, x, &targets), &part)?,
            };
            let mean = (mean * ((to - from) as f64 / count as f64))?;
            sum = Some(match sum {
                Some(sum) => (sum + mean)?,
                None => mean,
            });
        }
        sum.ok_or_else(|| candle_core::Error::msg("a loss without parts").into())
    }
}

fn cross_entropy(
    head: &Head,
    operands: Option<DType>,
    x: &Tensor,
    targets: &Tensor,
) -> candle_core::Result<Tensor> {
    ops::cross_entropy(&head.forward(x, operands)?, targets)?.to_dtype(DType::F32)
}
