//! What model families are built from: rotary positions, attention with a mask, caches of keys and values.

mod file_has;
mod kv_cache;
mod layer_cache;
mod masked;
mod pool;
mod projection;
mod rope;
mod rope_entries;
mod token_ids;

pub(crate) use file_has::file_has;
pub use kv_cache::KvCache;
pub(crate) use kv_cache::{KvSizes, Rows};
pub use layer_cache::KvScales;
pub(crate) use layer_cache::LayerCache;
pub(crate) use masked::masked_attention;
pub(crate) use pool::in_pool;
pub(crate) use projection::{Change, DropoutSeed, Projection, Tap};
pub use rope::{RopeConfig, RopeScaling};
pub(crate) use rope_entries::{RopeDefaults, read_rope};
pub(crate) use token_ids::token_rows;
