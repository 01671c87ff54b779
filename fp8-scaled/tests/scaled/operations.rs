//! Every operation with a rule, as a function of two matrices `[n, n]`.

use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::{AttentionOptions, CrossEntropyOptions};
use fp8_core::Format;
use fp8_scaled::Result;
use fp8_scaled::{Direction, Norm, Scaled};

pub type Op = (&'static str, fn(&Scaled, &Scaled) -> Result<Scaled>);

fn mask(x: &Scaled) -> Result<Tensor> {
    let mask = (0..x.elem_count()).map(|i| u8::from(i % 3 == 0));
    Ok(Tensor::from_iter(mask, x.device())?.reshape(x.dims())?)
}

/// Two different rows, one of them twice, as far as the tensor has them.
fn ids(x: &Scaled) -> Result<Tensor> {
    let rows = x.dims().first().copied().unwrap_or(1).max(1) as u32;
    Ok(Tensor::new(&[rows - 1, 0, rows - 1], x.device())?)
}

fn row(x: &Scaled) -> Result<Scaled> {
    x.narrow(0, 0, 1)?.squeeze(0)
}

fn image(x: &Scaled) -> Result<Scaled> {
    x.reshape(&[&[1, 1], x.dims()].concat())
}

/// Results are finite for positive values.
pub const ALL: &[Op] = &[
    ("add", |a, b| a.add(b)),
    ("add a row", |a, b| row(a)?.add(b)),
    ("sub", |a, b| a.sub(b)),
    ("mul", |a, b| a.mul(b)),
    ("mul by a row", |a, b| a.mul(&row(b)?)),
    ("div", |a, b| a.div(b)),
    ("mul_constant", |a, _| a.mul_constant(0.3)),
    ("div_constant", |a, _| a.div_constant(7.0)),
    ("add_constant", |a, _| a.add_constant(0.7)),
    ("neg", |a, _| a.neg()),
    ("abs", |a, _| a.abs()),
    ("sign", |a, _| a.sign()),
    ("relu", |a, _| a.relu()),
    ("gelu", |a, _| a.gelu()),
    ("silu", |a, _| a.silu()),
    ("maximum", |a, b| a.maximum(b)),
    ("minimum", |a, b| a.minimum(b)),
    ("where_cond", |a, b| Scaled::where_cond(&mask(a)?, a, b)),
    ("cat", |a, b| Scaled::cat(&[a, b, a], 1)),
    ("stack", |a, b| Scaled::stack(&[a, b], 0)),
    ("exp", |a, _| a.exp()),
    ("log", |a, _| a.log()),
    ("sin", |a, _| a.sin()),
    ("cos", |a, _| a.cos()),
    ("tanh", |a, _| a.tanh()),
    ("erf", |a, _| a.erf()),
    ("sigmoid", |a, _| a.sigmoid()),
    ("sqrt", |a, _| a.sqrt()),
    ("rsqrt", |a, _| a.rsqrt()),
    ("recip", |a, _| a.recip()),
    ("square", |a, _| a.square()),
    ("powi", |a, _| a.powi(3)),
    ("powi below 0", |a, _| a.powi(-2)),
    ("sum", |a, _| a.sum_keepdim(&[0])),
    ("sum of none", |a, _| a.sum_keepdim(&[])),
    ("sum_all", |a, _| a.sum_all()),
    ("mean", |a, _| a.mean_keepdim(&[1])),
    ("mean_all", |a, _| a.mean_all()),
    ("max", |a, _| a.max_keepdim(1)),
    ("min", |a, _| a.min_keepdim(0)),
    ("max_all", |a, _| a.max_all()),
    ("min_all", |a, _| a.min_all()),
    ("prod", |a, _| a.prod_keepdim(&[0])),
    ("contiguous", |a, _| a.contiguous()),
    ("reshape", |a, _| a.reshape(&[1, a.elem_count(), 1])),
    ("flatten_all", |a, _| a.flatten_all()),
    ("transpose", |a, _| a.transpose(0, 1)),
    ("permute", |a, _| a.unsqueeze(1)?.permute(&[2, 0, 1])),
    ("squeeze", |a, _| a.unsqueeze(0)?.squeeze(0)),
    ("narrow", |a, _| a.narrow(1, 0, a.dims()[1] / 2)),
    ("slice", |a, _| a.slice(1, 0, a.dims()[1], 3)),
    ("pad", |a, _| a.pad(0, 1, 2)),
    ("reverse", |a, _| a.reverse(1)),
    ("broadcast_as", |a, _| {
        a.broadcast_as(&[&[2], a.dims()].concat())
    }),
    ("index_select", |a, _| a.index_select(&ids(a)?, 0)),
    ("gather", |a, _| {
        a.gather(&ids(a)?.unsqueeze(1)?.broadcast_as((3, a.dims()[1]))?, 0)
    }),
    ("embedding", |a, _| a.embedding(&ids(a)?.unsqueeze(0)?)),
    ("matmul", |a, b| a.matmul(b)),
    ("matmul of batches", |a, b| {
        let many = a.broadcast_as(&[&[2], a.dims()].concat())?;
        many.unsqueeze(1)?.matmul(&b.unsqueeze(0)?.unsqueeze(0)?)
    }),
    ("matmul in f32", |a, b| a.matmul_to(b, DType::F32)),
    ("linear", |a, b| {
        a.linear(b, Some(&row(&b.transpose(0, 1)?)?))
    }),
    ("linear without bias", |a, b| a.linear(b, None)),
    ("conv2d", |a, b| {
        let kernel = image(&b.narrow(0, 0, 2)?.narrow(1, 0, 2)?)?;
        image(a)?.conv2d(&kernel, 1, 1, 1, 1)
    }),
    ("max_pool2d", |a, _| image(a)?.max_pool2d(2)),
    ("avg_pool2d", |a, _| image(a)?.avg_pool2d(2)),
    ("softmax", |a, _| a.softmax(1)),
    ("softmax of columns", |a, _| a.softmax(0)),
    ("log_softmax", |a, _| a.log_softmax(1)),
    ("causal_softmax", |a, _| a.causal_softmax(0.3)),
    ("layer_norm", |a, b| {
        let (gain, bias) = (row(b)?, row(&b.reverse(0)?)?);
        a.layer_norm(&gain, Some(&bias), 1e-3)
    }),
    ("rms_norm", |a, b| a.rms_norm(&row(b)?, 1e-3)),
    ("rope", |a, _| {
        let half = (a.dims()[0], a.dims()[1] / 2);
        let of = |value: f32| Tensor::full(value, half, a.device());
        image(a)?.rope(&of(0.6)?, &of(0.8)?)
    }),
    ("attention", |a, b| {
        let (q, k) = (image(a)?, image(b)?);
        Scaled::attention(&q, &k, &q, AttentionOptions::default())
    }),
    ("attention_tokens_first", |a, b| {
        let turn = |x: &Scaled| x.unsqueeze(0)?.unsqueeze(2);
        let options = AttentionOptions::default().with_causal(true);
        Scaled::attention_tokens_first(&turn(a)?, &turn(b)?, &turn(b)?, options)
    }),
    ("cross_entropy", |a, _| {
        let targets = Tensor::zeros(a.dims()[0], DType::U32, a.device())?;
        a.cross_entropy(&targets)
    }),
    ("cross_entropy_with", |a, _| {
        let targets = (0..a.dims()[0]).map(|i| if i == 0 { -1i64 } else { 0 });
        let options = CrossEntropyOptions::default().with_ignore_index(-1);
        a.cross_entropy_with(&Tensor::from_iter(targets, a.device())?, options)
    }),
    ("dropout", |a, _| a.dropout(0.3, 1)),
    ("astype", |a, _| a.astype(DType::BF16)),
    ("astype of fp8", |a, _| a.astype(Format::E4M3)),
    ("set_scaling", |a, _| a.set_scaling(0.5)),
    ("rebalance", |a, _| a.rebalance(4.0)),
    ("dynamic_rescale", |a, _| a.dynamic_rescale_l2()),
    ("rescale", |a, _| a.rescale(Norm::Max, Direction::Backward)),
    ("cast_on_forward", |a, _| a.cast_on_forward(Format::E4M3)),
    ("cast_on_backward", |a, _| a.cast_on_backward(Format::E5M2)),
    (
        "inspect_backward",
        |a, _| Ok(a.inspect_backward(|_| Ok(()))),
    ),
];

/// A tensor that every operation here accepts: patternless positive f64 values.
pub fn matrix(n: usize, seed: usize) -> Result<Tensor> {
    let x = crate::gradient_check::positive(&[n, n], seed);
    Ok(x.to_device(&Device::Cpu)?)
}
