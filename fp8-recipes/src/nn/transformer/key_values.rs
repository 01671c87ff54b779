//! The keys and values of earlier tokens.

use crate::array::Array;
use crate::error::Result;
use candle_core::Tensor;

/// Keys and values of the tokens seen so far, `[batch, kv_heads, tokens, head_dim]`.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::nn::*;
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// # let config = TransformerConfig::new(16, 2);
/// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// # let attention = multihead_attention(&config, vb)?;
/// # let inputs = LayerInputs::default();
/// let mut cache = KeyValues::default();
/// attention.forward_cached(&x.narrow(1, 0, 4)?, &inputs, &mut cache)?;
/// let y: Tensor = attention.forward_cached(&x.narrow(1, 4, 1)?, &inputs, &mut cache)?;
/// assert_eq!(y.dims(), [2, 1, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct KeyValues<A = Tensor>(Option<(A, A)>);

impl<A> Default for KeyValues<A> {
    fn default() -> Self {
        Self(None)
    }
}

impl<A: Array> KeyValues<A> {
    /// Number of tokens whose keys are held.
    pub(super) fn len(&self) -> usize {
        let keys = self.0.as_ref().map(|(k, _)| k.dims());
        keys.and_then(|dims| dims.get(2)).copied().unwrap_or(0)
    }

    /// Runs `compute`, which appends tokens; after a failure the cache is as before.
    pub(super) fn extended<T>(
        &mut self,
        compute: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let before = self.clone();
        let done = compute(self);
        if done.is_err() {
            *self = before;
        }
        done
    }

    /// Appends keys and values of new tokens; returns everything that a new token may attend to.
    pub(super) fn append(&mut self, k: A, v: A, window: Option<usize>) -> Result<(A, A)> {
        let (mut k, mut v) = match &self.0 {
            Some((old_k, old_v)) => (A::cat(&[old_k, &k], 2)?, A::cat(&[old_v, &v], 2)?),
            None => (k, v),
        };
        let seen = k.dims().get(2).copied().unwrap_or(0);
        self.0 = Some((k.clone(), v.clone()));
        if let Some(window) = window.filter(|window| seen > *window) {
            let last = |x: &A| x.narrow(2, seen - window, window)?.contiguous();
            self.0 = Some((last(&k)?, last(&v)?));
            (k, v) = (k.contiguous()?, v.contiguous()?);
        }
        Ok((k, v))
    }
}
