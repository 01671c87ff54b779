//! Invalid sizes of convolutions.

/// Sizes that do not make a convolution.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvError {
    /// A size that must be at least 1 is 0.
    #[error("{what} is 0")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// The groups do not divide the channels.
    #[error("{groups} groups do not divide {channels} {what}")]
    Groups {
        /// Number of groups.
        groups: usize,
        /// Which channels.
        what: &'static str,
        /// Their number.
        channels: usize,
    },
    /// The input does not have the channels that the weight is for.
    #[error("an input of {got} channels, expected {expected}: {groups} groups of {}", expected / groups)]
    Channels {
        /// Channels of the input.
        got: usize,
        /// Channels that the weight is for.
        expected: usize,
        /// Number of groups.
        groups: usize,
    },
    /// The kernel is larger than the padded input.
    #[error(
        "a kernel of {kernel} with dilation {dilation} spans {span} along the {dim}, more than the padded input: \
         {size} + 2 x {padding}"
    )]
    Kernel {
        /// `height` or `width`.
        dim: &'static str,
        /// Taps of the kernel.
        kernel: usize,
        /// Distance between taps.
        dilation: usize,
        /// From the first to the last tap.
        span: usize,
        /// Size of the input.
        size: usize,
        /// Zeros on each side.
        padding: usize,
    },
    /// The padding of a transposed convolution cuts all values.
    #[error("a padding of {padding} cuts all of the {full} values along the {dim}")]
    Padding {
        /// `height` or `width`.
        dim: &'static str,
        /// Values cut on each side.
        padding: usize,
        /// Values before the cut.
        full: usize,
    },
    /// Only transposed convolutions have an output padding.
    #[error("an output padding of {0:?} for a convolution that is not transposed")]
    OutputPadding([usize; 2]),
    /// A size does not fit into a `usize`.
    #[error("the size of {what} overflows")]
    Overflow {
        /// Which size.
        what: &'static str,
    },
    /// A result has more values than any memory could hold.
    #[error("{what} would have {sizes:?} values, more than the {limit} that memory could hold")]
    TooLarge {
        /// Which result.
        what: &'static str,
        /// Its sizes.
        sizes: Vec<usize>,
        /// How many values in f32 it may have.
        limit: usize,
    },
}
