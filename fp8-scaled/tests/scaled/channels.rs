//! Convolutions along one dimension, transposed ones, and norms over channels: values and gradients.

use crate::gradient_check::{Check, wave};
use candle_core::{DType, Device, Tensor};
use fp8_candle::conv::ConvShape;
use fp8_scaled::Result;
use fp8_scaled::as_scaled;

/// Against candle's convolutions, whose gradients are partly wrong and not compared.
#[test]
fn convolutions() -> Result<()> {
    let rows = wave(&[2, 4, 7], 1);
    for (kernel, [padding, stride, dilation, groups]) in [
        (&[3, 4, 3], [1, 1, 1, 1]),
        (&[2, 2, 2], [0, 2, 1, 2]),
        (&[4, 1, 3], [2, 3, 1, 4]),
        (&[3, 4, 2], [0, 1, 3, 1]),
    ] {
        Check::new("conv1d", &[rows.clone(), wave(kernel, 2)])
            .without_candle()
            .run(
                |x| x[0].conv1d(&x[1], padding, stride, dilation, groups),
                |x| Ok(x[0].conv1d(&x[1], padding, stride, dilation, groups)?),
            )?;
    }
    Ok(())
}

/// The gradient of the convolution, written out position by position in f64.
fn transposed(x: &Tensor, kernel: &Tensor, shape: &ConvShape) -> Result<Tensor> {
    let (batch, n, height, width) = x.dims4()?;
    let (_, per_group, kh, kw) = kernel.dims4()?;
    let size = shape.transposed_output_size([height, width], [kh, kw]);
    let [out_h, out_w] = size.unwrap();
    let of_group = n / shape.groups;
    let mut y = Tensor::zeros(
        (batch, per_group * shape.groups, out_h, out_w),
        x.dtype(),
        x.device(),
    )?;
    for row in 0..height * kh {
        for col in 0..width * kw {
            let (i, ki, j, kj) = (row / kh, row % kh, col / kw, col % kw);
            let place = |dim: usize, i: usize, k: usize, size: usize| {
                let at = i * shape.stride[dim] + k * shape.dilation[dim];
                at.checked_sub(shape.padding[dim]).filter(|&at| at < size)
            };
            let (Some(top), Some(left)) = (place(0, i, ki, out_h), place(1, j, kj, out_w)) else {
                continue;
            };
            let parts = (0..shape.groups).map(|group| {
                let from = x.narrow(1, group * of_group, of_group)?;
                let from = from
                    .narrow(2, i, 1)?
                    .narrow(3, j, 1)?
                    .reshape((batch, of_group))?;
                let tap = kernel.narrow(0, group * of_group, of_group)?;
                from.matmul(
                    &tap.narrow(2, ki, 1)?
                        .narrow(3, kj, 1)?
                        .reshape((of_group, per_group))?,
                )
            });
            let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
            let part = Tensor::cat(&parts, 1)?.unsqueeze(2)?.unsqueeze(3)?;
            let part = part.pad_with_zeros(2, top, out_h - top - 1)?;
            y = (y + part.pad_with_zeros(3, left, out_w - left - 1)?)?;
        }
    }
    Ok(y)
}

#[test]
fn transposed_convolutions() -> Result<()> {
    let image = wave(&[2, 4, 3, 2], 1);
    let shape = ConvShape::new;
    for (kernel, shape) in [
        (&[4, 3, 2, 2], shape()),
        (
            &[4, 2, 3, 2],
            shape().with_stride([2, 3]).with_output_padding([1, 0]),
        ),
        (
            &[4, 3, 3, 3],
            shape().with_padding([1, 1]).with_stride([2, 2]),
        ),
        (&[4, 1, 2, 2], shape().with_dilation([2, 1]).with_groups(2)),
    ] {
        Check::new("conv_transpose2d", &[image.clone(), wave(kernel, 2)])
            .without_candle()
            .run(
                |x| x[0].conv_transpose2d(&x[1], &shape),
                |x| transposed(&x[0], &x[1], &shape),
            )?;
        let (rows, kernel) = (
            wave(&[2, 4, 5], 3),
            wave(&[kernel[0], kernel[1], kernel[3]], 4),
        );
        let along = shape
            .with_padding([0, shape.padding[1]])
            .with_stride([1, shape.stride[1]]);
        let along = along.with_dilation([1, shape.dilation[1]]);
        let along = along.with_output_padding([0, shape.output_padding[1]]);
        Check::new("conv_transpose1d", &[rows, kernel])
            .without_candle()
            .run(
                |x| x[0].conv_transpose1d(&x[1], &shape),
                |x| Ok(transposed(&x[0].unsqueeze(2)?, &x[1].unsqueeze(2)?, &along)?.squeeze(2)?),
            )?;
    }
    Ok(())
}

