//! Bad input gives a typed error with the offending value, and a message that names it.

use candle_core::{DType, Device, Tensor};
use fp8_candle::Error as Operand;
use fp8_core::Format;
use fp8_scaled::{Error, Result};
use fp8_scaled::{
    Norm, ScaleCheck, Scaled, ScaledError, ScaledOptions, ScaledVar, as_scaled, scaled_scope,
};

fn ones(dims: &[usize]) -> Result<Tensor> {
    Ok(Tensor::ones(dims, DType::F32, &Device::Cpu)?)
}

/// Fails unless the error matches and its message contains the text.
macro_rules! refused {
    ($result:expr, $pattern:pat $(if $guard:expr)?, $text:expr) => {
        match $result {
            Err(error) => {
                assert!(matches!(&error, $pattern $(if $guard)?), "{error:?}");
                let message = error.to_string();
                assert!(message.contains($text), "no {:?} in: {message}", $text);
            }
            Ok(_) => panic!("{} was accepted", stringify!($result)),
        }
    };
}

#[test]
fn invalid_scales() -> Result<()> {
    let x = ones(&[2])?;
    let of = |scale| Scaled::from_parts(&x, scale);
    refused!(
        of(3.0),
        Error::Scaled(ScaledError::NotPowerOfTwo { got: 3.0 }),
        "3e0"
    );
    refused!(
        of(0.0),
        Error::Scaled(ScaledError::NotPowerOfTwo { got: 0.0 }),
        "0e0"
    );
    refused!(
        of(1e-40),
        Error::Scaled(ScaledError::NotPowerOfTwo { .. }),
        "1e-40"
    );
    refused!(
        of(-2.0),
        Error::Scaled(ScaledError::Negative { got: -2.0 }),
        "-2"
    );
    refused!(of(f32::NAN), Error::Scaled(ScaledError::NotFinite { got }) if got.is_nan(), "NaN");
    refused!(
        of(f32::INFINITY),
        Error::Scaled(ScaledError::NotFinite { .. }),
        "inf"
    );
    let codes = Tensor::zeros(2, DType::U8, &Device::Cpu)?;
    refused!(
        Scaled::from_codes(&codes, Format::E4M3, 6.0),
        Error::Scaled(ScaledError::NotPowerOfTwo { got: 6.0 }),
        "6e0"
    );
    let one = of(1.0)?;
    refused!(
        as_scaled(&x, 5.0),
        Error::Scaled(ScaledError::NotPowerOfTwo { got: 5.0 }),
        "5e0"
    );
    refused!(
        one.set_scaling(0.0),
        Error::Scaled(ScaledError::NotPowerOfTwo { .. }),
        "0e0"
    );
    refused!(
        one.rebalance(-4.0),
        Error::Scaled(ScaledError::Negative { got: -4.0 }),
        "-4"
    );

    let _lenient = scaled_scope(ScaledOptions::default().with_check(ScaleCheck::Lenient));
    assert_eq!(of(3.0)?.to_vec1()?, [3.0, 3.0]);
    assert_eq!(of(0.0)?.to_vec1()?, [0.0, 0.0]);
    refused!(
        of(-2.0),
        Error::Scaled(ScaledError::Negative { got: -2.0 }),
        "-2"
    );
    refused!(
        of(f32::NAN),
        Error::Scaled(ScaledError::NotFinite { .. }),
        "NaN"
    );
    refused!(
        one.rebalance(0.0),
        Error::Scaled(ScaledError::Zero { op: "rebalance" }),
        "rebalance"
    );
    Ok(())
}

#[test]
fn zero_scales_where_a_rule_has_no_result() -> Result<()> {
    let x = Scaled::from_parts(&ones(&[2])?, 4.0)?;
    let zero = Scaled::zeros(2, DType::F32, &Device::Cpu)?;
    refused!(
        x.div(&zero),
        Error::Scaled(ScaledError::Zero { op: "div" }),
        "div"
    );
    refused!(
        x.div_constant(0.0),
        Error::Scaled(ScaledError::Zero { op: "div" }),
        "div"
    );
    refused!(
        zero.log(),
        Error::Scaled(ScaledError::Zero { op: "log" }),
        "log"
    );
    refused!(
        zero.rsqrt(),
        Error::Scaled(ScaledError::Zero { op: "rsqrt" }),
        "rsqrt"
    );
    refused!(
        zero.recip(),
        Error::Scaled(ScaledError::Zero { op: "recip" }),
        "recip"
    );
    refused!(
        zero.powi(-2),
        Error::Scaled(ScaledError::Zero { op: "powi" }),
        "powi"
    );
    Ok(())
}

