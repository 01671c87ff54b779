//! Values and gradients of elementwise operations, reductions and moves against candle and finite differences.

use crate::gradient_check::{Check, positive, wave};
use candle_core::{DType, Device, Tensor};
use fp8_scaled::Result;
use fp8_scaled::{Direction, Norm, Scaled};

type Unary = (
    &'static str,
    fn(&Scaled) -> Result<Scaled>,
    fn(&Tensor) -> candle_core::Result<Tensor>,
);

fn check_all(inputs: &[Tensor], rows: &[Unary]) -> Result<()> {
    for (name, scaled, plain) in rows {
        Check::new(name, inputs).run(|x| scaled(&x[0]), |x| Ok(plain(&x[0])?))?;
    }
    Ok(())
}

#[test]
fn functions_of_any_value() -> Result<()> {
    check_all(
        &[wave(&[2, 4], 1)],
        &[
            ("neg", Scaled::neg, Tensor::neg),
            ("abs", Scaled::abs, Tensor::abs),
            ("relu", Scaled::relu, Tensor::relu),
            ("exp", Scaled::exp, Tensor::exp),
            ("sin", Scaled::sin, Tensor::sin),
            ("cos", Scaled::cos, Tensor::cos),
            ("tanh", Scaled::tanh, Tensor::tanh),
            ("erf", Scaled::erf, Tensor::erf),
            ("sigmoid", Scaled::sigmoid, |x| {
                (x.neg()?.exp()? + 1.0)?.recip()
            }),
            ("square", Scaled::square, Tensor::sqr),
            ("recip", Scaled::recip, Tensor::recip),
            ("powi 3", |x| x.powi(3), |x| x.sqr()? * x),
            ("powi 1", |x| x.powi(1), |x| Ok(x.clone())),
            ("powi -2", |x| x.powi(-2), |x| x.sqr()?.recip()),
            ("mul_constant", |x| x.mul_constant(-0.3), |x| x * -0.3),
            ("div_constant", |x| x.div_constant(7.0), |x| x / 7.0),
            ("add_constant", |x| x.add_constant(2.5), |x| x + 2.5),
            ("add 0", |x| x.add_constant(0.0), |x| Ok(x.clone())),
            ("set_scaling", |x| x.set_scaling(0.125), |x| Ok(x.clone())),
            ("rebalance", |x| x.rebalance(4.0), |x| Ok(x.clone())),
            ("contiguous", Scaled::contiguous, |x| Ok(x.clone())),
            (
                "rescale max",
                Scaled::dynamic_rescale_max,
                |x| Ok(x.clone()),
            ),
            ("rescale l1", Scaled::dynamic_rescale_l1, |x| Ok(x.clone())),
            ("rescale l2", Scaled::dynamic_rescale_l2, |x| Ok(x.clone())),
            (
                "rescale backward",
                |x| x.rescale(Norm::L2, Direction::Backward),
                |x| Ok(x.clone()),
            ),
            ("astype", |x| x.astype(DType::F64), |x| Ok(x.clone())),
            (
                "cast_on_forward",
                |x| x.cast_on_forward(DType::F64),
                |x| Ok(x.clone()),
            ),
            (
                "cast_on_backward",
                |x| x.cast_on_backward(DType::F64),
                |x| Ok(x.clone()),
            ),
            (
                "inspect_backward",
                |x| Ok(x.inspect_backward(|_| Ok(()))),
                |x| Ok(x.clone()),
            ),
        ],
    )
}

#[test]
fn functions_of_positive_values() -> Result<()> {
    check_all(
        &[positive(&[2, 4], 1)],
        &[
            ("log", Scaled::log, Tensor::log),
            ("sqrt", Scaled::sqrt, Tensor::sqrt),
            ("rsqrt", Scaled::rsqrt, |x| x.sqrt()?.recip()),
        ],
    )
}

