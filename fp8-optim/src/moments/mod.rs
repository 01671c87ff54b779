//! How an optimizer keeps the moments of variables: in f32, or as FP8 codes with a scale for each block.

mod blocks;
mod coded;
mod curve;
mod kept;
mod storage;

pub(super) use blocks::{BLOCK, Coding, decode, encode};
pub(super) use coded::Coded;
pub(super) use kept::{Kept, coding};
pub use storage::{Fp8Moments, MomentStorage};
