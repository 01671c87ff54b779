//! Compound operations against plain ones: values and gradients.

use crate::gradient_check::{Check, wave};
use candle_core::{D, DType, Device, Tensor};
use fp8_candle::Error as Operand;
use fp8_candle::ops::{self, AttentionOptions, CrossEntropyOptions};
use fp8_scaled::Scaled;
use fp8_scaled::{Error, Result};

#[test]
fn softmaxes() -> Result<()> {
    let x = wave(&[3, 4, 5], 1);
    let log_softmax = |x: &Tensor, dim: usize| -> Result<Tensor> {
        let e = x.exp()?;
        Ok(e.broadcast_div(&e.sum_keepdim(dim)?)?.log()?)
    };
    for dim in 0..3 {
        Check::new("softmax", std::slice::from_ref(&x)).run(
            |x| x[0].softmax(dim),
            |x| Ok(log_softmax(&x[0], dim)?.exp()?),
        )?;
        Check::new("log_softmax", std::slice::from_ref(&x))
            .run(|x| x[0].log_softmax(dim), |x| log_softmax(&x[0], dim))?;
    }
    Check::new("causal_softmax", &[x]).run(
        |x| x[0].causal_softmax(0.3),
        |x| Ok(ops::causal_softmax(&x[0], 0.3)?),
    )
}

#[test]
fn norms() -> Result<()> {
    let args = [wave(&[3, 2, 8], 1), wave(&[8], 2), wave(&[8], 3)];
    Check::new("layer_norm", &args).run(
        |x| x[0].layer_norm(&x[1], Some(&x[2]), 0.01),
        |x| Ok(ops::layer_norm(&x[0], &x[1], Some(&x[2]), 0.01)?),
    )?;
    Check::new("layer_norm without bias", &args[..2]).run(
        |x| x[0].layer_norm(&x[1], None, 0.01),
        |x| Ok(ops::layer_norm(&x[0], &x[1], None, 0.01)?),
    )?;
    Check::new("rms_norm", &args[..2]).run(
        |x| x[0].rms_norm(&x[1], 0.01),
        |x| Ok(ops::rms_norm(&x[0], &x[1], 0.01)?),
    )
}

#[test]
fn activations() -> Result<()> {
    let x = (wave(&[5, 7], 1) * 4.0)?;
    Check::new("gelu", std::slice::from_ref(&x)).run(|x| x[0].gelu(), |x| Ok(ops::gelu(&x[0])?))?;
    Check::new("silu", &[x]).run(|x| x[0].silu(), |x| Ok(x[0].silu()?))
}

#[test]
fn rotation() -> Result<()> {
    let angles = wave(&[6, 2], 3);
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    Check::new("rope", &[wave(&[2, 2, 5, 4], 1)]).run(
        |x| x[0].rope(&cos, &sin),
        |x| {
            let dtype = x[0].dtype();
            Ok(ops::rope(
                &x[0],
                &cos.to_dtype(dtype)?,
                &sin.to_dtype(dtype)?,
            )?)
        },
    )
}

#[test]
fn attention() -> Result<()> {
    let (q, k, v) = (
        wave(&[2, 4, 3, 4], 1),
        wave(&[2, 2, 5, 4], 2),
        wave(&[2, 2, 5, 4], 3),
    );
    for options in [
        AttentionOptions::default(),
        AttentionOptions::default()
            .with_causal(true)
            .with_softmax_scale(0.7),
    ] {
        Check::new("attention", &[q.clone(), k.clone(), v.clone()]).run(
            |x| Scaled::attention(&x[0], &x[1], &x[2], options.clone()),
            |x| Ok(ops::attention(&x[0], &x[1], &x[2], options.clone())?),
        )?;
    }
    let turn = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let options = AttentionOptions::default();
    Check::new(
        "attention, tokens first",
        &[turn(&q)?, turn(&k)?, turn(&v)?],
    )
    .run(
        |x| Scaled::attention_tokens_first(&x[0], &x[1], &x[2], options.clone()),
        |x| {
            Ok(ops::attention_tokens_first(
                &x[0],
                &x[1],
                &x[2],
                options.clone(),
            )?)
        },
    )
}

#[test]
fn losses() -> Result<()> {
    let targets = Tensor::new(&[[1i64, 4, 0], [2, -3, 3]], &Device::Cpu)?;
    let options = CrossEntropyOptions::default().with_ignore_index(-3);
    let logits = wave(&[2, 3, 5], 1);
    Check::new("cross_entropy", std::slice::from_ref(&logits)).run(
        |x| x[0].cross_entropy_with(&targets, options),
        |x| Ok(ops::cross_entropy_with(&x[0], &targets, options)?),
    )?;
    let targets = Tensor::new(&[[1u32, 4, 0], [2, 2, 3]], &Device::Cpu)?;
    Check::new("cross_entropy", &[logits]).run(
        |x| x[0].cross_entropy(&targets),
        |x| Ok(ops::cross_entropy(&x[0], &targets)?),
    )
}

