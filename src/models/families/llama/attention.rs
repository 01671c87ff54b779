//! Self-attention of a layer.

use super::LlamaConfig;
use super::causal::{Caches, Call, Scores, Together, per_call};
use super::joint::Joint;
use crate::models::error::Result;
use crate::models::layers::{KvScales, LayerCache, Projection, file_has};
use crate::nn::{RmsNorm, VarBuilder, linear_b, rms_norm};
use candle_core::{DType, Module, Tensor};
use fp8_candle::ops;
use fp8_recipes::Fp8Module;

#[derive(Debug, Clone, Fp8Module)]
pub(super) struct Attention {
    qkv: Joint,
    output: Projection,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    /// dequant_scales of keys and values, if the file has them.
    #[fp8(skip)]
    pub(super) scales: Option<KvScales>,
    #[fp8(skip)]
    sizes: Sizes,
}

#[derive(Debug, Clone)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotated: usize,
    window: Option<usize>,
}

impl Attention {
    pub(super) fn new(config: &LlamaConfig, layer: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let d = config.hidden_size;
        let (q, kv) = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        );
        let norm = |name: &str| {
            let norm = || rms_norm(config.head_dim, config.rms_norm_eps, vb.pp(name));
            config.qk_norm.then(norm).transpose()
        };
        let parts = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        Ok(Self {
            qkv: Joint::new(d, &parts, "qkv_proj", config.qkv_bias, &vb)?,
            output: linear_b(q, d, config.output_bias, vb.pp("o_proj"))?.into(),
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            scales: kv_scales(&vb)?,
            sizes: Sizes {
                heads: config.num_heads,
                kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
                rotated: config.rope.dim,
                window: config.sliding_windows.get(layer).copied().flatten(),
            },
        })
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Projection> {
        self.qkv.projections().chain([&mut self.output])
    }

    /// What writes the output.
    pub(super) fn output(&mut self) -> &mut Projection {
        &mut self.output
    }

    /// What reads the input.
    pub(super) fn readers(&mut self) -> Vec<&mut Projection> {
        self.qkv.projections().collect()
    }

    /// Detaches the norms, so that they get no gradient.
    pub(super) fn freeze(&mut self) {
        for norm in [&mut self.q_norm, &mut self.k_norm].into_iter().flatten() {
            *norm = norm.clone().frozen();
        }
    }

    /// x: `[batch, tokens, hidden]`; `calls` cover it. Packed tokens have no cache.
    pub(super) fn forward(&self, x: &Tensor, calls: &[Call], caches: Caches<'_>) -> Result<Tensor> {
        let qkv = self.qkv.forward::<3>(x)?;
        let y = match caches {
            Caches::Each(caches, together) => {
                self.attend_together(&qkv, calls, caches, together)?
            }
            _ => per_call(&qkv, calls, caches, |qkv, call, cache| {
                self.attend(qkv, call, cache)
            })?,
        };
        Ok(self.output.forward(&y)?)
    }

    /// Result of attention for the rows of one call, `[rows, tokens, heads * head_dim]`.
    fn attend(
        &self,
        [q, k, v]: &[Tensor; 3],
        call: &Call,
        cache: Option<&LayerCache>,
    ) -> Result<Tensor> {
        let (batch, tokens, _) = q.dims3()?;
        let Sizes {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.sizes;
        let q = self.heads(q, heads, self.q_norm.as_ref(), call)?;
        let k = self.heads(k, kv_heads, self.k_norm.as_ref(), call)?;
        let v = v
            .reshape((batch, tokens, kv_heads, head_dim))?
            .transpose(1, 2)?;
        let y = self
            .scores(call.operands)
            .attend([q, k, v], call.part.seen(), cache)?;
        let y = y.transpose(1, 2)?;
        Ok(y.reshape((batch, tokens, heads * head_dim))?)
    }

    fn scores(&self, operands: Option<DType>) -> Scores {
        Scores {
            scale: 1. / (self.sizes.head_dim as f64).sqrt(),
            window: self.sizes.window,
            operands,
        }
    }

    /// Result of attention for one token of each row, `[rows, 1, heads * head_dim]`, each over the cache of its row.
    fn attend_together(
        &self,
        [q, k, v]: &[Tensor; 3],
        calls: &[Call],
        caches: &[&LayerCache],
        together: &Together,
    ) -> Result<Tensor> {
        let rows = q.dim(0)?;
        let Sizes {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.sizes;
        // Every head of every row is a token of one sequence here, with the angles of its row.
        let rotated = |x: &Tensor, heads, norm: Option<&RmsNorm>, rope| -> Result<Tensor> {
            let mut x = x.reshape((1, 1, rows * heads, head_dim))?;
            if let Some(norm) = norm {
                x = norm.forward(&x)?;
            }
            Ok(self.rotate(&x, rope)?.reshape((rows, heads, 1, head_dim))?)
        };
        let q = rotated(q, heads, self.q_norm.as_ref(), &together.q)?;
        let k = rotated(k, kv_heads, self.k_norm.as_ref(), &together.k)?;
        let v = v.reshape((rows, kv_heads, 1, head_dim))?;
        let mut sequences = vec![];
        for (row, (call, cache)) in calls.iter().zip(caches).enumerate() {
            let seen = call.part.seen();
            cache.append(&k.narrow(0, row, 1)?, &v.narrow(0, row, 1)?, seen)?;
            sequences.push(cache.sequence(seen + 1));
        }
        let operands = calls.first().and_then(|call| call.operands);
        let options = self.scores(operands).options();
        let y = ops::cached_attention_each(&q.detach(), &sequences, &options)?;
        Ok(y.reshape((rows, 1, heads * head_dim))?)
    }

    /// Splits `[batch, tokens, heads * head_dim]` into heads, normalizes them if the model does, and rotates them.
    fn heads(
        &self,
        x: &Tensor,
        heads: usize,
        norm: Option<&RmsNorm>,
        call: &Call,
    ) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let head_dim = self.sizes.head_dim;
        let mut x = x.reshape((batch, tokens, heads, head_dim))?;
        if let Some(norm) = norm {
            x = norm.forward(&x)?;
        }
        // With one token both layouts coincide, and a reshape copies nothing.
        let x = match tokens {
            1 => x.reshape((batch, heads, 1, head_dim))?,
            _ => x.transpose(1, 2)?,
        };
        self.rotate(&x, &call.rope)
    }

    /// Rotates the first features of heads, `[.., tokens, head_dim]`, by the angles of their tokens.
    fn rotate(&self, x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
        let Sizes {
            head_dim, rotated, ..
        } = self.sizes;
        if rotated == head_dim {
            return Ok(ops::rope(x, cos, sin)?);
        }
        let first = ops::rope(&x.narrow(3, 0, rotated)?.contiguous()?, cos, sin)?;
        let rest = x.narrow(3, rotated, head_dim - rotated)?;
        Ok(Tensor::cat(&[first, rest.contiguous()?], 3)?)
    }
}

/// Reads `self_attn.k_scale` and `v_scale`: one number each, or one per head.
fn kv_scales(vb: &VarBuilder<'_>) -> Result<Option<KvScales>> {
    let read = |name: &str| -> Result<Option<Vec<f32>>> {
        if !file_has(vb, name) {
            return Ok(None);
        }
        let scales = vb.get_unchecked_dtype(name, DType::F32)?;
        Ok(Some(scales.flatten_all()?.to_vec1::<f32>()?))
    };
    Ok(match (read("k_scale")?, read("v_scale")?) {
        (Some(k), Some(v)) => Some(KvScales::new(k, v)),
        _ => None,
    })
}
