//! A mixture of experts in place of an MLP.

use super::mlp::{self, Mlp};
use super::{LlamaConfig, MoeConfig, MoeNames};
use crate::models::error::Result;
use crate::models::layers::Projection;
use crate::nn::{NamedTensor, VarBuilder};
use candle_core::{D, DType, Tensor};
use fp8_candle::ops;
use fp8_recipes::Fp8Module;

/// Experts, and a router that chooses a few of them for each token. The router stays in high precision.
#[derive(Debug, Clone, Fp8Module)]
pub(super) struct Moe {
    router: NamedTensor,
    experts: Vec<Mlp>,
    #[fp8(skip)]
    config: MoeConfig,
}

impl Moe {
    pub(super) fn new(
        config: &LlamaConfig,
        moe: &MoeConfig,
        layer: VarBuilder<'_>,
    ) -> Result<Self> {
        // transformers 5 uses the same names in every model for experts that it writes as one tensor.
        let is_renamed = layer.contains_tensor("mlp.gate.weight")
            && !layer.contains_tensor("block_sparse_moe.gate.weight");
        let (folder, names) = match moe.names {
            MoeNames::Mixtral if !is_renamed => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", mlp::NAMES),
        };
        let vb = layer.pp(folder);
        let gate = vb.pp("gate");
        let router = gate.get((moe.num_experts, config.hidden_size), "weight")?;
        let sizes = (config.hidden_size, moe.intermediate_size);
        let experts =
            (0..moe.num_experts).map(|i| Mlp::new(sizes, false, names, vb.pp("experts").pp(i)));
        Ok(Self {
            router: NamedTensor::new(format!("{}.weight", gate.prefix()), router),
            experts: experts.collect::<Result<_>>()?,
            config: moe.clone(),
        })
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Projection> {
        self.experts.iter_mut().flat_map(Mlp::projections)
    }

    /// Takes the gradient from the router.
    pub(super) fn freeze(&mut self) {
        self.router = NamedTensor::new(self.router.path(), self.router.tensor().detach());
    }

    /// x: `[batch, tokens, hidden]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dims = x.dims();
        let x = x.reshape(((), x.dim(D::Minus1)?))?;
        let router = self.router.tensor().to_dtype(x.dtype())?;
        let logits = x.matmul(&router.t()?)?.to_dtype(DType::F32)?;
        let p = ops::softmax_last_dim(&logits)?;
        let chosen: Vec<Vec<u32>> = p
            .detach()
            .to_vec2::<f32>()?
            .iter()
            .map(|p| largest(p, self.config.experts_per_token))
            .collect();
        let count = (chosen.len(), self.config.experts_per_token);
        let flat: Vec<u32> = chosen.iter().flatten().copied().collect();
        let indexes = Tensor::from_vec(flat, count, x.device())?;
        // [rows, experts per token], part of the graph.
        let mut weights = p.gather(&indexes, D::Minus1)?;
        if self.config.normalize {
            weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        }
        let weights = weights.to_dtype(x.dtype())?.flatten_all()?;
        let mut y = x.zeros_like()?;
        for (e, expert) in self.experts.iter().enumerate() {
            let places = chosen.iter().enumerate().flat_map(|(row, chosen)| {
                let hits = chosen.iter().enumerate().filter(|(_, i)| **i as usize == e);
                hits.map(move |(slot, _)| (row as u32, (row * chosen.len() + slot) as u32))
            });
            let (rows, slots): (Vec<u32>, Vec<u32>) = places.unzip();
            if rows.is_empty() {
                continue;
            }
            let rows = Tensor::new(rows, x.device())?;
            let slots = Tensor::new(slots, x.device())?;
            let out = expert.forward(&x.index_select(&rows, 0)?)?;
            let weight = weights.index_select(&slots, 0)?.unsqueeze(1)?;
            y = y.index_add(&rows, &out.broadcast_mul(&weight)?, 0)?;
        }
        Ok(y.reshape(dims)?)
    }
}

/// Indexes of the `count` largest values, in descending order; equal values in order of index. NaN counts as the smallest.
fn largest(values: &[f32], count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    let key = |i: &u32| {
        let value = values[*i as usize];
        if value.is_nan() {
            f32::NEG_INFINITY
        } else {
            value
        }
    };
    order.sort_by(|a, b| key(b).total_cmp(&key(a)));
    order.truncate(count);
    order
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_largest_come_first() {
        assert_eq!(largest(&[0.1, 0.5, f32::NAN, 0.5], 3), [1, 3, 0]);
        assert_eq!(largest(&[0.1], 1), [0]);
    }
}
