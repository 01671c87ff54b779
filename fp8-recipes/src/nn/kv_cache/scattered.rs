//! A cache for batches whose rows are at different positions.

use super::IndicesAndMask;
use crate::nn::no_gradient_through;
use candle_core::{DType, Device, Result, Tensor};
use std::ops::{Deref, DerefMut};

/// `candle_nn::kv_cache::ScatteredCacheBuilder`; its other methods are candle-nn's.
#[derive(Debug, Clone)]
pub struct ScatteredCacheBuilder(candle_nn::kv_cache::ScatteredCacheBuilder);

impl ScatteredCacheBuilder {
    /// As candle-nn's.
    ///
    /// # Errors
    /// As candle-nn's.
    pub fn new(batch_size: usize, context: usize, dtype: DType, device: &Device) -> Result<Self> {
        candle_nn::kv_cache::ScatteredCacheBuilder::new(batch_size, context, dtype, device)
            .map(Self)
    }

    /// An empty cache.
    ///
    /// # Errors
    /// If memory for it cannot be allocated.
    pub fn make_cache(&self, num_heads: usize, head_dim: usize) -> Result<ScatteredKvCache> {
        self.0.make_cache(num_heads, head_dim).map(ScatteredKvCache)
    }
}

impl Deref for ScatteredCacheBuilder {
    type Target = candle_nn::kv_cache::ScatteredCacheBuilder;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for ScatteredCacheBuilder {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

/// `candle_nn::kv_cache::ScatteredKvCache`, which writes in place: fails where a gradient would be lost. Its other methods are
/// candle-nn's.
#[derive(Debug, Clone)]
pub struct ScatteredKvCache(candle_nn::kv_cache::ScatteredKvCache);

impl ScatteredKvCache {
    /// As candle-nn's.
    ///
    /// # Errors
    /// As candle-nn's, and if `k` or `v` tracks a gradient and is shorter than the cache.
    pub fn append(
        &mut self,
        k: &Tensor,
        v: &Tensor,
        iam: &IndicesAndMask,
    ) -> Result<(Tensor, Tensor)> {
        // candle-nn returns longer ones unchanged.
        if k.dim(2)? < self.k().dim(2)? {
            no_gradient_through("ScatteredKvCache::append", &[k, v])?;
        }
        self.0.append(k, v, iam)
    }
}

impl Deref for ScatteredKvCache {
    type Target = candle_nn::kv_cache::ScatteredKvCache;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
