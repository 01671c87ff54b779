//! Convolutions over one dimension, composed of a matrix product.
//!
//! In candle 0.11.1 `conv1d` reads a strided kernel wrongly, and `conv_transpose1d` without padding every row of a batch but the
//! first. The backward pass of `conv1d` uses both, so with more than one row in a batch its gradients are silently wrong.
//! `conv_transpose1d` has no backward pass.

use candle_core::{D, Module, Result, Tensor};

/// `x` `[b, c_in, l]`, `weight` `[c_out, c_in / groups, k]`, to `[b, c_out, l_out]`.
struct MatrixConvolution {
    /// Zeros before and after `x`; values are cut off where negative.
    padding: (i64, i64),
    stride: usize,
    dilation: usize,
    groups: usize,
}

impl MatrixConvolution {
    fn apply(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (c_out, c, k) = weight.dims3()?;
        let (b, c_in, _) = x.dims3()?;
        let Self {
            padding: (before, after),
            stride,
            dilation,
            groups,
        } = *self;
        let sizes = [k, stride, dilation, groups];
        if sizes.contains(&0)
            || Some(c_in) != c.checked_mul(groups)
            || !c_out.is_multiple_of(groups)
        {
            candle_core::bail!(
                "a kernel {:?} in {groups} groups, with stride {stride} and dilation {dilation}, does not fit an input {:?}",
                weight.dims(),
                x.dims()
            );
        }
        let x = padded(x, before, after)?;
        let (l, span) = (x.dim(2)?, dilation.saturating_mul(k - 1).saturating_add(1));
        if l < span {
            candle_core::bail!("a kernel that spans {span} values does not fit into {l}");
        }
        let l_out = (l - span) / stride + 1;
        // Each tap of the kernel reads every `stride`th value of x, from its own position on.
        let x = x.pad_with_zeros(2, 0, stride - 1)?;
        let taps = (0..k).map(|tap| {
            let x = x.narrow(2, tap * dilation, l_out * stride)?;
            let x = match stride {
                1 => x,
                _ => {
                    let x = x.reshape((b, c_in, l_out, stride))?;
                    x.narrow(3, 0, 1)?.squeeze(3)?
                }
            };
            x.reshape((b, groups, c, l_out))
        });
        let columns = Tensor::cat(&taps.collect::<Result<Vec<_>>>()?, 2)?;
        let rows = weight
            .reshape((groups, c_out / groups, c, k))?
            .transpose(2, 3)?
            .reshape((1, groups, c_out / groups, k * c))?;
        let y = rows
            .broadcast_matmul(&columns)?
            .reshape((b, c_out, l_out))?;
        match bias {
            None => Ok(y),
            Some(bias) => y.broadcast_add(&bias.reshape((1, c_out, 1))?),
        }
    }
}

fn padded(x: &Tensor, before: i64, after: i64) -> Result<Tensor> {
    let length = x.dim(2)? as i64;
    let (cut_before, cut_after) = ((-before).max(0), (-after).max(0));
    if cut_before + cut_after >= length {
        candle_core::bail!(
            "nothing is left of {length} values without {cut_before} and {cut_after}"
        );
    }
    let rest = (length - cut_before - cut_after) as usize;
    x.narrow(2, cut_before as usize, rest)?.pad_with_zeros(
        2,
        before.max(0) as usize,
        after.max(0) as usize,
    )
}

/// Whether candle's own convolution can be used: its result is right, and no gradient is tracked.
fn plain(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> bool {
    let tracked = |x: &Tensor| x.track_op();
    weight.is_contiguous() && !tracked(x) && !tracked(weight) && !bias.is_some_and(tracked)
}

pub(super) fn conv1d(layer: &candle_nn::Conv1d, x: &Tensor) -> Result<Tensor> {
    let (weight, bias, config) = (layer.weight(), layer.bias(), layer.config());
    if plain(x, weight, bias) {
        return layer.forward(x);
    }
    let convolution = MatrixConvolution {
        padding: (config.padding as i64, config.padding as i64),
        stride: config.stride,
        dilation: config.dilation,
        groups: config.groups,
    };
    convolution.apply(x, weight, bias)
}

/// The convolution of `x`, with zeros between its values, with the reversed kernel.
pub(super) fn conv_transpose1d(layer: &candle_nn::ConvTranspose1d, x: &Tensor) -> Result<Tensor> {
    let (weight, bias, config) = (layer.weight(), layer.bias(), layer.config());
    let (b, c_in, l) = x.dims3()?;
    if plain(x, weight, bias) {
        // Row by row.
        let rows = (0..b).map(|row| layer.forward(&x.narrow(0, row, 1)?.contiguous()?));
        return Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0);
    }
    let (stride, groups) = (config.stride, config.groups);
    let (kernel_in, c_out, k) = weight.dims3()?;
    if [l, k, stride, groups].contains(&0) || kernel_in != c_in || !c_in.is_multiple_of(groups) {
        candle_core::bail!(
            "a kernel {:?} in {groups} groups, with stride {stride}, does not fit an input {:?}",
            weight.dims(),
            x.dims()
        );
    }
    let x = x
        .unsqueeze(3)?
        .pad_with_zeros(3, 0, stride - 1)?
        .reshape((b, c_in, l * stride))?
        .narrow(2, 0, (l - 1) * stride + 1)?;
    let reversed: Vec<u32> = (0..k as u32).rev().collect();
    let weight = weight
        .index_select(&Tensor::new(reversed, weight.device())?, D::Minus1)?
        .reshape((groups, c_in / groups, c_out, k))?
        .transpose(1, 2)?
        .reshape((groups * c_out, c_in / groups, k))?;
    let edge = (config.dilation * (k - 1)) as i64 - config.padding as i64;
    let convolution = MatrixConvolution {
        padding: (edge, edge + config.output_padding as i64),
        stride: 1,
        dilation: config.dilation,
        groups,
    };
    convolution.apply(&x, &weight, bias)
}
