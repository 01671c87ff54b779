//! Products of FP8 matrices of any shape.

use crate::gradient_check::{values, wave};
use candle_core::{D, DType, Tensor};
use fp8_core::Format;
use fp8_scaled::Result;
use fp8_scaled::{MatmulPrecision, Scaled, ScaledOptions, ScaledVar, as_scaled, scaled_scope};

/// The product by its definition, the same for all shapes.
fn expected(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let products = a
        .unsqueeze(D::Minus1)?
        .broadcast_mul(&b.unsqueeze(b.rank() - 2)?)?;
    Ok(products.sum(products.rank() - 2)?)
}

fn near(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
    for (got, expected) in got.iter().zip(expected) {
        let error = (got - expected).abs();
        assert!(error <= tolerance * largest, "{what}: {got} {expected}");
    }
}

/// A product, its gradients, and the inputs as the product read them.
fn product(a: &[usize], b: &[usize]) -> Result<(Scaled, [Scaled; 2], [Tensor; 2])> {
    let var = |dims: &[usize], seed, scale: f32| -> Result<ScaledVar> {
        // E4M3 represents these values, so the casts of the scope change nothing.
        let x = as_scaled(&wave(dims, seed), None)?.astype(Format::E4M3)?;
        ScaledVar::from_scaled("x", &Scaled::from_parts(&x.data()?, scale)?)
    };
    let (a, b) = (var(a, 1, 4.0)?, var(b, 2, 0.5)?);
    let y = a.value().matmul(&b.value())?;
    let ones = Scaled::from_parts(&Tensor::ones(y.dims(), DType::F16, y.device())?, 2.0)?;
    let grads = y.backward_with(&ones)?;
    let of = |var: &ScaledVar| grads.get(var).cloned().unwrap();
    let plain = |var: &ScaledVar| var.value().to_tensor(DType::F64);
    Ok((y, [of(&a), of(&b)], [plain(&a)?, plain(&b)?]))
}

#[test]
fn dimensions_of_size_zero_and_one() -> Result<()> {
    let leads: [[&[usize]; 2]; 6] = [
        [&[], &[]],
        [&[3], &[]],
        [&[], &[3]],
        [&[2, 1], &[1, 3]],
        [&[1], &[1]],
        [&[0], &[1]],
    ];
    for precision in [MatmulPrecision::Data, MatmulPrecision::FP8] {
        let _scope = scaled_scope(ScaledOptions::default().with_matmul(precision));
        for m in [0, 1, 5] {
            for k in [0, 1, 7] {
                for n in [0, 1, 3] {
                    for [a_lead, b_lead] in leads {
                        let (a, b) = ([a_lead, &[m, k]].concat(), [b_lead, &[k, n]].concat());
                        let what = format!("{a:?} {b:?} {precision:?}");
                        let (y, [grad_a, grad_b], [plain_a, plain_b]) =
                            product(&a, &b).unwrap_or_else(|error| panic!("{what}: {error}"));
                        let plain = expected(&plain_a, &plain_b)?;
                        assert_eq!(y.dims(), plain.dims(), "{what}");
                        near(&what, &values(&y)?, &plain.flatten_all()?.to_vec1()?, 1e-3);
                        assert_eq!((grad_a.dims(), grad_b.dims()), (&a[..], &b[..]), "{what}");
                        // The cotangent is 2 everywhere.
                        let g = (plain.ones_like()? * 2.0)?;
                        let sums = |full: Tensor, dims: &[usize]| -> Result<Vec<f64>> {
                            let mut full = full;
                            while full.rank() > dims.len() {
                                full = full.sum(0)?;
                            }
                            for (i, &size) in dims.iter().enumerate() {
                                if size == 1 && full.dim(i)? != 1 {
                                    full = full.sum_keepdim(i)?;
                                }
                            }
                            Ok(full.flatten_all()?.to_vec1()?)
                        };
                        let of_a =
                            sums(expected(&g, &plain_b.transpose(D::Minus2, D::Minus1)?)?, &a)?;
                        let of_b =
                            sums(expected(&plain_a.transpose(D::Minus2, D::Minus1)?, &g)?, &b)?;
                        near(&what, &values(&grad_a)?, &of_a, 2e-3);
                        near(&what, &values(&grad_b)?, &of_b, 2e-3);
                    }
                }
            }
        }
    }
    Ok(())
}
