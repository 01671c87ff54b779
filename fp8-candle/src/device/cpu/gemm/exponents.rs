//! Scales that are powers of two, applied while an operand is packed. Adding to exponents is exact, so a sum whose scales change
//! along the way, as those of MX do, needs no break.
//!
//! The largest scale of each kept index is left for the end of its sums.

use super::layout::{DEPTH, PANEL};
use super::scales::Scales;
use super::side::{Elements, Side};
use crate::base::parallel::shared::Shared;
use crate::base::parallel::tasks;
use crate::base::simd::simd;
use fp8_core::Contraction;
use std::ops::Range;

/// How far below the largest scale of its kept index a scale may be, as a power of two. FP8 values are multiples of 2^-17, so
/// products and their sums remain multiples of 2^-126: none is subnormal, which the bf16 units would take as zero.
const LEAST: i32 = -46;

/// Segments from which a second thread pays off.
const PARALLEL_SEGMENTS: usize = 1 << 14;

/// What is added to the exponents of an operand.
pub(super) struct Exponents {
    /// `[blocks of PANEL kept indices][segments][PANEL]`, added to the bits of values in bf16.
    added: Vec<u16>,
    /// Number of segments.
    segments: usize,
    /// The scale left for the end of the sums of each kept index.
    left: Vec<f32>,
    /// Kept indices whose scales are not finite powers of two, or too far apart.
    refused: Vec<usize>,
}

/// The bits of a value in bf16 with `added` to them; zero, infinity and NaN as they are.
#[inline(always)]
pub(super) fn with_added(bits: u16, added: u16) -> u16 {
    let finite = (bits & 0x7FFF).wrapping_sub(1) < 0x7F7F;
    bits.wrapping_add(if finite { added } else { 0 })
}

impl Exponents {
    /// Of an operand whose scales change after every [`DEPTH`] elements of the sum and, as far as is known, are powers of two; else
    /// None.
    pub(super) fn new(side: &Side<'_>) -> Option<Self> {
        if !(side.powers_of_two && side.segment() == Some(DEPTH)) {
            return None;
        }
        let (kept, segments) = (side.kept(), side.contracted().div_ceil(DEPTH));
        let mut left = vec![1.; kept.next_multiple_of(PANEL)];
        let mut added = vec![0; left.len() * segments];
        let block = |index: usize, added: &mut [u16], left: &mut [f32]| {
            let first = index * PANEL;
            let mut bits = vec![[1f32.to_bits(); PANEL]; segments];
            side.scale_bits(first, &mut bits);
            let plain = add_all(&bits, added, left);
            let mut refused = Vec::new();
            for col in (0..PANEL.min(kept - first)).filter(|&col| !plain[col]) {
                let added = added.iter_mut().skip(col).step_by(PANEL);
                match add_checked(side, first + col, &bits, added) {
                    Some(scale) => left[col] = scale,
                    None => refused.push(first + col),
                }
            }
            refused
        };
        let blocks = left.len() / PANEL;
        let mut refused = vec![Vec::new(); blocks];
        let (to_added, to_left, to_refused) = (
            Shared::new(&mut added),
            Shared::new(&mut left),
            Shared::new(&mut refused),
        );
        let task = |index: usize| {
            let added = index * PANEL * segments..(index + 1) * PANEL * segments;
            // SAFETY: each task has its own block of kept indices.
            unsafe {
                to_refused.part(index..index + 1)[0] = block(
                    index,
                    to_added.part(added),
                    to_left.part(index * PANEL..(index + 1) * PANEL),
                );
            }
        };
        if kept * segments >= PARALLEL_SEGMENTS {
            tasks::for_each(blocks, task);
        } else {
            (0..blocks).for_each(task);
        }
        Some(Self {
            added,
            segments,
            left,
            refused: refused.concat(),
        })
    }

    /// The scales left for the end.
    pub(super) fn scales(&self) -> Scales {
        Scales::Each(self.left.clone())
    }

    /// Kept indices whose results are not those of the product: its values have the wrong scales.
    pub(super) fn refused(&self) -> &[usize] {
        &self.refused
    }

    fn added(&self, segment: usize, kept: usize) -> u16 {
        self.added[(kept / PANEL * self.segments + segment) * PANEL + kept % PANEL]
    }

    /// What is added for the columns of a panel, segment by segment, over `range` of the sum.
    pub(super) fn of_panel(&self, panel: usize, range: Range<usize>) -> &[u16] {
        let first = panel * self.segments;
        &self.added[(first + range.start / DEPTH) * PANEL..(first + range.end / DEPTH) * PANEL]
    }

