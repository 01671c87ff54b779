//! Casts of values as they are made against casts of the made tensors.

use crate::base::data::codes::GemmCodes;
use crate::base::data::made::Made;
use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::spec::{FirstScale, ScaleSource};
use crate::cast::state::{AmaxRecorder, Role, Slot, StepCells};
use crate::cast::tensor::Quantized;
use crate::ops::{Activation, norm};
use candle_core::{DType, Device, Tensor};
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::{Cast, DelayedRule, Format, Granularity};

/// None without a GPU.
fn device() -> Option<Device> {
    let device = fp8_test_support::device();
    device.is_cuda().then_some(device)
}

fn wave(dims: &[usize], seed: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let count: usize = dims.iter().product();
    let values = (0..count).map(|i| ((i * 37 + 11 * seed) as f32 * 0.61).sin() * 3.);
    let x = Tensor::from_iter(values, device)?.reshape(dims)?;
    Ok(x.to_dtype(dtype)?)
}

fn delayed(format: Format, device: &Device) -> Result<Quantizer> {
    let slot = Slot::alone("fc", Role::Input, 1, device)?;
    slot.restore(
        &Tensor::full(48f32, 1, device)?,
        &Tensor::full(2f32, 1, device)?,
    )?;
    let step = StepCells::new(slot.table())?;
    let source = ScaleSource::Delayed {
        slot,
        rule: DelayedRule::default(),
        first: FirstScale::OwnAmax,
    };
    let quantizer = Quantizer::new(Cast::new(format), Granularity::Tensorwise, source);
    Ok(quantizer.with_recorder(AmaxRecorder::new(step, 0, true)))
}

/// The tensor that `made` stands for.
fn make(made: &Made<'_>) -> Result<Tensor> {
    match *made {
        Made::Stored(x) => Ok(x.clone()),
        Made::Norm {
            center,
            x,
            weight,
            bias,
            eps,
        } => norm::forward(center, x, weight, bias, eps),
        Made::Activation { activation, x } => activation.apply(x),
        Made::ActivationGradient {
            activation,
            x,
            grad,
        } => activation.backward(x, grad),
    }
}

fn check(made: &Made<'_>, what: &str) -> Result<()> {
    let y = make(made)?;
    let (device, bytes) = (y.device(), |x: &Tensor| x.flatten_all()?.to_vec1::<u8>());
    for format in [Format::E4M3, Format::E5M2] {
        for both in [false, true] {
            let quantizer = delayed(format, device)?;
            let cast = quantizer.quantize_and_sum(made, both, Some(DType::F32))?;
            let Some((got, Some(sums))) = cast else {
                panic!("{what}: no kernel");
            };
            let expected = quantizer.quantize_for(&y, Cols, both)?;
            let at = format!("{what} {format} {both}");
            let codes = |cast: &Quantized| bytes(cast.tensor.codes());
            assert_eq!(codes(&got)?, codes(&expected)?, "{at}");
            assert_eq!(got.tensor.dims(), expected.tensor.dims(), "{at}");
            let other = |cast: &Quantized| match cast.tensor.operand(Rows).codes {
                GemmCodes::Transposed(codes) => Some(codes.clone()),
                _ => None,
            };
            assert_eq!(other(&got).is_some(), both, "{at}");
            if let (Some(got), Some(expected)) = (other(&got), other(&expected)) {
                assert_eq!(bytes(&got)?, bytes(&expected)?, "{at} transposed");
            }
            let amax = |cast: &Quantized| -> Result<Vec<f32>> {
                Ok(cast.amax.as_ref().unwrap().to_vec1()?)
            };
            assert_eq!(amax(&got)?, amax(&expected)?, "{at}");
            // Sums of rows that hardly cancel, in another order: each rounding is at most 2^-24 of what was added up.
            let (rows, cols) = made.matrix();
            let y = y.to_dtype(DType::F64)?.reshape((rows, cols))?;
            let exact = y.sum(0)?.to_vec1::<f64>()?;
            let sizes = y.abs()?.sum(0)?.to_vec1::<f64>()?;
            for (col, got) in sums.to_vec1::<f32>()?.into_iter().enumerate() {
                let error = (f64::from(got) - exact[col]).abs();
                let bound = rows as f64 * 2f64.powi(-24) * sizes[col];
                assert!(error <= bound, "{at}, column {col}: {got}, {}", exact[col]);
            }
        }
    }
    Ok(())
}

#[test]
fn values_cast_as_they_are_made_have_the_codes_of_the_tensor() -> Result<()> {
    let Some(device) = device() else {
        println!("skipped: no CUDA device");
        return Ok(());
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        // Several tiles, some in part; a batch of matrices; one tile.
        for dims in [vec![272, 144], vec![2, 8, 400], vec![16, 16]] {
            let what = |name: &str| format!("{name} {dtype:?} {dims:?}");
            let x = wave(&dims, 1, dtype, &device)?;
            let last = dims[dims.len() - 1];
            let weight = wave(&[last], 2, dtype, &device)?;
            check(&Made::Stored(&x), &what("stored"))?;
            for (center, bias) in [(true, Some(&weight)), (false, None)] {
                let made = Made::Norm {
                    center,
                    x: &x,
                    weight: &weight,
                    bias,
                    eps: 1e-5,
                };
                check(&made, &what("norm"))?;
            }
            for activation in Activation::all() {
                let mut wide = dims.clone();
                if activation.is_gated() {
                    wide[dims.len() - 1] *= 2;
                }
                let (x, grad) = (
                    wave(&wide, 3, dtype, &device)?,
                    wave(&dims, 4, dtype, &device)?,
                );
                let (x, grad) = (&x, &grad);
                let name = activation.to_string();
                check(&Made::Activation { activation, x }, &what(&name))?;
                let made = Made::ActivationGradient {
                    activation,
                    x,
                    grad,
                };
                check(&made, &what(&format!("gradient of {name}")))?;
            }
        }
    }
    Ok(())
}

#[test]
fn what_tiles_do_not_fill_is_left_to_other_casts() -> Result<()> {
    let Some(device) = device() else {
        println!("skipped: no CUDA device");
        return Ok(());
    };
    let whole = wave(&[64, 64], 1, DType::BF16, &device)?;
    let quantizer = delayed(Format::E4M3, &device)?;
    let casts = |x: &Tensor, quantizer: &Quantizer| -> Result<bool> {
        Ok(quantizer.quantize_made(&Made::Stored(x), true)?.is_some())
    };
    assert!(casts(&whole, &quantizer)?);
    for x in [
        wave(&[64, 24], 1, DType::BF16, &device)?,
        wave(&[24, 64], 1, DType::BF16, &device)?,
        whole.narrow(1, 0, 32)?,
        whole.t()?,
        whole.flatten_all()?.narrow(0, 1, 1024)?.reshape((32, 32))?,
        whole.to_dtype(DType::F64)?,
    ] {
        assert!(!casts(&x, &quantizer)?, "{:?}", x.layout());
    }
    for other in [
        quantizer.clone().with_granularity(Granularity::Rowwise),
        delayed(Format::E4M3Fnuz, &device)?,
    ] {
        assert!(!casts(&whole, &other)?);
    }
    Ok(())
}
