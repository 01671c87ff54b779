//! Attention of a few new tokens over a cache of keys and values, which may be FP8 codes.

mod batch;
mod each;
mod tokens;

pub use batch::cached_attention;
pub use each::{CachedSequence, cached_attention_each};
pub use tokens::CachedTokens;