    /// Scales packed values of kept indices `kept`, which are `[sum / 2][kept][2]`, from index `start` of the sum on: the first one of
    /// a segment.
    pub(super) fn apply(&self, kept: Range<usize>, start: usize, values: &mut [u16]) {
        let first = start / DEPTH;
        if kept.len() == 1 {
            let (segments, _) = values.as_chunks_mut::<DEPTH>();
            return simd(
                #[inline(always)]
                || {
                    for (index, values) in segments.iter_mut().enumerate() {
                        let added = self.added(first + index, kept.start);
                        for value in values {
                            *value = with_added(*value, added);
                        }
                    }
                },
            );
        }
        let mut pattern = [0; PATTERN];
        for (index, values) in values.chunks_mut(DEPTH * kept.len()).enumerate() {
            for (kept, to) in kept.clone().zip(pattern.chunks_exact_mut(2)) {
                to.fill(self.added(first + index, kept));
            }
            let pattern = repeated(&mut pattern, 2 * kept.len());
            simd(
                #[inline(always)]
                move || {
                    for values in values.chunks_mut(pattern.len()) {
                        for (value, &added) in values.iter_mut().zip(pattern) {
                            *value = with_added(*value, added);
                        }
                    }
                },
            );
        }
    }
}

/// The longest pattern: of 11 rows, in vectors of 32.
const PATTERN: usize = 352;

/// The first `once` elements of `pattern` repeated until they fill whole vectors.
fn repeated(pattern: &mut [u16; PATTERN], once: usize) -> &[u16] {
    const VECTOR: usize = 32;
    let power_of_two = once & once.wrapping_neg();
    let all = once * (VECTOR / power_of_two.min(VECTOR));
    let mut done = once;
    while done < all {
        let more = done.min(all - done);
        pattern.copy_within(..more, done);
        done += more;
    }
    &pattern[..all]
}

/// What is added for scales, given as bits, of each segment, and which scales are left; false where [`add_checked`] must look.
fn add_all(bits: &[[u32; PANEL]], added: &mut [u16], left: &mut [f32]) -> [bool; PANEL] {
    let mut most = [0; PANEL];
    let mut plain = [true; PANEL];
    simd(
        #[inline(always)]
        || {
            for bits in bits {
                for col in 0..PANEL {
                    most[col] = most[col].max(bits[col] >> 23);
                }
            }
            for (bits, added) in bits.iter().zip(added.chunks_exact_mut(PANEL)) {
                for col in 0..PANEL {
                    let below = (bits[col] >> 23) as i32 - most[col] as i32;
                    plain[col] &= is_normal(bits[col]) & (below >= LEAST);
                    added[col] = (below << 7) as u16;
                }
            }
            for col in 0..PANEL {
                left[col] = f32::from_bits(most[col] << 23);
            }
        },
    );
    plain
}

/// Whether these are the bits of a power of two that is a normal number.
#[inline(always)]
fn is_normal(bits: u32) -> bool {
    (bits & 0x807F_FFFF == 0) & (bits.wrapping_sub(1) < 0x7F7F_FFFF)
}

/// [`add_all`] for one kept index with any scales; that of a segment of zeros does not matter. None if a scale is not a power of two, or
/// too far below another.
fn add_checked<'a>(
    side: &Side<'_>,
    kept: usize,
    bits: &[[u32; PANEL]],
    added: impl Iterator<Item = &'a mut u16>,
) -> Option<f32> {
    /// 2^-127, the least scale of E8M0.
    const MIN: u32 = 0x0040_0000;
    let bits = || bits.iter().map(|bits| bits[kept % PANEL]);
    if !bits().all(|bits| is_normal(bits) || bits == MIN) {
        return None;
    }
    let most = bits().max().unwrap_or(MIN);
    for ((segment, bits), added) in bits().enumerate().zip(added) {
        let below = (bits >> 23) as i32 - (most >> 23) as i32;
        *added = 0;
        if below >= LEAST {
            *added = (below << 7) as u16;
        } else if !is_zero(side, kept, segment) {
            return None;
        }
    }
    let zero = || (0..bits().count()).all(|segment| is_zero(side, kept, segment));
    Some(if most == MIN && zero() {
        1.
    } else {
        f32::from_bits(most)
    })
}

/// Whether all codes of a segment are zero.
fn is_zero(side: &Side<'_>, kept: usize, segment: usize) -> bool {
    let mut range = segment * DEPTH..side.contracted().min((segment + 1) * DEPTH);
    range.all(|index| {
        let code = match side.elements {
            Elements::Codes(codes) => match side.contraction {
                Contraction::Cols => codes[kept * side.contracted() + index],
                Contraction::Rows => codes[index * side.kept() + kept],
            },
            Elements::Panels(order, codes) => codes[order.position(side.contracted(), kept, index)],
            Elements::Bf16(_) => return false,
        };
        side.format.decode(code) == 0.
    })
}
