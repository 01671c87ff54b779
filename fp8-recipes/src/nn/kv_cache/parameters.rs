//! Cached keys and values are not parameters, so caches show none.

use super::{
    Cache, ConcatKvCache, InterleavedKvCache, KvCache, RotatingCache, RotatingKvCache,
    ScatteredCacheBuilder, ScatteredKvCache,
};
use crate::module::nothing;

nothing!(
    Cache,
    KvCache,
    RotatingCache,
    RotatingKvCache,
    ConcatKvCache,
    InterleavedKvCache,
    ScatteredKvCache,
    ScatteredCacheBuilder,
);
