//! The three products over an unfolded image, part by part of the batch and group by group.

use super::operand::{Values, Weight, multiply};
use super::uncast::Columns;
use crate::data::window::{Part, Window};
use crate::device::unfolding;
use crate::error::{Result, internal};
use candle_core::{DType, Storage, Tensor};
use fp8_core::Contraction::{Cols, Rows};
use std::ops::Range;

/// Bytes of the columns and results of one part of a batch, if one image does not have more.
const PART_BYTES: usize = 8 << 20;

/// Columns of a part, unless there are not as many.
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

    /// The parts of the batch for products that need these bytes per position, and parts that end at multiples of `block`
    /// positions; `None`: one part.
    fn batches(
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
    fn channel_parts(
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
}

/// How many times `len` it takes to get a multiple of `block`.
fn step_of(block: usize, len: usize) -> usize {
    let (mut a, mut b) = (block, len);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    block / a.max(1)
}

/// The maps of `images`: `weight columns`, with a bias, in `dtype`.
pub(super) fn gather(
    geometry: &Geometry,
    images: &Values,
    weight: &Weight,
    bias: Option<&Tensor>,
    dtype: DType,
    use_fast_accum: bool,
) -> Result<Storage> {
    let device = images.elements().device();
    let maps = geometry.maps();
    let mut out = unfolding(device).images(&maps, dtype, device)?;
    let mut columns = Columns::new(images, &geometry.window, Rows);
    let [n, k] = geometry.weight_dims();
    let bytes = k * columns.element_bytes() + n / geometry.groups * 4;
    for group in 0..geometry.groups {
        let weight = weight.of_group(group)?;
        for batch in geometry.batches(bytes, columns.kept_block()) {
            let step = geometry.step(group, batch);
            let columns = columns.part(&step.images)?;
            let rows = multiply((&weight, Cols), (&columns, Rows), use_fast_accum)?;
            out.fold(&rows, &maps, &step.maps, bias)?;
        }
    }
    columns.finish()?;
    out.finish()
}

/// The images whose columns are `weight^T maps`, with a bias, in `dtype`.
pub(super) fn spread(
    geometry: &Geometry,
    maps: &Values,
    weight: &Weight,
    bias: Option<&Tensor>,
    dtype: DType,
    use_fast_accum: bool,
) -> Result<Storage> {
    let device = maps.elements().device();
    let window = &geometry.window;
    let mut out = unfolding(device).images(window, dtype, device)?;
    let single = geometry.maps();
    let mut rows = Columns::new(maps, &single, Rows);
    let [_, k] = geometry.weight_dims();
    for group in 0..geometry.groups {
        let weight = weight.of_group(group)?;
        for batch in geometry.batches(4 * k, rows.kept_block()) {
            let step = geometry.step(group, batch);
            let rows = rows.part(&step.maps)?;
            let columns = multiply((&weight, Rows), (&rows, Rows), use_fast_accum)?;
            out.fold(&columns, window, &step.images, bias)?;
        }
    }
    rows.finish()?;
    out.finish()
}

/// The gradient of the weight, `maps columns^T`, f32 `[n, columns of a group]`.
///
/// Parts of the batch are added in order. Where scales run along the sum, and so across the batch, the columns are cut
/// into those of some channels instead.
pub(super) fn weigh(
    geometry: &Geometry,
    maps: &Values,
    images: &Values,
    use_fast_accum: bool,
) -> Result<Tensor> {
    let [n, k] = geometry.weight_dims();
    if geometry.window.batch == 0 {
        let device = maps.elements().device();
        return Ok(Tensor::zeros((n, k), DType::F32, device)?);
    }
    let single = geometry.maps();
    let mut rows = Columns::new(maps, &single, Cols);
    let mut columns = Columns::new(images, &geometry.window, Cols);
    let whole = rows.needs_whole_sums() || columns.needs_whole_sums();
    let bytes = columns.element_bytes();
    let mut groups = Vec::with_capacity(geometry.groups);
    for group in 0..geometry.groups {
        groups.push(if whole {
            let step = geometry.step(group, 0..geometry.window.batch);
            let rows = rows.part(&step.maps)?;
            let first = step.images.channels.start;
            let parts = geometry.channel_parts(bytes, columns.kept_block());
            let parts = parts.map(|channels| {
                let columns = columns.part(&Part {
                    images: step.images.images.clone(),
                    channels: first + channels.start..first + channels.end,
                })?;
                multiply((&rows, Cols), (&columns, Cols), use_fast_accum)
            });
            Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 1)?
        } else {
            let bytes = (k + n / geometry.groups) * bytes;
            let mut sum: Option<Tensor> = None;
            for batch in geometry.batches(bytes, Some(1)) {
                let step = geometry.step(group, batch);
                let (rows, columns) = (rows.part(&step.maps)?, columns.part(&step.images)?);
                let part = multiply((&rows, Cols), (&columns, Cols), use_fast_accum)?;
                sum = Some(match sum {
                    None => part,
                    Some(sum) => (sum + part)?,
                });
            }
            match sum {
                Some(sum) => sum,
                None => internal!("no part of a batch of {}", geometry.window.batch),
            }
        });
    }
    rows.finish()?;
    columns.finish()?;
    Ok(Tensor::cat(&groups, 0)?)
}
