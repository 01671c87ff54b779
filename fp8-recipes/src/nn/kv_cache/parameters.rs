//! Keys and values of earlier tokens are not parameters, so caches show none.

use super::{
    Cache, ConcatKvCache, InterleavedKvCache, KvCache, RotatingCache, RotatingKvCache,
    ScatteredCacheBuilder, ScatteredKvCache,
};
use crate::{Fp8Module, Visitor};

macro_rules! without_parameters {
    ($($type:ty),*) => {
        $(impl Fp8Module for $type {
            fn visit(&self, _: &mut dyn Visitor) {}
        })*
    };
}

without_parameters!(
    Cache,
    KvCache,
    RotatingCache,
    RotatingKvCache,
    ConcatKvCache,
    InterleavedKvCache,
    ScatteredKvCache,
    ScatteredCacheBuilder
);
