//! One more token of each of several sequences, which have caches of their own.

use super::Llama;
use super::causal::{Caches, Call, Part, Together};
use crate::models::error::Result;
use crate::models::families::causal_lm::check_step;
use crate::models::layers::{KvCache, LayerCache, Rows, token_rows};
use candle_core::Tensor;

impl Llama {
    /// See [`CausalLm::step`](crate::models::CausalLm::step).
    pub(super) fn step_together(&self, ids: &[u32], caches: &mut [&mut KvCache]) -> Result<Tensor> {
        check_step(ids, caches)?;
        let tokens = Tensor::from_slice(ids, (ids.len(), 1), &self.device)?;
        let tokens = token_rows(&tokens, self.config.vocab_size)?;
        for cache in caches.iter_mut() {
            cache.make_room(1, 1, self.layers.len())?;
        }
        let mut logits = vec![];
        // Rows whose inputs share scales would depend on each other.
        let most = match self.shares_scales {
            true => 1,
            false => caches.len().max(1),
        };
        let mut start = 0;
        for caches in caches.chunks(most) {
            let ids = tokens.narrow(0, start, caches.len())?;
            logits.push(self.group(&ids, caches)?);
            start += caches.len();
        }
        for cache in caches {
            cache.advance(1);
        }
        match logits.len() {
            1 => Ok(logits.remove(0)),
            _ => Ok(Tensor::cat(&logits, 0)?),
        }
    }

    /// The logits of a few rows, `[rows, vocab_size]`.
    fn group(&self, ids: &Tensor, caches: &[&mut KvCache]) -> Result<Tensor> {
        let mut calls = vec![];
        for (start, cache) in caches.iter().enumerate() {
            let seen = cache.len();
            let rows = Rows {
                start,
                count: 1,
                seen,
            };
            calls.push(Call {
                part: Part::Rows(rows),
                rope: self.rope(seen, 1, cache.prompt_tokens())?,
                operands: self.operands,
            });
        }
        let for_each = |heads: usize| -> Result<(Tensor, Tensor)> {
            let repeated = |table: fn(&Call) -> &Tensor| {
                let tables = calls.iter().map(|call| {
                    let table = table(call);
                    table.broadcast_as((heads, table.dim(1)?))
                });
                let tables = tables.collect::<candle_core::Result<Vec<_>>>()?;
                Tensor::cat(&tables, 0)
            };
            let cos = repeated(|call| &call.rope.0)?;
            Ok((cos, repeated(|call| &call.rope.1)?))
        };
        let together = Together {
            q: for_each(self.config.num_heads)?,
            k: for_each(self.config.num_kv_heads)?,
        };
        let layers: Vec<Vec<&LayerCache>> = (0..self.layers.len())
            .map(|layer| caches.iter().map(|cache| &cache.layers[layer]).collect())
            .collect();
        let x =
            self.through_layers(ids, &calls, |layer| Caches::Each(&layers[layer], &together))?;
        let last = x.detach().squeeze(1)?;
        Ok(self.head.forward(&last, self.operands)?.detach())
    }
}
