//! Caches that append with `Tensor::cat`.

use candle_core::{Result, Tensor};

/// `candle_nn::kv_cache::ConcatKvCache`, differentiable.
#[derive(Debug, Clone)]
pub struct ConcatKvCache {
    dim: usize,
    held: Option<(Tensor, Tensor)>,
}

impl ConcatKvCache {
    /// Keys and values are appended along `dim`.
    pub fn new(dim: usize) -> Self {
        Self { dim, held: None }
    }

    /// Number of cached positions.
    pub fn current_seq_len(&self) -> usize {
        let dims = self.k().map(Tensor::dims);
        dims.and_then(|dims| dims.get(self.dim).copied())
            .unwrap_or(0)
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.held.is_none()
    }

    /// The dimension along which values are appended.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Appends keys and values. Returns all cached keys and values.
    ///
    /// # Errors
    /// If a shape does not fit the cache.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (k, v) = (k.contiguous()?, v.contiguous()?);
        let all = match &self.held {
            None => (k, v),
            Some((before_k, before_v)) => (
                Tensor::cat(&[before_k, &k], self.dim)?,
                Tensor::cat(&[before_v, &v], self.dim)?,
            ),
        };
        Ok(self.held.insert(all).clone())
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        self.held = None;
    }

    /// The cached keys.
    pub fn k(&self) -> Option<&Tensor> {
        self.held.as_ref().map(|(k, _)| k)
    }

    /// The cached values.
    pub fn v(&self) -> Option<&Tensor> {
        self.held.as_ref().map(|(_, v)| v)
    }

    /// The cached keys.
    pub fn k_mut(&mut self) -> Option<&mut Tensor> {
        self.held.as_mut().map(|(k, _)| k)
    }

    /// The cached values.
    pub fn v_mut(&mut self) -> Option<&mut Tensor> {
        self.held.as_mut().map(|(_, v)| v)
    }

    /// The cached keys and values.
    pub fn into_inner(self) -> Option<(Tensor, Tensor)> {
        self.held
    }
}

/// `candle_nn::kv_cache::InterleavedKvCache`, differentiable.
#[derive(Debug, Clone)]
pub struct InterleavedKvCache {
    kv: Option<Tensor>,
    head_dim: usize,
}

impl InterleavedKvCache {
    /// For heads of `head_dim` features.
    pub fn new(head_dim: usize) -> Self {
        Self { kv: None, head_dim }
    }

    /// Number of cached positions.
    pub fn current_seq_len(&self) -> usize {
        let dims = self.kv.as_ref().map(Tensor::dims);
        dims.and_then(|dims| dims.first().copied()).unwrap_or(0)
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.kv.is_none()
    }

    /// Appends keys and values `[1, heads, tokens, head_dim]`. Returns the whole cache, `[tokens, heads, 2 * head_dim]`.
    ///
    /// # Errors
    /// If a shape differs from this or does not fit the cache.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let tokens_first = |x: &Tensor| x.squeeze(0)?.transpose(0, 1)?.contiguous();
        let new = Tensor::cat(&[tokens_first(k)?, tokens_first(v)?], 2)?;
        let all = match &self.kv {
            None => new,
            Some(before) => Tensor::cat(&[before, &new], 0)?,
        };
        Ok(self.kv.insert(all).clone())
    }

    /// The whole cache.
    pub fn kv(&self) -> Option<&Tensor> {
        self.kv.as_ref()
    }

    /// Features of one head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        self.kv = None;
    }
}
