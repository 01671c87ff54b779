//! The keys and values of a cache, and what they must have.

use crate::base::data::attention::CacheSide;
use crate::base::error::{Error, Result, dtype_error, shape_error};
use crate::ops::attention::{AttentionDropout, AttentionOptions};
use candle_core::{DType, Tensor};
use fp8_core::Format;

pub(super) const OP: &str = "cached_attention";

/// The keys or the values of a cache: `[batch, kv_heads, capacity, head_dim]` with the features of a token next to each other. A call
/// reads the first tokens.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum CachedTokens<'a> {
    /// Values in f32, bf16 or f16.
    HighPrecision(&'a Tensor),
    /// FP8 codes, as U8.
    Fp8 {
        /// `[batch, kv_heads, capacity, head_dim]`.
        codes: &'a Tensor,
        /// The format of the codes.
        format: Format,
        /// The factor on decoded codes, one number per head of keys.
        dequant_scales: &'a [f32],
    },
}

impl<'a> CachedTokens<'a> {
    pub(super) fn tensor(&self) -> &'a Tensor {
        match self {
            Self::HighPrecision(tensor) => tensor,
            Self::Fp8 { codes, .. } => codes,
        }
    }

    /// The same for the kernels.
    pub(super) fn side(&self) -> CacheSide<'a> {
        let (tensor, fp8) = match *self {
            Self::HighPrecision(tensor) => (tensor, None),
            Self::Fp8 {
                codes,
                format,
                dequant_scales,
            } => (codes, Some((format, dequant_scales))),
        };
        CacheSide { tensor, fp8 }
    }

    /// The values of the first `keys` tokens in `dtype`, `[batch, kv_heads, keys, head_dim]`: decoded in f32, then rounded.
    ///
    /// # Errors
    /// If there are fewer tokens, or candle fails to copy.
    pub fn dequantize(&self, keys: usize, dtype: DType) -> Result<Tensor> {
        let part = self.tensor().narrow(2, 0, keys)?;
        match self {
            Self::HighPrecision(_) => Ok(part.to_dtype(dtype)?),
            Self::Fp8 {
                format,
                dequant_scales,
                ..
            } => {
                let device = part.device().clone();
                let codes = part.to_device(&candle_core::Device::Cpu)?;
                let codes = codes.flatten_all()?.to_vec1::<u8>()?;
                let mut values = vec![0f32; codes.len()];
                fp8_core::decode(*format, &codes, 1.0, &mut values);
                let values = Tensor::from_vec(values, part.dims(), &device)?;
                let heads = dequant_scales.len();
                let scales = Tensor::from_slice(dequant_scales, (1, heads, 1, 1), &device)?;
                Ok(values.broadcast_mul(&scales)?.to_dtype(dtype)?)
            }
        }
    }
}

/// Checks that keys and values fit queries of shape `q`; how many heads they have.
pub(super) fn check_cache(
    (k, v): (&CachedTokens<'_>, &CachedTokens<'_>),
    (q, q_dtype): ([usize; 4], DType),
    keys: usize,
) -> Result<usize> {
    let [batch, heads, tokens, head_dim] = q;
    let kv_heads = match *k.tensor().dims() {
        [b, h, capacity, d]
            if b == batch
                && d == head_dim
                && h > 0
                && heads % h == 0
                && (tokens..=capacity).contains(&keys) =>
        {
            h
        }
        _ => {
            let expected = format!(
                "[{batch}, a divisor of {heads}, room for {keys} tokens of which {tokens} are new, {head_dim}]"
            );
            return Err(shape_error(OP, "k", expected, k.tensor().dims()));
        }
    };
    if v.tensor().dims() != k.tensor().dims() {
        let expected = format!("{:?}, as k", k.tensor().dims());
        return Err(shape_error(OP, "v", expected, v.tensor().dims()));
    }
    for (what, part) in [("k", k), ("v", v)] {
        let CacheSide { tensor, fp8 } = part.side();
        let narrow = matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16);
        let fits = match fp8 {
            Some(_) => tensor.dtype() == DType::U8,
            None => narrow || tensor.dtype() == DType::F64 && q_dtype == DType::F64,
        };
        if !fits {
            let expected = "f32, bf16 or f16, f64 as q, or u8 for codes";
            return Err(dtype_error(OP, what, expected, tensor.dtype()));
        }
        if head_dim > 1 && tensor.stride()[3] != 1 {
            let expected = "features of a token next to each other: make it contiguous";
            return Err(shape_error(OP, what, expected, tensor.dims()));
        }
        if let CachedTokens::Fp8 { dequant_scales, .. } = part
            && dequant_scales.len() != kv_heads
        {
            let expected = format!(
                "{kv_heads} scales, one per head, got {}",
                dequant_scales.len()
            );
            return Err(shape_error(OP, what, expected, part.tensor().dims()));
        }
    }
    Ok(kv_heads)
}

/// Fails if the options have dropout. What is dropped follows from the place of a query in its call, so tokens that come one by one would
/// lose other probabilities than all at once.
pub(super) fn no_dropout(options: &AttentionOptions) -> Result<()> {
    match options.dropout {
        // NaN differs from 0 too.
        Some(AttentionDropout { probability, .. }) if probability != 0. => Err(Error::Dropout {
            op: OP,
            got: probability,
        }),
        _ => Ok(()),
    }
}

/// Fails if one of these is part of a graph.
pub(super) fn no_gradient<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<()> {
    match tensors.into_iter().any(Tensor::track_op) {
        false => Ok(()),
        true => Err(Error::Candle(candle_core::Error::msg(
            "cached_attention has no backward pass, and a gradient is tracked: use attention",
        ))),
    }
}
