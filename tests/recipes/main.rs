//! Layers with their own recipes, block and microscaling recipes against other libraries, statistics of casts.

mod blocks;
mod mixed;
mod patterns;
mod stats;
mod stats_log;
