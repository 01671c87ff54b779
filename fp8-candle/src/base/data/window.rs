//! How a window slides over images: the geometry that unfolding and folding share.

use std::ops::Range;

/// A window of `kernel` taps at `positions` places of images `[batch, channels, height, width]`. Pairs are height, width.
///
/// At the position `p` the tap `t` reads `p * stride + t * dilation - padding`; outside of the image there are zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) image: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) dilation: [usize; 2],
    pub(crate) padding: [usize; 2],
    pub(crate) positions: [usize; 2],
}

/// Some images and some of their channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) images: Range<usize>,
    pub(crate) channels: Range<usize>,
}

impl Window {
    /// The window of one tap that reads every element once.
    pub(crate) fn single(batch: usize, channels: usize, image: [usize; 2]) -> Self {
        Self {
            batch,
            channels,
            image,
            kernel: [1; 2],
            stride: [1; 2],
            dilation: [1; 2],
            padding: [0; 2],
            positions: image,
        }
    }

    /// Whether unfolding moves no element within its image.
    pub(crate) fn is_single(&self) -> bool {
        *self == Self::single(self.batch, self.channels, self.image)
    }

    /// `[batch, channels, height, width]`.
    pub(crate) fn dims(&self) -> [usize; 4] {
        [self.batch, self.channels, self.image[0], self.image[1]]
    }

    /// Elements of one channel of one image.
    pub(crate) fn plane(&self) -> usize {
        self.image[0] * self.image[1]
    }

    /// Taps of the kernel.
    pub(crate) fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Positions in one image.
    pub(crate) fn places(&self) -> usize {
        self.positions[0] * self.positions[1]
    }

    /// `[channels * taps, images * places]` of a part.
    pub(crate) fn columns(&self, part: &Part) -> (usize, usize) {
        (
            part.channels.len() * self.taps(),
            part.images.len() * self.places(),
        )
    }

    /// What `tap` reads at `position` along dimension 0 (height) or 1 (width); `None` outside of the image. The definition that
    /// the loops of devices are tested against.
    #[cfg(test)]
    pub(crate) fn source(&self, dim: usize, position: usize, tap: usize) -> Option<usize> {
        let at = position * self.stride[dim] + tap * self.dilation[dim];
        at.checked_sub(self.padding[dim])
            .filter(|&at| at < self.image[dim])
    }

    /// The positions at which `tap` lies within the image, along dimension 0 or 1.
    pub(crate) fn inside(&self, dim: usize, tap: usize) -> Range<usize> {
        let (offset, padding) = (tap * self.dilation[dim], self.padding[dim]);
        let first = padding.saturating_sub(offset).div_ceil(self.stride[dim]);
        let end = (self.image[dim] + padding).saturating_sub(offset);
        let end = end.div_ceil(self.stride[dim]).min(self.positions[dim]);
        first.min(end)..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_inside_is_where_there_is_a_source() {
        let mut cases = 0;
        for image in 1..6 {
            for (stride, dilation, padding) in (0..27).map(|i| (i % 3 + 1, i / 3 % 3 + 1, i / 9)) {
                for (tap, positions) in (0..20).map(|i| (i % 4, i / 4 + 1)) {
                    let window = Window {
                        image: [image; 2],
                        kernel: [4; 2],
                        stride: [stride; 2],
                        dilation: [dilation; 2],
                        padding: [padding; 2],
                        positions: [positions; 2],
                        ..Window::single(1, 1, [image; 2])
                    };
                    let inside = window.inside(1, tap);
                    for position in 0..positions {
                        let source = window.source(1, position, tap);
                        assert_eq!(
                            source.is_some(),
                            inside.contains(&position),
                            "{window:?} {tap} {position}"
                        );
                        cases += 1;
                    }
                }
            }
        }
        assert!(cases > 5000);
    }
}