/// The scale follows from the number of terms in a sum.
#[test]
fn scales_follow_the_fan_in() -> Result<()> {
    let ones = |dims: &[usize]| -> Result<_> {
        as_scaled(&Tensor::ones(dims, DType::F16, &Device::Cpu)?, None)
    };
    let shape = ConvShape::new();
    for (shape, scale) in [
        (shape, 8.),                                           // 4 * 4 * 4 terms
        (shape.with_stride([2, 2]), 4.),                       // 4 * 2 * 2
        (shape.with_stride([4, 4]), 2.),                       // 4
        (shape.with_groups(4), 4.),                            // 4 * 4
        (shape.with_stride([2, 2]).with_dilation([2, 2]), 8.), // all taps on even places
    ] {
        let y = ones(&[1, 4, 5, 5])?.conv_transpose2d(&ones(&[4, 1, 4, 4])?, &shape)?;
        assert_eq!(y.scale().to_f32(), scale, "{shape:?}");
        // Sums of ones: the largest is the fan-in.
        let largest = y.to_tensor(DType::F32)?.max_all()?.to_scalar::<f32>()?;
        assert!(largest <= scale * scale, "{largest}");
    }
    let y = ones(&[1, 4, 9])?.conv1d(&ones(&[2, 4, 4])?, 0, 1, 1, 1)?;
    assert_eq!(y.scale().to_f32(), 4.);
    let kernel = ones(&[2, 4, 4])?;
    let error = ones(&[1, 4, 9, 1])?.conv1d(&kernel, 0, 1, 1, 1);
    let error = error.unwrap_err().to_string();
    let named = error.contains("conv1d") && error.contains("three dimensions");
    assert!(named, "{error}");
    let error = ones(&[1, 3, 9])?.conv_transpose1d(&kernel, &shape);
    let error = error.unwrap_err().to_string();
    let named = error.contains("conv_transpose1d") && error.contains("3 channels, expected 2");
    assert!(named, "{error}");
    Ok(())
}

/// `(x - mean) / sqrt(variance + eps)` of rows.
fn normalized(rows: &Tensor, eps: f64) -> Result<Tensor> {
    let centered = rows.broadcast_sub(&rows.mean_keepdim(1)?)?;
    let variance = centered.sqr()?.mean_keepdim(1)?;
    Ok(centered.broadcast_div(&(variance + eps)?.sqrt()?)?)
}

#[test]
fn norms_over_channels() -> Result<()> {
    for dims in [&[3, 4, 5][..], &[6, 4], &[2, 4, 3, 2]] {
        let args = [wave(dims, 1), wave(&[4], 2), wave(&[4], 3)];
        let mut channels = vec![1; dims.len()];
        channels[1] = 4;
        let gained = |y: Tensor, x: &[Tensor]| -> Result<Tensor> {
            let y = y.broadcast_mul(&x[1].reshape(&channels[..])?)?;
            Ok(y.broadcast_add(&x[2].reshape(&channels[..])?)?)
        };
        Check::new("batch_norm", &args).run(
            |x| x[0].batch_norm(true, Some(&x[1]), Some(&x[2]), 1e-3),
            |x| {
                let by_channel = x[0].transpose(0, 1)?.contiguous()?;
                let y = normalized(&by_channel.flatten_from(1)?, 1e-3)?;
                let y = y.reshape(by_channel.dims())?.transpose(0, 1)?;
                gained(y, x)
            },
        )?;
        if dims.len() > 2 {
            Check::new("group_norm", &args).run(
                |x| x[0].group_norm(2, &x[1], Some(&x[2]), 1e-3),
                |x| {
                    let rows = x[0].reshape((dims[0] * 2, ()))?;
                    gained(normalized(&rows, 1e-3)?.reshape(dims)?, x)
                },
            )?;
        }
    }
    Ok(())
}

#[test]
fn shapes_that_do_not_fit_are_named() -> Result<()> {
    let x = as_scaled(&Tensor::ones((2, 6, 3), DType::F32, &Device::Cpu)?, None)?;
    let gain = as_scaled(&Tensor::ones(4, DType::F32, &Device::Cpu)?, None)?;
    let error = x
        .batch_norm(true, Some(&gain), None, 0.)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("batch_norm") && error.contains("[6]"),
        "{error}"
    );
    let error = x.group_norm(4, &gain, None, 0.).unwrap_err().to_string();
    assert!(error.contains("4 groups"), "{error}");
    let row = as_scaled(&Tensor::ones(6, DType::F32, &Device::Cpu)?, None)?;
    let error = row.batch_norm(true, None, None, 0.).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("[batch, channels, ..]"), "{error}");
    Ok(())
}