#[test]
fn data_of_other_dtypes() -> Result<()> {
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let integers = Tensor::zeros(2, dtype, &Device::Cpu)?;
        let name = format!("{dtype:?}");
        refused!(Scaled::from_parts(&integers, 1.0), Error::Fp8(Operand::DType { got, .. }) if *got == dtype, &name);
        refused!(as_scaled(&integers, None), Error::Fp8(Operand::DType { got, .. }) if *got == dtype, &name);
        refused!(ScaledVar::new("w", &integers), Error::Fp8(Operand::DType { got, .. }) if *got == dtype, &name);
        let x = Scaled::from_parts(&ones(&[2])?, 1.0)?;
        refused!(x.astype(dtype), Error::Fp8(Operand::DType { got, .. }) if *got == dtype, &name);
        refused!(x.cast_on_forward(dtype), Error::Fp8(Operand::DType { got, .. }) if *got == dtype, &name);
        refused!(Scaled::zeros(2, dtype, &Device::Cpu), Error::Fp8(Operand::DType { got, .. }) if *got == dtype, &name);
    }
    let x = Scaled::from_parts(&ones(&[2])?, 1.0)?;
    let mask = ones(&[2])?;
    refused!(
        Scaled::where_cond(&mask, &x, &x),
        Error::Fp8(Operand::DType {
            got: DType::F32,
            ..
        }),
        "mask"
    );
    let fp8 = x.astype(Format::E5M2)?;
    refused!(
        ScaledVar::from_scaled("w", &fp8),
        Error::Fp8Parameter {
            got: Format::E5M2,
            ..
        },
        "e5m2"
    );
    Ok(())
}

