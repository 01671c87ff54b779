//! Unfolding images into columns and folding them back, which convolutions need; composed of candle's operations for devices
//! without kernels for it.

use crate::base::data::storage::owned_storage;
use crate::base::data::window::{Part, Window};
use crate::base::error::{Result, shape_error};
use candle_core::{DType, Device, Storage, Tensor};

/// Unfolds and folds images.
pub(crate) trait Unfolding: Send + Sync {
    /// The columns of a part of `x`, which is `[batch, channels, height, width]` of U8, f32, bf16 or f16:
    /// `[channels * taps, images * places]`, with zeros where the window is outside of the image.
    fn unfold(&self, x: &Tensor, window: &Window, part: &Part) -> Result<Tensor>;

    /// Images of zeros, `[batch, channels, height, width]` of f32, bf16 or f16, to fold parts into.
    fn images(&self, window: &Window, dtype: DType, device: &Device) -> Result<Box<dyn Images>>;
}

/// Images that columns are folded into.
pub(crate) trait Images {
    /// Sets a part to the sums of the columns (f32, `[channels * taps, images * places]`) over the taps that read an
    /// element: added in f32 in the order of the taps, then rounded. The bias (one value per channel of the images) is added in
    /// the dtype of the images.
    fn fold(
        &mut self,
        columns: &Tensor,
        window: &Window,
        part: &Part,
        bias: Option<&Tensor>,
    ) -> Result<()>;

    /// The images.
    fn finish(self: Box<Self>) -> Result<Storage>;
}

/// Both, composed of candle's operations: for every device.
pub(crate) struct Composed;

impl Unfolding for Composed {
    fn unfold(&self, x: &Tensor, window: &Window, part: &Part) -> Result<Tensor> {
        let (images, channels) = (part.images.len(), part.channels.len());
        let x = x
            .narrow(0, part.images.start, images)?
            .narrow(1, part.channels.start, channels)?;
        let [height, width] = padded_size(window)?;
        let padded = pad(&x, window, [height, width])?;
        let [oh, ow] = window.positions;
        let [sh, sw] = strides(window);
        let taps = taps(window).map(|[y, x]| -> Result<Tensor> {
            let tap = padded
                .narrow(2, y * window.dilation[0], oh * sh)?
                .narrow(3, x * window.dilation[1], ow * sw)?
                .contiguous()?
                .reshape(vec![images, channels, oh, sh, ow, sw])?
                .narrow(3, 0, 1)?
                .narrow(5, 0, 1)?;
            Ok(tap
                .contiguous()?
                .reshape((images, channels, oh * ow))?
                .transpose(0, 1)?
                .contiguous()?
                .reshape((channels, 1, images * oh * ow))?)
        });
        let taps = taps.collect::<Result<Vec<_>>>()?;
        Ok(Tensor::cat(&taps, 1)?.reshape(window.columns(part))?)
    }

    fn images(&self, window: &Window, dtype: DType, device: &Device) -> Result<Box<dyn Images>> {
        let images = Tensor::zeros(window.dims().as_slice(), dtype, device)?;
        Ok(Box::new(ComposedImages { images }))
    }
}

fn taps(window: &Window) -> impl Iterator<Item = [usize; 2]> {
    let [height, width] = window.kernel;
    (0..height).flat_map(move |y| (0..width).map(move |x| [y, x]))
}

/// Zeros on each side so that every tap finds `positions * stride` elements.
fn pad(x: &Tensor, window: &Window, padded: [usize; 2]) -> Result<Tensor> {
    let mut x = x.clone();
    for (dim, padded) in padded.into_iter().enumerate() {
        let before = window.padding[dim];
        let after = padded - before - window.image[dim];
        x = x.pad_with_zeros(2 + dim, before, after)?;
    }
    Ok(x)
}

/// The distances between positions; 1 for a single position.
fn strides(window: &Window) -> [usize; 2] {
    [0, 1].map(|dim| match window.positions[dim] {
        1 => 1,
        _ => window.stride[dim],
    })
}

/// Height and width that hold what every tap reads at every position, and the image with the padding before it.
///
/// # Errors
/// If a size overflows.
fn padded_size(window: &Window) -> Result<[usize; 2]> {
    let strides = strides(window);
    let size = |dim: usize| {
        let reach = (window.kernel[dim] - 1).checked_mul(window.dilation[dim])?;
        let read = reach.checked_add(window.positions[dim].checked_mul(strides[dim])?)?;
        Some(read.max(window.image[dim].checked_add(window.padding[dim])?))
    };
    match (size(0), size(1)) {
        (Some(height), Some(width)) if height.checked_mul(width).is_some() => Ok([height, width]),
        _ => Err(shape_error(
            "unfold",
            "the images",
            format!(
                "an image that fits into memory with a padding of {:?} for a stride of {:?}",
                window.padding, window.stride
            ),
            window.dims(),
        )),
    }
}

struct ComposedImages {
    images: Tensor,
}

impl Images for ComposedImages {
    fn fold(
        &mut self,
        columns: &Tensor,
        window: &Window,
        part: &Part,
        bias: Option<&Tensor>,
    ) -> Result<()> {
        let (images, channels) = (part.images.len(), part.channels.len());
        let ([oh, ow], [sh, sw]) = (window.positions, strides(window));
        let columns = columns.to_dtype(DType::F32)?.contiguous()?.reshape((
            channels,
            window.taps(),
            images,
            oh * ow,
        ))?;
        let [height, width] = padded_size(window)?;
        let mut sum: Option<Tensor> = None;
        for (index, [y, x]) in taps(window).enumerate() {
            let (top, left) = (y * window.dilation[0], x * window.dilation[1]);
            let tap = columns
                .narrow(1, index, 1)?
                .contiguous()?
                .reshape(vec![channels, images, oh, 1, ow, 1])?
                .pad_with_zeros(3, 0, sh - 1)?
                .pad_with_zeros(5, 0, sw - 1)?
                .reshape((channels, images, oh * sh, ow * sw))?
                .pad_with_zeros(2, top, height - top - oh * sh)?
                .pad_with_zeros(3, left, width - left - ow * sw)?;
            sum = Some(match sum {
                None => tap,
                Some(sum) => (sum + tap)?,
            });
        }
        let Some(sum) = sum else { return Ok(()) };
        let mut part_images = sum
            .narrow(2, window.padding[0], window.image[0])?
            .narrow(3, window.padding[1], window.image[1])?
            .transpose(0, 1)?
            .to_dtype(self.images.dtype())?;
        if let Some(bias) = bias {
            let bias = bias
                .to_dtype(self.images.dtype())?
                .narrow(0, part.channels.start, channels)?
                .reshape((1, channels, 1, 1))?;
            part_images = part_images.broadcast_add(&bias)?;
        }
        // One image after the other: a part may have some of the channels only.
        for image in 0..images {
            let channel = (part.images.start + image) * window.channels + part.channels.start;
            let whole = self.images.flatten(0, 1)?;
            whole.slice_set(
                &part_images.narrow(0, image, 1)?.squeeze(0)?.contiguous()?,
                0,
                channel,
            )?;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Storage> {
        owned_storage(&self.images)
    }
}
