//! Norms against their definition.

use super::*;
use crate::ops::test_support::{DTYPES, assert_same_as_composed, wave};
use candle_core::Var;
use fp8_test_support::models::{self, Model};

#[test]
fn fused_equals_composed() -> Result<()> {
    for dtype in DTYPES {
        // More than one block of rows, and a row length that does not fill whole vectors.
        let args = [wave(&[3, 97, 101], 1), wave(&[101], 2), wave(&[101], 3)];
        for center in [true, false] {
            let norm = Norm { center, eps: 1e-5 };
            let (op, composed) = (norm, norm);
            let model = Model::Norm(models::Norm { center, eps: 1e-5 });
            assert_same_as_composed(
                dtype,
                &args,
                &model,
                |a| op.apply(&a[0], &a[1], Some(&a[2])),
                |a| composed.composed(&a[0], &a[1], Some(&a[2])),
            )?;
            assert_same_as_composed(
                dtype,
                &args[..2],
                &model,
                |a| op.apply(&a[0], &a[1], None),
                |a| composed.composed(&a[0], &a[1], None),
            )?;
        }
    }
    Ok(())
}

/// Parameters in f32 of values in 16 bits: results and gradients are those in f32, rounded once, and gradients of parameters keep their
/// dtype.
#[test]
fn parameters_in_f32_are_not_rounded() -> Result<()> {
    let (weight, bias) = (wave(&[101], 2), wave(&[101], 3));
    let parameters = [&weight, &bias].map(|x| x.to_dtype(DType::F32));
    let [weight, bias] = parameters;
    let (weight, bias) = (Var::from_tensor(&weight?)?, Var::from_tensor(&bias?)?);
    for dtype in [DType::BF16, DType::F16] {
        for center in [true, false] {
            let norm = Norm { center, eps: 1e-5 };
            let x = Var::from_tensor(&wave(&[97, 101], 1).to_dtype(dtype)?)?;
            let run = |x: &Tensor| -> Result<_> {
                let y = norm.apply(x, &weight, Some(&bias))?;
                let grads = y.to_dtype(DType::F32)?.sqr()?.sum_all()?.backward()?;
                Ok((y, grads))
            };
            let wide = Var::from_tensor(&x.to_dtype(DType::F32)?)?;
            let ((y, grads), (wide_y, _)) = (run(&x)?, run(&wide)?);
            let rounded = wide_y.to_dtype(dtype)?;
            assert_eq!(bits(&y)?, bits(&rounded)?, "{dtype:?} {center}");
            // The gradient that reaches the norm is that of the rounded result.
            let grad = (rounded.to_dtype(DType::F32)? * 2.)?.to_dtype(dtype)?;
            let wide_grad = grad.to_dtype(DType::F32)?;
            let [dx, dw, db] = norm.backward(&wide, &weight, &wide_grad, 1.)?;
            let got = |x: &Tensor| grads.get(x).cloned().ok_or("no gradient");
            assert_eq!(bits(&got(&x).unwrap())?, bits(&dx.to_dtype(dtype)?)?);
            for (parameter, expected) in [(&weight, dw), (&bias, db)] {
                let gradient = got(parameter).unwrap();
                assert_eq!(gradient.dtype(), DType::F32);
                assert_eq!(bits(&gradient)?, bits(&expected)?);
            }
        }
    }
    // Other dtypes are errors that name the parameter.
    let x = wave(&[4, 101], 1).to_dtype(DType::F32)?;
    let narrow = weight.to_dtype(DType::BF16)?;
    let error = norm_error(&x, &narrow, None);
    assert!(error.contains("weight"), "{error}");
    let x = x.to_dtype(DType::BF16)?;
    let error = norm_error(&x, &weight, Some(&bias.to_dtype(DType::BF16)?));
    assert!(error.contains("bias"), "{error}");
    Ok(())
}

fn norm_error(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> String {
    super::layer_norm(x, weight, bias, 1e-5)
        .unwrap_err()
        .to_string()
}

fn bits(x: &Tensor) -> Result<Vec<u32>> {
    let values = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.iter().map(|x| x.to_bits()).collect())
}
