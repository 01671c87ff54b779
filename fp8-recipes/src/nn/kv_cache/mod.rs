//! `candle_nn::kv_cache`, with gradients.
//!
//! candle-nn's caches write keys and values in place or detach them, so the projections before a cache silently receive no
//! gradient. The keys and values that these caches return stay connected with everything that was appended, in earlier calls
//! too, as with a cache made by `Tensor::cat`: a model that generates text from variables keeps their graph. `all_data` is
//! candle-nn's buffer, detached. Where nothing tracks a gradient, as in a model loaded for inference, candle-nn's in-place
//! form is used.

mod concat;
mod parameters;
mod rotating;
mod scattered;

pub use candle_nn::kv_cache::*;
pub use concat::{ConcatKvCache, InterleavedKvCache};
pub use rotating::{RotatingCache, RotatingKvCache};
pub use scattered::{ScatteredCacheBuilder, ScatteredKvCache};

use candle_core::{Error, Result, Tensor};

/// Fails if `values` cannot be appended beside `keys` along `dim`, to a cache with this buffer. Checked before the keys are appended: alone,
/// they would belong to other values from then on.
fn check_values(
    buffer: &Option<Tensor>,
    (keys, values): (&Tensor, &Tensor),
    dim: usize,
) -> Result<()> {
    if values.dim(dim)? != keys.dim(dim)? {
        return Err(Error::ShapeMismatchBinaryOp {
            lhs: keys.shape().clone(),
            rhs: values.shape().clone(),
            op: "kv-cache-append",
        });
    }
    let Some(buffer) = buffer else {
        return Ok(());
    };
    if buffer.dtype() != values.dtype() {
        return Err(Error::DTypeMismatchBinaryOp {
            lhs: buffer.dtype(),
            rhs: values.dtype(),
            op: "kv-cache-append",
        });
    }
    let mut expected = buffer.dims().to_vec();
    if let Some(len) = expected.get_mut(dim) {
        *len = values.dim(dim)?;
    }
    if expected != values.dims() {
        return Err(Error::ShapeMismatchBinaryOp {
            lhs: buffer.shape().clone(),
            rhs: values.shape().clone(),
            op: "kv-cache-append",
        });
    }
    Ok(())
}

/// A cache of candle-nn beside a tensor that tracks gradients, and a pair of such caches for keys and values.
macro_rules! traced_cache {
    ($cache:ident, $pair:ident) => {
        #[doc = concat!("`candle_nn::kv_cache::", stringify!($cache), "`, differentiable; its other methods are candle-nn's.")]
        #[derive(Debug, Clone)]
        pub struct $cache {
            inner: candle_nn::kv_cache::$cache,
            /// The cached values as part of a graph; None while nothing has tracked a gradient.
            traced: Option<Tensor>,
        }

        impl $cache {
            /// Values are appended along `dim`, up to `max_seq_len` of them.
            pub fn new(dim: usize, max_seq_len: usize) -> Self {
                Self {
                    inner: candle_nn::kv_cache::$cache::new(dim, max_seq_len),
                    traced: None,
                }
            }

            /// The cached values, in the order of candle-nn's buffer.
            ///
            /// # Errors
            /// If a tensor operation fails.
            pub fn current_data(&self) -> Result<Option<Tensor>> {
                match &self.traced {
                    Some(traced) => Ok(Some(traced.clone())),
                    None => self.inner.current_data(),
                }
            }

            /// Empties the cache.
            pub fn reset(&mut self) {
                self.inner.reset();
                self.traced = None;
            }
        }

        impl std::ops::Deref for $cache {
            type Target = candle_nn::kv_cache::$cache;

            fn deref(&self) -> &Self::Target {
                &self.inner
            }
        }

        #[doc = concat!("`candle_nn::kv_cache::", stringify!($pair), "`, differentiable.")]
        #[derive(Debug, Clone)]
        pub struct $pair {
            k: $cache,
            v: $cache,
        }

        impl $pair {
            /// Keys and values are appended along `dim`.
            pub fn new(dim: usize, max_seq_len: usize) -> Self {
                Self {
                    k: $cache::new(dim, max_seq_len),
                    v: $cache::new(dim, max_seq_len),
                }
            }

            /// The cache of the keys.
            pub fn k_cache(&self) -> &$cache {
                &self.k
            }

            /// The cache of the values.
            pub fn v_cache(&self) -> &$cache {
                &self.v
            }

            /// The cache of the keys.
            pub fn k_cache_mut(&mut self) -> &mut $cache {
                &mut self.k
            }

            /// The cache of the values.
            pub fn v_cache_mut(&mut self) -> &mut $cache {
                &mut self.v
            }

            /// The cached keys.
            ///
            /// # Errors
            /// If a tensor operation fails.
            pub fn k(&self) -> Result<Option<Tensor>> {
                self.k.current_data()
            }

            /// The cached values.
            ///
            /// # Errors
            /// If a tensor operation fails.
            pub fn v(&self) -> Result<Option<Tensor>> {
                self.v.current_data()
            }

            /// How many positions were appended.
            pub fn current_seq_len(&self) -> usize {
                self.k.current_seq_len()
            }

            /// Empties the cache.
            pub fn reset(&mut self) {
                self.k.reset();
                self.v.reset();
            }
        }
    };
}
use traced_cache;

traced_cache!(Cache, KvCache);

impl Cache {
    /// Appends `src`.
    ///
    /// # Errors
    /// If its shape does not fit the cache.
    pub fn append(&mut self, src: &Tensor) -> Result<()> {
        let traced = match self.traced.is_some() || src.track_op() {
            false => None,
            true => Some(match self.current_data()? {
                Some(before) => Tensor::cat(&[&before, src], self.dim())?,
                None => src.clone(),
            }),
        };
        self.inner.append(&src.detach())?;
        self.traced = traced;
        Ok(())
    }
}

impl KvCache {
    /// Appends keys and values. Returns all cached keys and values.
    ///
    /// # Errors
    /// If a shape or dtype does not fit the cache. Neither keys nor values are appended then.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        check_values(self.v.all_data(), (k, v), self.v.dim())?;
        self.k.append(k)?;
        self.v.append(v)?;
        // Neither cache is empty after an append.
        let (all_k, all_v) = (self.k.current_data()?, self.v.current_data()?);
        Ok((all_k.unwrap_or(k.clone()), all_v.unwrap_or(v.clone())))
    }
}
