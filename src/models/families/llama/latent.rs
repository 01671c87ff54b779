//! Multi-head latent attention (MLA) of DeepSeek-V2 and V3: keys and values of all heads come from one small vector per token, and a
//! part of each head is rotated, whose key all heads share.

use super::causal::{Caches, Call, Scores, per_call};
use super::{LlamaConfig, MlaConfig};
use crate::models::error::Result;
use crate::models::families::NormReaders;
use crate::models::layers::{LayerCache, Projection};
use crate::nn::{RmsNorm, VarBuilder, linear_b, linear_no_bias, rms_norm};
use candle_core::{D, Module, Tensor};
use fp8_candle::ops;
use fp8_recipes::Fp8Module;

/// The epsilon of the norms inside the attention, whatever that of the layers is.
const EPS: f64 = 1e-6;

#[derive(Debug, Clone, Fp8Module)]
enum Query {
    Direct(Projection),
    LowRank {
        down: Projection,
        norm: RmsNorm,
        up: Projection,
    },
}

#[derive(Debug, Clone, Fp8Module)]
pub(super) struct LatentAttention {
    query: Query,
    kv_down: Projection,
    kv_norm: RmsNorm,
    kv_up: Projection,
    output: Projection,
    #[fp8(skip)]
    config: MlaConfig,
    #[fp8(skip)]
    heads: usize,
    /// Features of a head in the cache, of which queries and keys, or values, may leave some at 0.
    #[fp8(skip)]
    width: usize,
}

