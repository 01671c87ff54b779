//! A mixture of experts in place of an MLP.

use super::mlp::{self, Mlp};
use super::router::{Chosen, Router};
use super::{LlamaConfig, MoeConfig, MoeNames};
use crate::models::error::Result;
use crate::models::layers::Projection;
use crate::nn::{NamedTensor, VarBuilder};
use candle_core::{D, Tensor};
use fp8_candle::ops;
use fp8_recipes::Fp8Module;

/// Experts, and a router that chooses a few of them for each token. The router stays in high precision.
#[derive(Debug, Clone, Fp8Module)]
pub(super) struct Moe {
    router: Router,
    experts: Vec<Mlp>,
    /// Computes for every token.
    shared: Option<Mlp>,
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
        let sizes = (config.hidden_size, moe.intermediate_size);
        let experts =
            (0..moe.num_experts).map(|i| Mlp::new(sizes, false, names, vb.pp("experts").pp(i)));
        let shared = moe.shared_size.map(|size| {
            let sizes = (config.hidden_size, size);
            Mlp::new(sizes, false, names, vb.pp("shared_experts"))
        });
        Ok(Self {
            router: Router::new(config.hidden_size, moe, &vb.pp("gate"))?,
            experts: experts.collect::<Result<_>>()?,
            shared: shared.transpose()?,
        })
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Projection> {
        let all = self.experts.iter_mut().chain(&mut self.shared);
        all.flat_map(Mlp::projections)
    }

    /// What reads the input: the router, and layers of all experts.
    pub(super) fn readers(&mut self) -> (Option<&mut NamedTensor>, Vec<&mut Projection>) {
        let all = self.experts.iter_mut().chain(&mut self.shared);
        let layers = all.flat_map(Mlp::readers).collect();
        (Some(self.router.weight()), layers)
    }

    /// Detaches the router, so that it gets no gradient.
    pub(super) fn freeze(&mut self) {
        self.router.freeze();
    }

    /// x: `[batch, tokens, hidden]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dims = x.dims();
        let x = x.reshape(((), x.dim(D::Minus1)?))?;
        let Chosen { experts, weights } = self.router.choose(&x)?;
        let weights = weights.to_dtype(x.dtype())?.flatten_all()?;
        let y = match &self.shared {
            Some(shared) => shared.forward(&x)?,
            None => x.zeros_like()?,
        };
        // For each expert: its rows, and their places among the weights.
        let mut places = vec![vec![]; self.experts.len()];
        for (row, chosen) in experts.iter().enumerate() {
            for (slot, &expert) in chosen.iter().enumerate() {
                places[expert as usize].push((row as u32, (row * chosen.len() + slot) as u32));
            }
        }
        let lengths: Vec<usize> = places.iter().map(Vec::len).collect();
        let (rows, slots): (Vec<u32>, Vec<u32>) = places.into_iter().flatten().unzip();
        if rows.is_empty() {
            return Ok(y.reshape(dims)?);
        }
        let (rows, slots) = (
            Tensor::new(rows, x.device())?,
            Tensor::new(slots, x.device())?,
        );
        // All rows are gathered and added at once: doing it for each expert would copy the whole batch each time, in both passes.
        let parts = ops::split(&x.index_select(&rows, 0)?, 0, &lengths)?;
        let outputs = self.experts.iter().zip(&parts).zip(lengths);
        let outputs = outputs.filter(|&(_, length)| length > 0);
        let outputs = outputs.map(|((expert, part), _)| expert.forward(part));
        let output = Tensor::cat(&outputs.collect::<Result<Vec<_>>>()?, 0)?;
        let weights = weights.index_select(&slots, 0)?.unsqueeze(1)?;
        let y = y.index_add(&rows, &output.broadcast_mul(&weights)?, 0)?;
        Ok(y.reshape(dims)?)
    }
}
