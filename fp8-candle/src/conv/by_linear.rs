//! Convolutions whose scales run along the sums: images are unfolded in high precision and multiplied by
//! [`fp8_linear`], group by group.

use super::op::Convolution;
use crate::data::window::{Part, Window};
use crate::device::unfolding;
use crate::error::Result;
use crate::linear::{LinearPlan, LinearWeight, fp8_linear};
use crate::ready::{Ready, owned_storage, tensor_of};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Shape, Storage, Tensor};

/// The output, as a node of the autograd graph.
pub(super) fn output(
    convolution: &Convolution,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let geometry = &convolution.geometry;
    let x = x.reshape(convolution.input_dims().as_slice())?;
    let weight = weight.reshape(geometry.weight_dims().as_slice())?;
    let groups = geometry.groups;
    match convolution.transposed {
        false => gather(convolution, &x, &weight, bias, plan),
        true => {
            // [batch * places, n]
            let rows = x.permute((0, 2, 3, 1))?.contiguous()?.flatten(0, 2)?;
            let columns = (0..groups).map(|group| -> Result<Tensor> {
                let rows = of_group(&rows, 1, group, groups)?;
                let weight = of_group(&weight, 0, group, groups)?.t()?;
                let weight = LinearWeight::HighPrecision(&weight, None);
                Ok(fp8_linear(&rows, weight, None, plan)?.t()?)
            });
            let columns = Tensor::cat(&columns.collect::<Result<Vec<_>>>()?, 0)?;
            let images = fold(&columns, &geometry.window)?;
            match bias {
                None => Ok(images),
                Some(bias) => {
                    let bias = bias.to_dtype(x.dtype())?.reshape((1, (), 1, 1))?;
                    Ok(images.broadcast_add(&bias)?)
                }
            }
        }
    }
}

fn gather(
    convolution: &Convolution,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let geometry = &convolution.geometry;
    let groups = geometry.groups;
    let columns = unfold(x, &geometry.window)?;
    let rows = (0..groups).map(|group| -> Result<Tensor> {
        let rows = of_group(&columns, 0, group, groups)?.t()?;
        let weight = of_group(weight, 0, group, groups)?;
        let bias = bias
            .map(|bias| of_group(bias, 0, group, groups))
            .transpose()?;
        let weight = LinearWeight::HighPrecision(&weight, None);
        fp8_linear(&rows, weight, bias.as_ref(), plan)
    });
    let rows = Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 1)?;
    let [batch, n, height, width] = convolution.output_dims();
    let maps = rows.reshape((batch, height, width, n))?;
    Ok(maps.permute((0, 3, 1, 2))?.contiguous()?)
}

/// The part of a dimension that belongs to a group.
fn of_group(x: &Tensor, dim: usize, group: usize, groups: usize) -> Result<Tensor> {
    let len = x.dim(dim)? / groups;
    Ok(x.narrow(dim, group * len, len)?)
}

fn whole(window: &Window) -> Part {
    Part {
        images: 0..window.batch,
        channels: 0..window.channels,
    }
}

fn unfolded(x: &Tensor, window: &Window) -> Result<Tensor> {
    let x = x.detach().contiguous()?;
    unfolding(x.device()).unfold(&x, window, &whole(window))
}

fn folded(columns: &Tensor, window: &Window) -> Result<Storage> {
    let device = columns.device();
    let mut images = unfolding(device).images(window, columns.dtype(), device)?;
    let columns = columns.detach().to_dtype(DType::F32)?.contiguous()?;
    images.fold(&columns, window, &whole(window), None)?;
    images.finish()
}

/// The columns of all images `x`, `[channels * taps, batch * places]`.
fn unfold(x: &Tensor, window: &Window) -> Result<Tensor> {
    node(x, unfolded(x, window)?, window, true)
}

/// The images that columns `[channels * taps, batch * places]` are folded to.
fn fold(columns: &Tensor, window: &Window) -> Result<Tensor> {
    let images = tensor_of(folded(columns, window)?, window.dims().as_slice())?;
    node(columns, images, window, false)
}

fn node(x: &Tensor, result: Tensor, window: &Window, unfolds: bool) -> Result<Tensor> {
    if !x.track_op() {
        return Ok(result);
    }
    let ready = Ready::new(owned_storage(&result)?, result.shape())?;
    Ok(x.apply_op1(Node {
        ready,
        window: window.clone(),
        unfolds,
    })?)
}

/// Unfolding, or folding; each is the gradient of the other.
struct Node {
    ready: Ready,
    window: Window,
    unfolds: bool,
}

impl CustomOp1 for Node {
    fn name(&self) -> &'static str {
        match self.unfolds {
            true => "unfold",
            false => "fold",
        }
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.ready.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.ready.take_cuda()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(match self.unfolds {
            true => tensor_of(folded(grad, &self.window)?, x.shape())?,
            false => unfolded(grad, &self.window)?,
        }))
    }
}
