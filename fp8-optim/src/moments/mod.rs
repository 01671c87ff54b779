//! How an optimizer keeps the moments of variables: in f32, or as FP8 codes with a scale for each block.

mod coded;
mod coding;
mod kept;
mod storage;

pub(super) use coded::Coded;
pub(super) use coding::{BLOCK, Coding, DRAWN, Draw, Random};
pub(super) use kept::{Kept, coding};
pub use storage::{Fp8Moments, MomentStorage};