impl LatentAttention {
    pub(super) fn new(config: &LlamaConfig, mla: &MlaConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let (d, heads, bias) = (config.hidden_size, config.num_heads, config.qkv_bias);
        let queries = heads * (mla.plain_dim + mla.rotated_dim);
        let query = match mla.q_rank {
            None => Query::Direct(linear_no_bias(d, queries, vb.pp("q_proj"))?.into()),
            Some(rank) => Query::LowRank {
                down: linear_b(d, rank, bias, vb.pp("q_a_proj"))?.into(),
                norm: rms_norm(rank, EPS, vb.pp("q_a_layernorm"))?,
                up: linear_no_bias(rank, queries, vb.pp("q_b_proj"))?.into(),
            },
        };
        let latent = mla.kv_rank + mla.rotated_dim;
        let keys_values = heads * (mla.plain_dim + mla.v_dim);
        Ok(Self {
            query,
            kv_down: linear_b(d, latent, bias, vb.pp("kv_a_proj_with_mqa"))?.into(),
            kv_norm: rms_norm(mla.kv_rank, EPS, vb.pp("kv_a_layernorm"))?,
            kv_up: linear_no_bias(mla.kv_rank, keys_values, vb.pp("kv_b_proj"))?.into(),
            output: linear_b(heads * mla.v_dim, d, config.output_bias, vb.pp("o_proj"))?.into(),
            config: mla.clone(),
            heads,
            width: config.head_dim,
        })
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Projection> {
        let query = match &mut self.query {
            Query::Direct(layer) => vec![layer],
            Query::LowRank { down, up, .. } => vec![down, up],
        };
        let others = [&mut self.kv_down, &mut self.kv_up, &mut self.output];
        query.into_iter().chain(others)
    }

    /// What writes the output.
    pub(super) fn output(&mut self) -> &mut Projection {
        &mut self.output
    }

    /// What reads the input, and the norms inside with what reads them.
    pub(super) fn readers(&mut self) -> (Vec<&mut Projection>, Vec<NormReaders<'_>>) {
        let (query, low_rank) = match &mut self.query {
            Query::Direct(layer) => (layer, None),
            Query::LowRank { down, norm, up } => (down, Some((norm, up))),
        };
        let keys_values = (&mut self.kv_norm, &mut self.kv_up);
        let norms = low_rank.into_iter().chain([keys_values]);
        let norms = norms.map(|(norm, layer)| NormReaders {
            norm,
            router: None,
            layers: vec![layer],
        });
        (vec![query, &mut self.kv_down], norms.collect())
    }

    /// Detaches the norms, so that they get no gradient.
    pub(super) fn freeze(&mut self) {
        if let Query::LowRank { norm, .. } = &mut self.query {
            *norm = norm.clone().frozen();
        }
        self.kv_norm = self.kv_norm.clone().frozen();
    }

    /// x: `[batch, tokens, hidden]`; `calls` cover it.
    pub(super) fn forward(&self, x: &Tensor, calls: &[Call], caches: Caches<'_>) -> Result<Tensor> {
        let q = match &self.query {
            Query::Direct(layer) => layer.forward(x)?,
            Query::LowRank { down, norm, up } => up.forward(&norm.forward(&down.forward(x)?)?)?,
        };
        let down = self.kv_down.forward(x)?;
        let MlaConfig {
            kv_rank,
            rotated_dim,
            ..
        } = self.config;
        let latent = down.narrow(D::Minus1, 0, kv_rank)?.contiguous()?;
        let kv = self.kv_up.forward(&self.kv_norm.forward(&latent)?)?;
        let shared = down.narrow(D::Minus1, kv_rank, rotated_dim)?;
        let y = per_call(&[q, kv, shared], calls, caches, |inputs, call, cache| {
            self.attend(inputs, call, cache)
        })?;
        Ok(self.output.forward(&y)?)
    }

    /// Result of attention for the rows of one call, `[rows, tokens, heads * v_dim]`. `shared` is the rotated part of all keys.
    fn attend(
        &self,
        [q, kv, shared]: &[Tensor; 3],
        call: &Call,
        cache: Option<&LayerCache>,
    ) -> Result<Tensor> {
        let (batch, tokens, _) = q.dims3()?;
        let MlaConfig {
            plain_dim,
            rotated_dim,
            v_dim,
            ..
        } = self.config;
        let by_head = |x: &Tensor, features: usize| {
            let x = x.reshape((batch, tokens, self.heads, features))?;
            x.transpose(1, 2)
        };
        let q = by_head(q, plain_dim + rotated_dim)?;
        let kv = by_head(kv, plain_dim + v_dim)?;
        let rotated = q.narrow(3, plain_dim, rotated_dim)?;
        let q = [q.narrow(3, 0, plain_dim)?, self.rotate(&rotated, call)?];
        let mut q = self.padded(&Tensor::cat(&q, 3)?)?;
        if let Some(growth) = self.config.query_growth {
            q = q.broadcast_mul(&growth.factors(call.part.seen(), &q)?)?;
        }
        let shared = self.rotate(&shared.unsqueeze(1)?, call)?;
        let shared = shared.broadcast_as((batch, self.heads, tokens, rotated_dim))?;
        let k = Tensor::cat(&[kv.narrow(3, 0, plain_dim)?, shared.contiguous()?], 3)?;
        let v = kv.narrow(3, plain_dim, v_dim)?.contiguous()?;
        let scores = Scores {
            scale: self.config.softmax_scale,
            window: None,
            operands: call.operands,
        };
        let qkv = [q, self.padded(&k)?, self.padded(&v)?];
        let y = scores.attend(qkv, call.part.seen(), cache)?;
        let y = y.narrow(3, 0, v_dim)?.transpose(1, 2)?;
        Ok(y.reshape((batch, tokens, self.heads * v_dim))?)
    }

    fn rotate(&self, x: &Tensor, call: &Call) -> Result<Tensor> {
        let (cos, sin) = &call.rope;
        let x = x.contiguous()?;
        Ok(match self.config.interleaved {
            true => ops::rope_i(&x, cos, sin)?,
            false => ops::rope(&x, cos, sin)?,
        })
    }

    /// Heads of the cache's width, with zeros at their ends, which change no product.
    fn padded(&self, x: &Tensor) -> Result<Tensor> {
        let missing = self.width - x.dim(3)?;
        Ok(match missing {
            0 => x.contiguous()?,
            _ => x.pad_with_zeros(3, 0, missing)?.contiguous()?,
        })
    }
}
