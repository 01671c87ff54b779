//! Sizes of a convolution, and the parts in which its products are computed.

use super::shape::ConvShape;
use crate::base::data::window::{Part, Window};
use crate::base::error::conv::ConvError;
use std::ops::Range;

/// Bytes of the columns and results of one part of a batch, if one image does not have more.
const PART_BYTES: usize = 8 << 20;

/// The least columns of a part, if there are enough.
const MIN_COLUMNS: usize = 128;

/// Sizes of a convolution: `images` `[batch, channels, ..]` that the window slides over, and `maps` `[batch, n, ..]` with
/// a value for each of its positions. The weight is `[n, channels / groups * taps]`.
#[derive(Debug, Clone)]
pub(super) struct Geometry {
    pub(super) window: Window,
    pub(super) n: usize,
    pub(super) groups: usize,
}

/// One group over one part of the batch.
pub(super) struct Step {
    /// Part of the images.
    pub(super) images: Part,
    /// Part of the maps, whose channels are also the rows of the weight.
    pub(super) maps: Part,
}

impl Geometry {
    /// Of a convolution of `x` with `weight`, or of a transposed one, whose output is the images.
    pub(super) fn new(
        x: [usize; 4],
        weight: [usize; 4],
        shape: &ConvShape,
        transposed: bool,
    ) -> Result<Self, ConvError> {
        let window = match transposed {
            false => shape.window(x, weight)?,
            true => shape.transposed_window(x, weight)?,
        };
        Ok(Self {
            window,
            n: weight[0],
            groups: shape.groups,
        })
    }

    /// The maps, seen as images.
    pub(super) fn maps(&self) -> Window {
        Window::single(self.window.batch, self.n, self.window.positions)
    }

    fn columns_per_group(&self) -> usize {
        self.window.channels / self.groups * self.window.taps()
    }

    /// `[n, columns of a group]`.
    pub(super) fn weight_dims(&self) -> [usize; 2] {
        [self.n, self.columns_per_group()]
    }

    /// The parts of the batch for products that need these bytes per position, and parts that end at multiples of `block`
    /// positions; `None`: one part.
    pub(super) fn batches(
        &self,
        bytes: usize,
        block: Option<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let (batch, places) = (self.window.batch, self.window.places());
        let image = places.saturating_mul(bytes).max(1);
        let images = (PART_BYTES / image).max(1);
        let images = match block {
            None => batch.max(1),
            Some(block) => images.next_multiple_of(step_of(block, places)),
        };
        (0..batch)
            .step_by(images)
            .map(move |first| first..batch.min(first.saturating_add(images)))
    }

    /// The parts of a group's channels whose columns over the whole batch need these bytes per position, and that end at
    /// multiples of `block` columns; `None`: one part.
    pub(super) fn channel_parts(
        &self,
        bytes: usize,
        block: Option<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let (channels, taps) = (self.window.channels / self.groups, self.window.taps());
        let column = (self.window.places() * self.window.batch).saturating_mul(bytes);
        // Products of fewer columns would read the other operand too often.
        let columns = (PART_BYTES / column.max(1)).max(MIN_COLUMNS);
        let part = match block {
            None => channels,
            Some(block) => columns
                .div_ceil(taps)
                .next_multiple_of(step_of(block, taps)),
        };
        (0..channels)
            .step_by(part)
            .map(move |first| first..channels.min(first.saturating_add(part)))
    }

    pub(super) fn step(&self, group: usize, batch: Range<usize>) -> Step {
        let part = |channels: usize| {
            let per_group = channels / self.groups;
            Part {
                images: batch.clone(),
                channels: group * per_group..(group + 1) * per_group,
            }
        };
        Step {
            images: part(self.window.channels),
            maps: part(self.n),
        }
    }
}

/// How many pieces of `len` make a multiple of `block`.
fn step_of(block: usize, len: usize) -> usize {
    let (mut a, mut b) = (block, len);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    block / a.max(1)
}