#[test]
fn shapes_that_do_not_fit() -> Result<()> {
    let x = Scaled::from_parts(&ones(&[2, 3])?, 1.0)?;
    let y = Scaled::from_parts(&ones(&[4])?, 1.0)?;
    let shape = "[2, 3]";
    type Binary = fn(&Scaled, &Scaled) -> Result<Scaled>;
    let pairs: [(&str, Binary); 6] = [
        ("add", Scaled::add),
        ("sub", Scaled::sub),
        ("mul", Scaled::mul),
        ("div", Scaled::div),
        ("maximum", Scaled::maximum),
        ("minimum", Scaled::minimum),
    ];
    for (name, op) in pairs {
        refused!(op(&x, &y), Error::Fp8(Operand::Shape { op, got, .. }) if *op == name && *got == [4], name);
    }
    refused!(x.eq(&y), Error::Fp8(Operand::Shape { op: "eq", .. }), "[4]");
    refused!(
        Scaled::where_cond(&Tensor::zeros(5, DType::U8, &Device::Cpu)?, &x, &x),
        Error::Fp8(Operand::Shape {
            op: "where_cond",
            ..
        }),
        "[5]"
    );
    refused!(
        x.reshape(&[7]),
        Error::Fp8(Operand::Shape { op: "reshape", .. }),
        shape
    );
    refused!(
        x.broadcast_as(&[2, 2]),
        Error::Fp8(Operand::Shape {
            op: "broadcast_as",
            ..
        }),
        shape
    );
    refused!(
        x.broadcast_as(&[3]),
        Error::Fp8(Operand::Shape {
            op: "broadcast_as",
            ..
        }),
        shape
    );
    refused!(
        x.sum_keepdim(&[2]),
        Error::Fp8(Operand::Shape { op: "sum", .. }),
        "[2]"
    );
    refused!(
        x.mean_keepdim(&[2]),
        Error::Fp8(Operand::Shape { op: "mean", .. }),
        "[2]"
    );
    refused!(
        x.prod_keepdim(&[5]),
        Error::Fp8(Operand::Shape { op: "prod", .. }),
        "[5]"
    );
    refused!(
        x.max_keepdim(2),
        Error::Fp8(Operand::Shape { op: "max", .. }),
        shape
    );
    refused!(
        x.narrow(0, 0, 0)?.max_keepdim(0),
        Error::Fp8(Operand::Shape { op: "max", .. }),
        "[0, 3]"
    );
    refused!(
        x.argmax(2),
        Error::Fp8(Operand::Shape { op: "argmax", .. }),
        shape
    );
    refused!(
        x.narrow(0, 0, 0)?.argmin_all(),
        Error::Fp8(Operand::Shape { op: "argmin", .. }),
        "[0]"
    );
    refused!(
        x.transpose(0, 2),
        Error::Fp8(Operand::Shape {
            op: "transpose",
            ..
        }),
        shape
    );
    refused!(
        x.permute(&[0, 0]),
        Error::Fp8(Operand::Shape { op: "permute", .. }),
        shape
    );
    refused!(
        x.permute(&[0]),
        Error::Fp8(Operand::Shape { op: "permute", .. }),
        shape
    );
    refused!(
        x.narrow(1, 2, 2),
        Error::Fp8(Operand::Shape { op: "narrow", .. }),
        shape
    );
    refused!(
        x.narrow(1, usize::MAX, 2),
        Error::Fp8(Operand::Shape { op: "narrow", .. }),
        shape
    );
    refused!(
        x.slice(1, 0, 4, 1),
        Error::Fp8(Operand::Shape { op: "slice", .. }),
        shape
    );
    refused!(
        x.slice(1, 2, 1, 1),
        Error::Fp8(Operand::Shape { op: "slice", .. }),
        shape
    );
    refused!(
        x.slice(1, 0, 2, 0),
        Error::Fp8(Operand::Shape { op: "slice", .. }),
        shape
    );
    refused!(
        x.pad(2, 1, 1),
        Error::Fp8(Operand::Shape { op: "pad", .. }),
        shape
    );
    refused!(
        x.reverse(2),
        Error::Fp8(Operand::Shape { op: "reverse", .. }),
        shape
    );
    refused!(
        x.squeeze(0),
        Error::Fp8(Operand::Shape { op: "squeeze", .. }),
        shape
    );
    refused!(
        x.unsqueeze(3),
        Error::Fp8(Operand::Shape {
            op: "unsqueeze",
            ..
        }),
        shape
    );
    refused!(
        Scaled::cat(&[], 0),
        Error::Fp8(Operand::Shape { op: "cat", .. }),
        "part"
    );
    refused!(
        Scaled::cat(&[&x, &y], 0),
        Error::Fp8(Operand::Shape { op: "cat", .. }),
        "[4]"
    );
    refused!(
        Scaled::cat(&[&x, &x], 2),
        Error::Fp8(Operand::Shape { op: "cat", .. }),
        "dimension 2"
    );
    refused!(
        Scaled::stack(&[&x, &y], 0),
        Error::Fp8(Operand::Shape { op: "cat", .. }),
        "[1, 4]"
    );
    let w = ScaledVar::new("weight", &ones(&[2])?)?;
    refused!(
        w.set(&y),
        Error::Fp8(Operand::Shape {
            op: "ScaledVar::set",
            ..
        }),
        "weight"
    );
    Ok(())
}

#[test]
fn graphs() -> Result<()> {
    let w = ScaledVar::new("w", &ones(&[3])?)?;
    let y = w.value().square()?;
    refused!(y.backward(), Error::NotScalar { op: "backward", got } if *got == [3], "[3]");
    refused!(
        y.to_scalar(),
        Error::NotScalar {
            op: "to_scalar",
            ..
        },
        "[3]"
    );
    let other = Scaled::from_parts(&ones(&[4])?, 1.0)?;
    refused!(y.backward_with(&other), Error::Fp8(Operand::Shape { op: "backward_with", got, .. }) if *got == [4], "[3]");
    let loss = y.sum_all()?;
    loss.backward()?;
    refused!(
        loss.backward(),
        Error::GraphUsed { op: "reshape" },
        "reshape"
    );
    // A part of the graph that two losses share.
    refused!(
        y.max_all()?.backward(),
        Error::GraphUsed { op: "square" },
        "square"
    );
    Ok(())
}

/// Data without a finite norm stay as they are, without an error.
#[test]
fn rescaling_of_non_finite_data() -> Result<()> {
    for bad in [f32::INFINITY, f32::NAN] {
        let x = Scaled::from_parts(&Tensor::new(&[8f32, bad], &Device::Cpu)?, 2.0)?;
        for norm in [Norm::Max, Norm::L1, Norm::L2] {
            assert_eq!(
                x.dynamic_rescale(norm)?.scale(),
                x.scale(),
                "{bad} {norm:?}"
            );
        }
    }
    Ok(())
}
