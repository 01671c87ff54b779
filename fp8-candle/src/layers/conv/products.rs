//! The three products over an unfolded image, part by part of the batch and group by group.

use super::columns::Columns;
use super::geometry::Geometry;
use super::operand::{Weight, multiply};
use super::values::Values;
use crate::base::data::window::Part;
use crate::base::error::{Result, internal};
use crate::device::unfolding;
use candle_core::{DType, Storage, Tensor};
use fp8_core::Contraction::{self, Cols, Rows};

/// What one call computes: a convolution, or a transposed one, which swaps input and output.
#[derive(Debug, Clone)]
pub(super) struct Convolution {
    pub(super) geometry: Geometry,
    pub(super) transposed: bool,
}

impl Convolution {
    /// `[batch, channels, height, width]` of the input.
    pub(super) fn input_dims(&self) -> [usize; 4] {
        match self.transposed {
            false => self.geometry.window.dims(),
            true => self.geometry.maps().dims(),
        }
    }

    /// `[batch, channels, height, width]` of the output.
    pub(super) fn output_dims(&self) -> [usize; 4] {
        match self.transposed {
            false => self.geometry.maps().dims(),
            true => self.geometry.window.dims(),
        }
    }

    /// Which dimension of the weight the forward pass sums over.
    pub(super) fn forward_contraction(&self) -> Contraction {
        match self.transposed {
            false => Cols,
            true => Rows,
        }
    }

    /// Which one grad_input sums over.
    pub(super) fn backward_contraction(&self) -> Contraction {
        match self.transposed {
            false => Rows,
            true => Cols,
        }
    }

    /// The output, in `dtype`. To `emulate`, values are multiplied in f32 instead of codes.
    pub(super) fn output(
        &self,
        x: Values,
        weight: &Values,
        bias: Option<&Tensor>,
        dtype: DType,
        (emulate, use_fast_accum): (bool, bool),
    ) -> Result<Storage> {
        let (x, weight) = self.pair(x.reshape(&self.input_dims())?, weight, emulate)?;
        let product = if self.transposed { spread } else { gather };
        product(&self.geometry, &x, &weight, bias, dtype, use_fast_accum)
    }

    pub(super) fn grad_input(
        &self,
        go: Values,
        weight: &Values,
        dtype: DType,
        (emulate, use_fast_accum): (bool, bool),
    ) -> Result<Storage> {
        let (go, weight) = self.pair(go.reshape(&self.output_dims())?, weight, emulate)?;
        let product = if self.transposed { gather } else { spread };
        product(&self.geometry, &go, &weight, None, dtype, use_fast_accum)
    }

    /// Both as codes, or both as values.
    fn pair(&self, images: Values, weight: &Values, emulate: bool) -> Result<(Values, Weight)> {
        let weight = Weight::new(weight, &self.geometry)?;
        match emulate || images.is_high_precision() || !weight.splits()? {
            true => Ok((images.emulated()?, weight.emulated()?)),
            false => Ok((images, weight)),
        }
    }

    /// In f32.
    pub(super) fn grad_weight(
        &self,
        go: Values,
        x: Values,
        (emulate, use_fast_accum): (bool, bool),
    ) -> Result<Tensor> {
        let mut go = go.reshape(&self.output_dims())?;
        let mut x = x.reshape(&self.input_dims())?;
        if emulate || go.is_high_precision() {
            (go, x) = (go.emulated()?, x.emulated()?);
        }
        let (maps, images) = if self.transposed { (x, go) } else { (go, x) };
        weigh(&self.geometry, &maps, &images, use_fast_accum)
    }
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
