//! The three products over an unfolded image, part by part of the batch and group by group.

use super::operand::{Values, multiply};
use crate::data::window::{Part, Window};
use crate::device::unfolding;
use crate::error::Result;
use candle_core::{DType, Storage, Tensor};
use fp8_core::Contraction::{Cols, Rows};
use std::ops::Range;

/// Bytes of the columns and results of one part of a batch, if one image does not have more.
const PART_BYTES: usize = 8 << 20;

/// Sizes of a convolution: `images` `[batch, channels, ..]` that the window slides over, and `maps` `[batch, n, ..]` with
/// a value for each of its positions. The weight is `[n, channels / groups * taps]`.
#[derive(Debug, Clone)]
pub(super) struct Geometry {
    pub(super) window: Window,
    pub(super) n: usize,
    pub(super) groups: usize,
}

/// One group over one part of the batch.
struct Step {
    /// Part of the images.
    images: Part,
    /// Part of the maps, whose channels are also the rows of the weight.
    maps: Part,
}

impl Geometry {
    /// The maps as images of their own.
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

    /// The parts of the batch for products that need these bytes per position.
    fn batches(&self, bytes: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let batch = self.window.batch;
        let image = self.window.places().saturating_mul(bytes).max(1);
        let images = (PART_BYTES / image).max(1);
        (0..batch)
            .step_by(images)
            .map(move |first| first..batch.min(first + images))
    }

    fn step(&self, group: usize, batch: Range<usize>) -> Step {
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

    /// The rows of the weight that belong to a group.
    fn weight_of(&self, weight: &Values, group: usize) -> Result<Values> {
        let rows = self.n / self.groups;
        weight.with(weight.elements().narrow(0, group * rows, rows)?)
    }
}

/// A part of `x`, unfolded.
fn columns(x: &Values, window: &Window, part: &Part) -> Result<Values> {
    let elements = x.elements();
    if window.is_single() && part.images.len() == 1 {
        let image = elements.narrow(0, part.images.start, 1)?;
        let image = image.narrow(1, part.channels.start, part.channels.len())?;
        return x.with(image.contiguous()?.reshape(window.columns(part))?);
    }
    x.with(unfolding(elements.device()).unfold(elements, window, part)?)
}

/// The maps of `images`: `weight columns`, with a bias, in `dtype`.
pub(super) fn gather(
    geometry: &Geometry,
    images: &Values,
    weight: &Values,
    bias: Option<&Tensor>,
    dtype: DType,
    use_fast_accum: bool,
) -> Result<Storage> {
    let device = images.elements().device();
    let maps = geometry.maps();
    let mut out = unfolding(device).images(&maps, dtype, device)?;
    let [n, k] = geometry.weight_dims();
    let bytes = k * images.elements().dtype().size_in_bytes() + n / geometry.groups * 4;
    for group in 0..geometry.groups {
        let weight = geometry.weight_of(weight, group)?;
        for batch in geometry.batches(bytes) {
            let step = geometry.step(group, batch);
            let columns = columns(images, &geometry.window, &step.images)?;
            let rows = multiply((&weight, Cols), (&columns, Rows), use_fast_accum)?;
            out.fold(&rows, &maps, &step.maps, bias)?;
        }
    }
    out.finish()
}

/// The images whose columns are `weight^T maps`, with a bias, in `dtype`.
pub(super) fn spread(
    geometry: &Geometry,
    maps: &Values,
    weight: &Values,
    bias: Option<&Tensor>,
    dtype: DType,
    use_fast_accum: bool,
) -> Result<Storage> {
    let device = maps.elements().device();
    let window = &geometry.window;
    let mut out = unfolding(device).images(window, dtype, device)?;
    let [_, k] = geometry.weight_dims();
    for group in 0..geometry.groups {
        let weight = geometry.weight_of(weight, group)?;
        for batch in geometry.batches(4 * k) {
            let step = geometry.step(group, batch);
            let rows = columns(maps, &geometry.maps(), &step.maps)?;
            let columns = multiply((&weight, Rows), (&rows, Rows), use_fast_accum)?;
            out.fold(&columns, window, &step.images, bias)?;
        }
    }
    out.finish()
}

/// The gradient of the weight, `maps columns^T`, f32 `[n, columns of a group]`: parts of the batch are added in order.
pub(super) fn weigh(
    geometry: &Geometry,
    maps: &Values,
    images: &Values,
    use_fast_accum: bool,
) -> Result<Tensor> {
    let [n, k] = geometry.weight_dims();
    let bytes = (k + n / geometry.groups) * images.elements().dtype().size_in_bytes();
    let groups = (0..geometry.groups).map(|group| -> Result<Tensor> {
        let mut sum: Option<Tensor> = None;
        for batch in geometry.batches(bytes) {
            let step = geometry.step(group, batch);
            let rows = columns(maps, &geometry.maps(), &step.maps)?;
            let columns = columns(images, &geometry.window, &step.images)?;
            let part = multiply((&rows, Cols), (&columns, Cols), use_fast_accum)?;
            sum = Some(match sum {
                None => part,
                Some(sum) => (sum + part)?,
            });
        }
        match sum {
            Some(sum) => Ok(sum),
            None => Ok(Tensor::zeros(
                (n / geometry.groups, k),
                DType::F32,
                maps.elements().device(),
            )?),
        }
    });
    let groups = groups.collect::<Result<Vec<_>>>()?;
    Ok(Tensor::cat(&groups, 0)?)
}