#[test]
fn reductions() -> Result<()> {
    let x = [wave(&[2, 3, 4], 1)];
    check_all(
        &x,
        &[
            (
                "sum of two",
                |x| x.sum_keepdim(&[0, 2]),
                |x| x.sum_keepdim((0, 2)),
            ),
            ("sum_all", Scaled::sum_all, Tensor::sum_all),
            (
                "mean of one",
                |x| x.mean_keepdim(&[1]),
                |x| x.mean_keepdim(1),
            ),
            (
                "mean of two",
                |x| x.mean_keepdim(&[0, 1]),
                |x| x.mean_keepdim((0, 1)),
            ),
            ("mean_all", Scaled::mean_all, Tensor::mean_all),
            ("max", |x| x.max_keepdim(1), |x| x.max_keepdim(1)),
            ("min", |x| x.min_keepdim(2), |x| x.min_keepdim(2)),
            ("max_all", Scaled::max_all, |x| x.flatten_all()?.max(0)),
            ("min_all", Scaled::min_all, |x| x.flatten_all()?.min(0)),
            (
                "prod of one",
                |x| x.prod_keepdim(&[1]),
                |x| (x.narrow(1, 0, 1)? * x.narrow(1, 1, 1)?)? * x.narrow(1, 2, 1)?,
            ),
        ],
    )?;
    let product = |x: &Tensor, dims: (usize, usize)| -> Result<Tensor> {
        let mut product = Tensor::ones((1, 1, 1), x.dtype(), x.device())?;
        for i in 0..x.dim(dims.0)? {
            for j in 0..x.dim(dims.1)? {
                let x = x.narrow(dims.0, i, 1)?.narrow(dims.1, j, 1)?;
                product = product.broadcast_mul(&x)?;
            }
        }
        Ok(product)
    };
    for dims in [(0, 1), (0, 2), (1, 2)] {
        Check::new("prod of two", &x).run(
            |x| x[0].prod_keepdim(&[dims.0, dims.1]),
            |x| product(&x[0], dims),
        )?;
    }
    // With a 0, the product divided by the element is undefined.
    let zero = Tensor::new(&[[0f64, 2.0, 3.0], [0.5, 0.0, 0.0]], &Device::Cpu)?;
    Check::new("prod with zeros", &[zero]).run(
        |x| x[0].prod_keepdim(&[1]),
        |x| Ok(((x[0].narrow(1, 0, 1)? * x[0].narrow(1, 1, 1)?)? * x[0].narrow(1, 2, 1)?)?),
    )
}

#[test]
fn moves() -> Result<()> {
    check_all(
        &[wave(&[2, 3, 5], 1)],
        &[
            ("reshape", |x| x.reshape(&[6, 5]), |x| x.reshape((6, 5))),
            ("flatten_all", Scaled::flatten_all, Tensor::flatten_all),
            ("transpose", |x| x.transpose(0, 2), |x| x.transpose(0, 2)),
            (
                "permute",
                |x| x.permute(&[1, 2, 0]),
                |x| x.permute((1, 2, 0)),
            ),
            ("narrow", |x| x.narrow(2, 1, 3), |x| x.narrow(2, 1, 3)),
            (
                "slice",
                |x| x.slice(2, 1, 5, 3),
                |x| x.index_select(&Tensor::new(&[1u32, 4], x.device())?, 2),
            ),
            (
                "slice up to the end",
                |x| x.slice(2, 0, 5, 2),
                |x| x.index_select(&Tensor::new(&[0u32, 2, 4], x.device())?, 2),
            ),
            (
                "slice of one",
                |x| x.slice(1, 1, 3, 2),
                |x| x.narrow(1, 1, 1),
            ),
            ("pad", |x| x.pad(1, 2, 1), |x| x.pad_with_zeros(1, 2, 1)),
            ("reverse", |x| x.reverse(1), |x| x.flip(&[1])),
            (
                "broadcast_as",
                |x| x.broadcast_as(&[4, 2, 3, 5]),
                |x| x.broadcast_as((4, 2, 3, 5)),
            ),
            (
                "squeeze",
                |x| x.narrow(0, 1, 1)?.squeeze(0),
                |x| x.narrow(0, 1, 1)?.squeeze(0),
            ),
            ("unsqueeze", |x| x.unsqueeze(2), |x| x.unsqueeze(2)),
        ],
    )
}

type Binary = (
    &'static str,
    fn(&Scaled, &Scaled) -> Result<Scaled>,
    fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
);

#[test]
fn both_operands_broadcast() -> Result<()> {
    let rows: &[Binary] = &[
        ("add", Scaled::add, Tensor::broadcast_add),
        ("sub", Scaled::sub, Tensor::broadcast_sub),
        ("mul", Scaled::mul, Tensor::broadcast_mul),
        ("div", Scaled::div, Tensor::broadcast_div),
        ("maximum", Scaled::maximum, Tensor::broadcast_maximum),
        ("minimum", Scaled::minimum, Tensor::broadcast_minimum),
        (
            "where_cond",
            |a, b| Scaled::where_cond(&Tensor::new(&[0u8, 1, 0], a.device())?, a, b),
            |a, b| {
                let mask = Tensor::new(&[0f64, 1., 0.], a.device())?.to_dtype(a.dtype())?;
                a.broadcast_mul(&mask)?
                    .broadcast_add(&b.broadcast_mul(&(1.0 - mask)?)?)
            },
        ),
    ];
    for (a, b) in [
        (&[2, 1][..], &[1, 3][..]),
        (&[1, 3], &[4, 2, 1]),
        (&[], &[2, 3]),
        (&[1, 1, 3], &[]),
    ] {
        let inputs = [wave(a, 1), wave(b, 2)];
        for (name, scaled, plain) in rows {
            Check::new(name, &inputs)
                .run(|x| scaled(&x[0], &x[1]), |x| Ok(plain(&x[0], &x[1])?))?;
        }
    }
    Ok(())
}

