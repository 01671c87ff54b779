//! Self-attention of a layer.

use super::LlamaConfig;
use super::joint::Joint;
use crate::models::error::Result;
use crate::models::layers::{KvScales, LayerCache, Projection, Rows, file_has, masked_attention};
use crate::nn::{RmsNorm, VarBuilder, linear_b, rms_norm};
use candle_core::{DType, Device, Module, Tensor};
use fp8_candle::ops;
use fp8_recipes::Fp8Module;

/// What attention needs for a part of a batch.
#[derive(Clone)]
pub(super) struct Call {
    /// Which part.
    pub(super) part: Part,
    /// Cosines and sines of the new tokens.
    pub(super) rope: (Tensor, Tensor),
}

/// A part of a batch that attention looks at by itself.
#[derive(Clone, Copy)]
pub(super) enum Part {
    /// Rows that have seen the same number of tokens.
    Rows(Rows),
    /// Some tokens of all rows: a document among others that are packed into the same row.
    Tokens { start: usize, count: usize },
}

impl Part {
    /// The dimension of `[batch, tokens, ..]` that parts divide.
    fn dim(self) -> usize {
        match self {
            Self::Rows(_) => 0,
            Self::Tokens { .. } => 1,
        }
    }

    /// Start and length along that dimension.
    fn span(self) -> (usize, usize) {
        match self {
            Self::Rows(Rows { start, count, .. }) | Self::Tokens { start, count } => (start, count),
        }
    }

    /// Tokens in the cache before the new ones.
    fn seen(self) -> usize {
        match self {
            Self::Rows(rows) => rows.seen,
            Self::Tokens { .. } => 0,
        }
    }
}

/// Up to this many new tokens, attention reads the cache directly, without a matrix of scores.
const FEW_TOKENS: usize = 8;

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

    /// Takes the gradient from the norms.
    pub(super) fn freeze(&mut self) {
        for norm in [&mut self.q_norm, &mut self.k_norm].into_iter().flatten() {
            *norm = norm.clone().frozen();
        }
    }

    /// x: `[batch, tokens, hidden]`; `calls` cover it. Packed tokens have no cache.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        calls: &[Call],
        cache: Option<&LayerCache>,
    ) -> Result<Tensor> {
        let qkv = self.qkv.forward::<3>(x)?;
        let y = match calls {
            [call] => self.attend(&qkv, call, cache)?,
            calls => {
                let dim = calls.first().map_or(0, |call| call.part.dim());
                let parts = calls.iter().map(|call| {
                    let (start, count) = call.part.span();
                    let [q, k, v] = &qkv;
                    let part = |x: &Tensor| x.narrow(dim, start, count);
                    let cache = cache.map(|cache| cache.part(start, count)).transpose()?;
                    self.attend(&[part(q)?, part(k)?, part(v)?], call, cache.as_ref())
                });
                Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, dim)?
            }
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
        let seen = call.part.seen();
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
        let scale = 1. / (head_dim as f64).sqrt();
        let y = match cache {
            None => self.over(&q, &k, &v, scale)?,
            Some(cache) => {
                cache.append(&k, &v, seen)?;
                let keys = seen + tokens;
                let windowed = self.sizes.window.is_some_and(|window| keys > window);
                if tokens <= FEW_TOKENS && !windowed {
                    cache.attention(&q, keys, scale)?
                } else {
                    let (k, v) = match seen == 0 && !cache.is_lossy(k.dtype()) {
                        true => (k, v),
                        false => cache.values(keys, q.dtype())?,
                    };
                    self.over(&q, &k, &v, scale)?
                }
            }
        };
        let y = y.transpose(1, 2)?;
        Ok(y.reshape((batch, tokens, heads * head_dim))?)
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
        let Sizes {
            head_dim, rotated, ..
        } = self.sizes;
        let mut x = x.reshape((batch, tokens, heads, head_dim))?;
        if let Some(norm) = norm {
            x = norm.forward(&x)?;
        }
        // With one token both layouts coincide, and a reshape copies nothing.
        let x = match tokens {
            1 => x.reshape((batch, heads, 1, head_dim))?,
            _ => x.transpose(1, 2)?,
        };
        let (cos, sin) = &call.rope;
        if rotated == head_dim {
            return Ok(ops::rope(&x, cos, sin)?);
        }
        let first = ops::rope(&x.narrow(3, 0, rotated)?.contiguous()?, cos, sin)?;
        let rest = x.narrow(3, rotated, head_dim - rotated)?;
        Ok(Tensor::cat(&[first, rest.contiguous()?], 3)?)
    }

    /// Causal attention of the last tokens over keys and values, `[batch, heads, .., head_dim]`.
    fn over(&self, q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<Tensor> {
        let (tokens, keys) = (q.dim(2)?, k.dim(2)?);
        match self.sizes.window {
            Some(window) if keys > window => {
                let mask = window_mask(tokens, keys, window, q.device())?;
                masked_attention(q, k, v, &mask, scale)
            }
            _ => {
                let options = ops::AttentionOptions::default().with_causal(true);
                Ok(ops::attention(q, k, v, options.with_softmax_scale(scale))?)
            }
        }
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

/// Mask of causal attention within a window: 0 where a query sees a key, -Inf elsewhere; `[tokens, keys]` in f32.
fn window_mask(tokens: usize, keys: usize, window: usize, device: &Device) -> Result<Tensor> {
    let values: Vec<f32> = (keys - tokens..keys)
        .flat_map(|query| {
            (0..keys).map(move |key| match key <= query && key + window > query {
                true => 0.,
                false => f32::NEG_INFINITY,
            })
        })
        .collect();
    Ok(Tensor::from_vec(values, (tokens, keys), device)?)
}
