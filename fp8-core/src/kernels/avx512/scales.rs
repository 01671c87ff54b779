//! Scales of short segments.

use std::arch::x86_64::*;

use super::{BLOCK, Block, LANES, VECTORS};

/// The scales of block after block, where each scale covers whole vectors and short segments share a block.
pub(super) struct VectorScales<'a> {
    scales: &'a [f32],
    /// Elements per scale, and how many the first one has left.
    len: usize,
    left: usize,
}

impl<'a> VectorScales<'a> {
    /// Whether this is the best way to handle segments of this length.
    pub(super) fn are_for(len: usize) -> bool {
        len.is_multiple_of(LANES) && !len.is_multiple_of(BLOCK) && len < 8 * BLOCK
    }

    pub(super) fn new(scales: &'a [f32], len: usize) -> Self {
        Self {
            scales,
            len,
            left: len,
        }
    }

    /// The scales of the next block, 0 past the last.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn next(&mut self) -> Block {
        let mut block = [_mm512_setzero_ps(); VECTORS];
        for vector in &mut block {
            let Some((&scale, others)) = self.scales.split_first() else {
                break;
            };
            *vector = _mm512_set1_ps(scale);
            self.left -= LANES;
            if self.left == 0 {
                (self.scales, self.left) = (others, self.len);
            }
        }
        block
    }
}
