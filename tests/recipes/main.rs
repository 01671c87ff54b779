//! Recipes of their own for some layers, block and microscaling recipes against their peers, statistics of casts.

mod blocks;
mod mixed;
mod patterns;
mod stats;
mod stats_log;
