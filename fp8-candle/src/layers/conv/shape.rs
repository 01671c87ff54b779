//! Padding, stride, dilation and groups of a convolution, and the sizes that follow from them.

use crate::base::data::window::Window;
use crate::base::error::conv::ConvError;

/// Padding, stride, dilation and groups of a convolution. Pairs are height, width; a one-dimensional convolution uses the
/// width's.
///
/// ```
/// use fp8_candle::conv::ConvShape;
///
/// let shape = ConvShape::new().with_padding([1, 1]).with_stride([2, 2]);
/// // A kernel of 3x3 on an image of 56x56.
/// assert_eq!(shape.output_size([56, 56], [3, 3])?, [28, 28]);
/// // Transposed, with what brings the size back.
/// let shape = shape.with_output_padding([1, 1]);
/// assert_eq!(shape.transposed_output_size([28, 28], [3, 3])?, [56, 56]);
/// # Ok::<(), fp8_candle::conv::ConvError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ConvShape {
    /// Zeros on each side of the input; values cut from each side of a transposed convolution's output.
    pub padding: [usize; 2],
    /// Values added at the end of a transposed convolution's output; 0 in the others.
    pub output_padding: [usize; 2],
    /// Distance between the positions of the kernel.
    pub stride: [usize; 2],
    /// Distance between the taps of the kernel.
    pub dilation: [usize; 2],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for ConvShape {
    fn default() -> Self {
        Self::new()
    }
}

const DIMS: [&str; 2] = ["height", "width"];