#[test]
fn lookups() -> Result<()> {
    let ids = Tensor::new(&[2u32, 0, 2, 1], &Device::Cpu)?;
    let table = wave(&[4, 3], 1);
    Check::new("index_select", std::slice::from_ref(&table)).run(
        |x| x[0].index_select(&ids, 0),
        |x| Ok(x[0].index_select(&ids, 0)?),
    )?;
    Check::new("index_select", &[table.t()?.contiguous()?]).run(
        |x| x[0].index_select(&ids, 1),
        |x| Ok(x[0].index_select(&ids, 1)?),
    )?;
    let pairs = ids.reshape((2, 2))?;
    Check::new("embedding", std::slice::from_ref(&table)).run(
        |x| x[0].embedding(&pairs),
        |x| Ok(x[0].index_select(&ids, 0)?.reshape((2, 2, 3))?),
    )?;
    let ids = Tensor::new(&[[2u32, 0], [1, 1], [0, 2], [2, 2]], &Device::Cpu)?;
    Check::new("gather", &[table]).run(|x| x[0].gather(&ids, 1), |x| Ok(x[0].gather(&ids, 1)?))
}

#[test]
fn linear_layers() -> Result<()> {
    for x in [&[4, 6][..], &[2, 4, 6], &[6]] {
        let args = [wave(x, 1), wave(&[3, 6], 2), wave(&[3], 3)];
        let plain = |x: &[Tensor]| -> Result<Tensor> {
            let lead = &x[0].dims()[..x[0].rank() - 1];
            let rows = x[0].reshape(((), 6))?.matmul(&x[1].t()?)?;
            Ok(rows.reshape([lead, &[3]].concat())?)
        };
        Check::new("linear", &args).run(
            |x| x[0].linear(&x[1], Some(&x[2])),
            |x| Ok(plain(x)?.broadcast_add(&x[2])?),
        )?;
        Check::new("linear without bias", &args[..2]).run(|x| x[0].linear(&x[1], None), plain)?;
    }
    Ok(())
}

#[test]
fn images() -> Result<()> {
    let image = wave(&[2, 4, 6, 5], 1);
    for (kernel, [padding, stride, dilation, groups]) in [
        (&[3, 4, 3, 3], [1, 1, 1, 1]),
        (&[2, 2, 2, 3], [0, 1, 1, 2]),
        (&[4, 1, 2, 2], [1, 1, 1, 4]),
        (&[3, 4, 2, 2], [0, 1, 2, 1]),
        (&[3, 4, 2, 2], [0, 2, 1, 1]),
    ] {
        let check = Check::new("conv2d", &[image.clone(), wave(kernel, 2)]);
        // candle has no gradient where the stride does not divide the width.
        let check = if stride > 1 {
            check.without_candle()
        } else {
            check
        };
        check.run(
            |x| x[0].conv2d(&x[1], padding, stride, dilation, groups),
            |x| Ok(x[0].conv2d(&x[1], padding, stride, dilation, groups)?),
        )?;
    }
    // candle divides the gradient of a largest element by the size of the window.
    Check::new("max_pool2d", std::slice::from_ref(&image))
        .without_candle()
        .run(|x| x[0].max_pool2d(2), |x| Ok(x[0].max_pool2d(2)?))?;
    Check::new("avg_pool2d", &[image])
        .without_candle()
        .run(|x| x[0].avg_pool2d(2), |x| Ok(x[0].avg_pool2d(2)?))
}

#[test]
fn dropout() -> Result<()> {
    // The mask, from a tensor of ones.
    let ones = Scaled::from_parts(&Tensor::ones(1000, DType::F64, &Device::Cpu)?, 1.0)?;
    let mask = ones.dropout(0.3, 5)?.to_tensor(DType::F64)?;
    let kept = mask
        .gt(0.0)?
        .to_dtype(DType::F64)?
        .mean_all()?
        .to_scalar::<f64>()?;
    // Five standard deviations of the mean of 1000.
    assert!(
        (kept - 0.7).abs() < 5.0 * (0.3f64 * 0.7 / 1000.0).sqrt(),
        "{kept}"
    );
    let part = mask.narrow(0, 0, 20)?.reshape((4, 5))?;
    Check::new("dropout", &[wave(&[4, 5], 1)]).run(
        |x| x[0].dropout(0.3, 5),
        |x| Ok((&x[0] * part.to_dtype(x[0].dtype())?)?),
    )?;
    let inf = Scaled::from_parts(&Tensor::full(f32::INFINITY, 100, &Device::Cpu)?, 1.0)?;
    assert!(inf.dropout(0.5, 1)?.to_vec1()?.iter().all(|y| !y.is_nan()));
    let error = ones.dropout(1.0, 1).unwrap_err();
    let is_named = matches!(error, Error::Fp8(Operand::Probability { got: 1.0, .. }));
    assert!(is_named, "{error:?}");
    assert_eq!(mask.dim(D::Minus1)?, 1000);
    Ok(())
}