/// The operators equal the methods, and take plain tensors and constants on the right.
#[test]
fn operators() -> Result<()> {
    let plain = wave(&[3], 3);
    let inputs = [wave(&[2, 3], 1), wave(&[2, 3], 2)];
    Check::new("operators", &inputs).run(
        |x| {
            let plain = plain.to_dtype(x[0].data()?.dtype())?;
            let (a, b) = (&x[0], &x[1]);
            let sum = ((((a + b)? * a)? - 0.3)? / &plain)?;
            ((((sum + &plain)? * 0.7)? - &plain)? / 1.7)? * &plain
        },
        |x| {
            let plain = plain.to_dtype(x[0].dtype())?;
            let (a, b) = (&x[0], &x[1]);
            let sum = (((a + b)? * a)? - 0.3)?.broadcast_div(&plain)?;
            let sum = (sum.broadcast_add(&plain)? * 0.7)?.broadcast_sub(&plain)?;
            Ok((sum / 1.7)?.broadcast_mul(&plain)?)
        },
    )
}

#[test]
fn selections() -> Result<()> {
    let (a, b) = (wave(&[3, 4], 1), wave(&[3, 4], 2));
    let row = wave(&[4], 3);
    Check::new("maximum", &[a.clone(), b.clone()])
        .run(|x| x[0].maximum(&x[1]), |x| Ok(x[0].maximum(&x[1])?))?;
    Check::new("maximum with a row", &[a.clone(), row.clone()]).run(
        |x| x[0].maximum(&x[1]),
        |x| Ok(x[0].broadcast_maximum(&x[1])?),
    )?;
    Check::new("minimum", &[row.clone(), a.clone()]).run(
        |x| x[0].minimum(&x[1]),
        |x| Ok(x[0].broadcast_minimum(&x[1])?),
    )?;
    let mask =
        Tensor::from_iter((0..12).map(|i| u8::from(i % 3 == 0)), &Device::Cpu)?.reshape((3, 4))?;
    Check::new("where_cond", &[a.clone(), b.clone()]).run(
        |x| Scaled::where_cond(&mask, &x[0], &x[1]),
        |x| Ok(mask.where_cond(&x[0], &x[1])?),
    )?;
    let wide_mask = mask.narrow(0, 0, 1)?;
    Check::new("where_cond of rows", &[a.clone(), row.clone()]).run(
        |x| Scaled::where_cond(&wide_mask, &x[0], &x[1]),
        |x| {
            let mask = wide_mask.broadcast_as((3, 4))?;
            Ok(mask.where_cond(&x[0], &x[1].broadcast_as((3, 4))?)?)
        },
    )?;
    let short = wave(&[1, 4], 4);
    Check::new("cat", &[a.clone(), short, b.clone()]).run(
        |x| Scaled::cat(&[&x[0], &x[1], &x[2], &x[0]], 0),
        |x| Ok(Tensor::cat(&[&x[0], &x[1], &x[2], &x[0]], 0)?),
    )?;
    Check::new("stack", &[a, b]).run(
        |x| Scaled::stack(&[&x[0], &x[1]], 1),
        |x| Ok(Tensor::stack(&[&x[0], &x[1]], 1)?),
    )
}

/// Ties are handled as in candle: two operands get half each, and every largest element of a reduction gets the whole cotangent.
#[test]
fn ties() -> Result<()> {
    use fp8_scaled::ScaledVar;
    let x = ScaledVar::new("x", &Tensor::new(&[1f32, 2.0, 2.0], &Device::Cpu)?)?;
    let y = Scaled::from_parts(&Tensor::new(&[1f32, 1.0, 4.0], &Device::Cpu)?, 1.0)?;
    for (loss, expected) in [
        (x.value().maximum(&y)?.sum_all()?, [0.5, 1.0, 0.0]),
        (x.value().minimum(&y)?.sum_all()?, [0.5, 0.0, 1.0]),
        (x.value().max_all()?, [0.0, 1.0, 1.0]),
        (
            x.value().relu()?.sub(&y)?.abs()?.sum_all()?,
            [0.0, 1.0, -1.0],
        ),
    ] {
        let grads = loss.backward()?;
        let grad = grads.get(&x).map(Scaled::to_vec1).transpose()?;
        assert_eq!(grad.as_deref(), Some(&expected[..]));
    }
    assert!(!x.value().sign()?.is_tracked());
    assert_eq!(
        x.value().powi(0)?.to_tensor(DType::F32)?.to_vec1::<f32>()?,
        [1.0; 3]
    );
    Ok(())
}