fn positive(sizes: &[(&'static str, usize)]) -> Result<(), ConvError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some(&(what, _)) => Err(ConvError::Zero { what }),
        None => Ok(()),
    }
}

/// Values in f32 that fill the addresses of a process, 2^47 bytes.
const MAX_VALUES: usize = 1 << 45;

/// The product, if memory could hold that many f32.
fn product(what: &'static str, sizes: &[usize]) -> Result<usize, ConvError> {
    let product = sizes
        .iter()
        .try_fold(1usize, |product, &size| product.checked_mul(size));
    product
        .filter(|&product| product <= MAX_VALUES)
        .ok_or_else(|| ConvError::TooLarge {
            what,
            sizes: sizes.to_vec(),
            limit: MAX_VALUES,
        })
}

impl ConvShape {
    /// No padding, stride 1, dilation 1, one group.
    pub fn new() -> Self {
        Self {
            padding: [0; 2],
            output_padding: [0; 2],
            stride: [1; 2],
            dilation: [1; 2],
            groups: 1,
        }
    }

    /// The same with another padding, height and width.
    pub fn with_padding(self, padding: [usize; 2]) -> Self {
        Self { padding, ..self }
    }

    /// The same with another padding of a transposed convolution's output, height and width.
    pub fn with_output_padding(self, output_padding: [usize; 2]) -> Self {
        Self {
            output_padding,
            ..self
        }
    }

    /// The same with another stride, height and width.
    pub fn with_stride(self, stride: [usize; 2]) -> Self {
        Self { stride, ..self }
    }

    /// The same with another dilation, height and width.
    pub fn with_dilation(self, dilation: [usize; 2]) -> Self {
        Self { dilation, ..self }
    }

    /// The same with another number of groups.
    pub fn with_groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// The same padding, stride and dilation along height and width, without output padding.
    pub fn square(padding: usize, stride: usize, dilation: usize, groups: usize) -> Self {
        Self {
            padding: [padding; 2],
            output_padding: [0; 2],
            stride: [stride; 2],
            dilation: [dilation; 2],
            groups,
        }
    }

    /// The same along the width, and nothing along a height of 1.
    pub fn along_width(self) -> Self {
        Self {
            padding: [0, self.padding[1]],
            output_padding: [0, self.output_padding[1]],
            stride: [1, self.stride[1]],
            dilation: [1, self.dilation[1]],
            groups: self.groups,
        }
    }

    fn check(&self) -> Result<(), ConvError> {
        positive(&[
            ("the stride along the height", self.stride[0]),
            ("the stride along the width", self.stride[1]),
            ("the dilation along the height", self.dilation[0]),
            ("the dilation along the width", self.dilation[1]),
            ("the number of groups", self.groups),
        ])
    }

    /// From the first to the last tap of a kernel.
    fn span(&self, dim: usize, kernel: usize) -> Result<usize, ConvError> {
        positive(&[("a size of the kernel", kernel)])?;
        let span = (kernel - 1).checked_mul(self.dilation[dim]);
        let span = span.and_then(|span| span.checked_add(1));
        span.ok_or(ConvError::Overflow {
            what: "the dilated kernel",
        })
    }

    /// Height and width of the output for inputs of `image` and a kernel of `kernel`:
    /// `(image + 2 padding - dilation (kernel - 1) - 1) / stride + 1`.
    ///
    /// # Errors
    /// If a size is 0 or overflows, or the kernel is larger than the padded input.
    pub fn output_size(
        &self,
        image: [usize; 2],
        kernel: [usize; 2],
    ) -> Result<[usize; 2], ConvError> {
        self.check()?;
        if self.output_padding != [0; 2] {
            return Err(ConvError::OutputPadding(self.output_padding));
        }
        let mut output = [0; 2];
        for (dim, output) in output.iter_mut().enumerate() {
            let (size, padding) = (image[dim], self.padding[dim]);
            positive(&[("a size of the input", size)])?;
            let span = self.span(dim, kernel[dim])?;
            let padded = padding
                .checked_mul(2)
                .and_then(|both| both.checked_add(size));
            let padded = padded.ok_or(ConvError::Overflow {
                what: "the padded input",
            })?;
            let Some(rest) = padded.checked_sub(span) else {
                return Err(ConvError::Kernel {
                    dim: DIMS[dim],
                    kernel: kernel[dim],
                    dilation: self.dilation[dim],
                    span,
                    size,
                    padding,
                });
            };
            *output = rest / self.stride[dim] + 1;
        }
        Ok(output)
    }

    /// Height and width of a transposed convolution's output:
    /// `(image - 1) stride + dilation (kernel - 1) + 1 + output_padding - 2 padding`.
    ///
    /// # Errors
    /// If a size is 0 or overflows, or nothing is left.
    pub fn transposed_output_size(
        &self,
        image: [usize; 2],
        kernel: [usize; 2],
    ) -> Result<[usize; 2], ConvError> {
        self.check()?;
        let mut output = [0; 2];
        for (dim, output) in output.iter_mut().enumerate() {
            positive(&[("a size of the input", image[dim])])?;
            let span = self.span(dim, kernel[dim])?;
            let full = (image[dim] - 1).checked_mul(self.stride[dim]);
            let full = full
                .and_then(|full| full.checked_add(span))
                .and_then(|full| full.checked_add(self.output_padding[dim]));
            let full = full.ok_or(ConvError::Overflow { what: "the output" })?;
            let padding = self.padding[dim];
            let rest = padding.checked_mul(2).and_then(|cut| full.checked_sub(cut));
            let Some(rest) = rest.filter(|&rest| rest > 0) else {
                return Err(ConvError::Padding {
                    dim: DIMS[dim],
                    padding,
                    full,
                });
            };
            *output = rest;
        }
        Ok(output)
    }

    fn check_groups(&self, what: &'static str, channels: usize) -> Result<(), ConvError> {
        positive(&[(what, channels)])?;
        if !channels.is_multiple_of(self.groups) {
            return Err(ConvError::Groups {
                groups: self.groups,
                what,
                channels,
            });
        }
        Ok(())
    }

    fn channels(&self, got: usize, expected: usize) -> Result<(), ConvError> {
        if got != expected {
            return Err(ConvError::Channels {
                got,
                expected,
                groups: self.groups,
            });
        }
        Ok(())
    }

    /// The window over inputs `[batch, channels, height, width]` for a weight `[out, channels / groups, height, width]`.
    pub(crate) fn window(&self, x: [usize; 4], weight: [usize; 4]) -> Result<Window, ConvError> {
        let ([batch, channels, height, width], [n, per_group, kh, kw]) = (x, weight);
        let positions = self.output_size([height, width], [kh, kw])?;
        self.check_groups("output channels", n)?;
        positive(&[("the number of input channels", per_group)])?;
        let expected = product("the input channels", &[per_group, self.groups])?;
        self.channels(channels, expected)?;
        let window = self.slide([batch, channels, height, width], [kh, kw], positions);
        Self::check_sizes(&window, n)?;
        Ok(window)
    }

    /// The window over **outputs** of a transposed convolution of inputs `[batch, n, height, width]` with a weight
    /// `[n, channels / groups, height, width]`. Its positions are the elements of the input.
    pub(crate) fn transposed_window(
        &self,
        x: [usize; 4],
        weight: [usize; 4],
    ) -> Result<Window, ConvError> {
        let ([batch, channels, height, width], [n, per_group, kh, kw]) = (x, weight);
        let image = self.transposed_output_size([height, width], [kh, kw])?;
        self.check_groups("input channels", n)?;
        positive(&[("the number of output channels", per_group)])?;
        self.channels(channels, n)?;
        let out = product("the output channels", &[per_group, self.groups])?;
        let window = self.slide([batch, out, image[0], image[1]], [kh, kw], [height, width]);
        Self::check_sizes(&window, n)?;
        Ok(window)
    }

    fn slide(&self, image: [usize; 4], kernel: [usize; 2], positions: [usize; 2]) -> Window {
        let [batch, channels, height, width] = image;
        Window {
            batch,
            channels,
            image: [height, width],
            kernel,
            stride: self.stride,
            dilation: self.dilation,
            padding: self.padding,
            positions,
        }
    }

    /// `n`: channels on the side of the positions.
    fn check_sizes(window: &Window, n: usize) -> Result<(), ConvError> {
        let ([h, w], [kh, kw], [oh, ow]) = (window.image, window.kernel, window.positions);
        let Window {
            batch, channels, ..
        } = *window;
        product("the input", &[batch, channels, h, w])?;
        product("the output", &[batch, n, oh, ow])?;
        // The columns of one image; the batch is cut into parts.
        product("the unfolded input", &[channels, kh, kw, oh, ow])?;
        Ok(())
    }
}
