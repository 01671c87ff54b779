//! Matrix products: values, gradients, FP8, counters.

use crate::gradient_check::{Check, values, wave};
use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use fp8_scaled::Result;
use fp8_scaled::{
    MatmulPrecision, Scaled, ScaledDType, ScaledOptions, ScaledVar, as_scaled, scaled_scope,
};

fn f16(dims: &[usize], seed: usize, scale: f32) -> Result<Scaled> {
    Scaled::from_parts(&wave(dims, seed).to_dtype(DType::F16)?, scale)
}

fn data(x: &Scaled) -> Result<Vec<f64>> {
    Ok(x.data()?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

#[test]
fn gradients_of_matmul() -> Result<()> {
    for (a, b) in [
        (&[3, 5][..], &[5, 4][..]),
        (&[2, 3, 5], &[5, 4]),
        (&[2, 3, 5], &[2, 5, 4]),
        (&[3, 5], &[2, 5, 4]),
        (&[2, 1, 3, 5], &[4, 5, 2]),
    ] {
        Check::new("matmul", &[wave(a, 1), wave(b, 2)]).run(
            |x| x[0].matmul(&x[1]),
            |x| Ok(x[0].broadcast_matmul(&x[1])?),
        )?;
    }
    Ok(())
}

#[test]
fn products_of_f16_are_rounded_once() -> Result<()> {
    // 512 terms: f16 sums would be far off, and the factor 1/16 keeps the sum in range.
    let (a, b) = (f16(&[3, 512], 1, 4.0)?, f16(&[512, 2], 2, 0.5)?);
    let y = a.matmul(&b)?;
    assert_eq!(y.scale().to_f32(), 4.0 * 0.5 * 16.0);
    let exact = a
        .data()?
        .to_dtype(DType::F64)?
        .matmul(&b.data()?.to_dtype(DType::F64)?)?;
    let exact = (exact / 16.0)?.to_dtype(DType::F16)?.to_dtype(DType::F64)?;
    assert_eq!(data(&y)?, exact.flatten_all()?.to_vec1::<f64>()?);
    Ok(())
}

#[test]
fn fp8_products_are_those_of_the_decoded_values() -> Result<()> {
    let counters = ScaledOptions::default();
    let counted = counters.counters.clone();
    let _scope = scaled_scope(counters);
    for (a, b) in [
        (&[3, 64][..], &[64, 5][..]),
        (&[2, 3, 64], &[64, 5]),
        (&[2, 3, 64], &[2, 64, 5]),
        (&[3, 64], &[2, 64, 5]),
    ] {
        let a = f16(a, 1, 8.0)?.astype(Format::E4M3)?;
        let b = f16(b, 2, 0.25)?.astype(Format::E5M2)?;
        let y = a.matmul_to(&b, DType::F32)?;
        let plain = a.astype(DType::F32)?.matmul(&b.astype(DType::F32)?)?;
        assert_eq!(y.dims(), plain.dims());
        assert_eq!(y.scale(), plain.scale());
        for (got, expected) in data(&y)?.iter().zip(data(&plain)?) {
            assert!((got - expected).abs() < 1e-5, "{got} {expected}");
        }
        assert_eq!(a.matmul(&b)?.dtype(), ScaledDType::Float(DType::F16));
    }
    assert_eq!((counted.fp8_matmuls(), counted.other_matmuls()), (8, 4));
    Ok(())
}

/// Fails unless scales and data bits are equal.
fn same(a: &Scaled, b: &Scaled) -> Result<()> {
    assert_eq!(a.scale(), b.scale());
    assert_eq!(data(a)?, data(b)?);
    Ok(())
}

#[test]
fn casts_apply_when_differentiating() -> Result<()> {
    let x = ScaledVar::from_scaled("x", &f16(&[4, 16], 1, 1.0)?)?;
    let w = ScaledVar::from_scaled("w", &f16(&[16, 3], 2, 1.0)?)?;
    let (x8, w8) = (
        x.value().cast_on_forward(Format::E4M3)?,
        w.value().cast_on_forward(Format::E4M3)?,
    );
    let y = x8.matmul(&w8)?;
    assert!(y.is_tracked());
    same(&y, &x8.detach().matmul(&w8.detach())?)?;
    let plain = x.value().matmul(&w.value())?;
    assert_ne!(data(&y)?, data(&plain)?);
    // The gradients are products with the decoded codes.
    let g = f16(&[4, 3], 3, 0.5)?;
    let grads = y.backward_with(&g)?;
    let (decoded_x, decoded_w) = (
        x8.detach().astype(DType::F16)?,
        w8.detach().astype(DType::F16)?,
    );
    let turned = |x: &Scaled| Scaled::from_parts(&x.data()?.t()?.contiguous()?, x.scale().to_f32());
    same(grads.get(&x).unwrap(), &g.matmul(&turned(&decoded_w)?)?)?;
    same(grads.get(&w).unwrap(), &turned(&decoded_x)?.matmul(&g)?)?;
    Ok(())
}

#[test]
fn the_scope_multiplies_in_fp8_forward_and_backward() -> Result<()> {
    let options = ScaledOptions::default().with_matmul(MatmulPrecision::FP8);
    let counters = options.counters.clone();
    let x = ScaledVar::from_scaled("x", &f16(&[4, 16], 1, 2.0)?)?;
    let w = ScaledVar::from_scaled("w", &f16(&[16, 3], 2, 1.0)?)?;
    let y = {
        let _scope = scaled_scope(options);
        x.value().matmul(&w.value())?
    };
    let g = f16(&[4, 3], 3, 0.5)?;
    // Outside the scope: the backward pass uses the settings of the forward pass.
    let grads = y.backward_with(&g)?;
    assert_eq!((counters.fp8_matmuls(), counters.other_matmuls()), (3, 0));
    let (x8, w8, g8) = (
        x.value().detach().astype(Format::E4M3)?,
        w.value().detach().astype(Format::E4M3)?,
        g.astype(Format::E5M2)?,
    );
    let codes = |x: &Scaled| -> Result<Scaled> {
        let codes = x.codes().unwrap();
        Scaled::from_codes(
            &codes.codes().t()?.contiguous()?,
            codes.format(),
            x.scale().to_f32(),
        )
    };
    same(&y, &x8.matmul(&w8)?)?;
    same(grads.get(&x).unwrap(), &g8.matmul(&codes(&w8)?)?)?;
    same(grads.get(&w).unwrap(), &codes(&x8)?.matmul(&g8)?)?;
    assert_ne!(values(&y)?, values(&x.value().matmul(&w.value())?)?);
    Ok(())
}

#[test]
fn products_with_zero_scales_are_zeros() -> Result<()> {
    let zeros = Scaled::zeros((2, 3), DType::F16, &Device::Cpu)?;
    let inf = as_scaled(&Tensor::full(f32::INFINITY, (3, 2), &Device::Cpu)?, None)?;
    let y = zeros.matmul(&inf.astype(DType::F16)?)?;
    assert_eq!((y.scale().to_f32(), data(&y)?), (0.0, vec![0.0; 4]));
    Ok(())
}

#[test]
fn shapes_that_do_not_fit_are_errors() -> Result<()> {
    let a = f16(&[2, 3], 1, 1.0)?;
    for (b, message) in [
        (f16(&[2, 3], 1, 1.0)?, "[.., 3, n]"),
        (f16(&[3], 1, 1.0)?, "two dimensions"),
    ] {
        let error = a.matmul(&b).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let (a, b) = (f16(&[2, 2, 3], 1, 1.0)?, f16(&[3, 3, 2], 1, 1.0)?);
    let error = a.matmul(&b).unwrap_err().to_string();
    let parts = ["shape [3]", "broadcasts with [2]"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    Ok(())
}

#[test]
fn a_linear_layer_has_the_bits_of_product_and_sum() -> Result<()> {
    for matmul in [MatmulPrecision::Data, MatmulPrecision::FP8] {
        let options = ScaledOptions::default().with_matmul(matmul);
        let counters = options.counters.clone();
        let _scope = scaled_scope(options);
        // A bias smaller than the product, about equal, and larger.
        for bias_scale in [2f32.powi(-6), 16.0, 2f32.powi(9)] {
            let var = |name: &str, dims: &[usize], seed, scale| {
                ScaledVar::from_scaled(name, &f16(dims, seed, scale)?)
            };
            let x = var("x", &[2, 5, 64], 1, 4.0)?;
            let w = var("w", &[7, 64], 2, 0.5)?;
            let b = var("b", &[7], 3, bias_scale)?;
            let g = f16(&[2, 5, 7], 4, 0.25)?;
            let one = x.value().linear(&w.value(), Some(&b.value()))?;
            // The same codes and numbers, transposed.
            let turned = f16(&[7, 64], 2, 0.5)?.data()?.t()?.contiguous()?;
            let turned = ScaledVar::from_scaled("turned", &Scaled::from_parts(&turned, 0.5)?)?;
            let two = x.value().matmul(&turned.value())?.add(&b.value())?;
            same(&one, &two)?;
            let (one, two) = (one.backward_with(&g)?, two.backward_with(&g)?);
            same(one.get(&x).unwrap(), two.get(&x).unwrap())?;
            same(one.get(&b).unwrap(), two.get(&b).unwrap())?;
            let grad = two.get(&turned).unwrap();
            let grad = Scaled::from_parts(&grad.data()?.t()?.contiguous()?, grad.scale().to_f32())?;
            same(one.get(&w).unwrap(), &grad)?;
        }
        let (fp8, other) = (counters.fp8_matmuls(), counters.other_matmuls());
        assert_eq!((fp8.max(other), fp8.min(other)), (18, 0));
    }
    Ok(())
}

#[test]
fn a_cast_serves_every_product_that_reads_the_value() -> Result<()> {
    let _scope = scaled_scope(ScaledOptions::default().with_matmul(MatmulPrecision::FP8));
    let w = ScaledVar::from_scaled("w", &f16(&[3, 16], 2, 1.0)?)?;
    let x = f16(&[4, 16], 1, 1.0)?;
    let before = x.linear(&w.value(), None)?;
    // Data changed without an announcement: products still use the old codes.
    let zeros = Tensor::zeros((3, 16), DType::F16, &Device::Cpu)?;
    w.data_var().set(&zeros)?;
    same(&before, &x.linear(&w.value(), None)?)?;
    // After an announcement they are cast again.
    w.changed(w.scale());
    assert!(
        data(&x.linear(&w.value(), None)?)?
            .iter()
            .all(|&y| y == 0.0)
    );
    Ok(())
}

#[test]
fn convolutions_in_fp8_are_those_of_the_decoded_values() -> Result<()> {
    let options = ScaledOptions::default().with_matmul(MatmulPrecision::FP8);
    let counters = options.counters.clone();
    let x = ScaledVar::from_scaled("x", &f16(&[2, 4, 6, 6], 1, 4.0)?)?;
    let w = ScaledVar::from_scaled("w", &f16(&[6, 2, 3, 3], 2, 0.5)?)?;
    let g = f16(&[2, 6, 3, 3], 3, 2.0)?;
    let y = {
        let _scope = scaled_scope(options);
        x.value().conv2d(&w.value(), 1, 2, 1, 2)?
    };
    // n = 2 * 3 * 3 products in a sum: the root of 18 is 4.
    assert_eq!(y.scale().to_f32(), 4.0 * 0.5 * 4.0);
    let grads = y.backward_with(&g)?;
    assert_eq!((counters.fp8_matmuls(), counters.other_matmuls()), (3, 0));
    let decoded =
        |x: &Scaled, format| -> Result<Scaled> { x.detach().astype(format)?.astype(DType::F32) };
    let x32 = ScaledVar::from_scaled("x", &decoded(&x.value(), Format::E4M3)?)?;
    let w32 = ScaledVar::from_scaled("w", &decoded(&w.value(), Format::E4M3)?)?;
    let expected = x32.value().conv2d(&w32.value(), 1, 2, 1, 2)?;
    let expected_grads = expected.backward_with(&decoded(&g, Format::E5M2)?)?;
    let close = |got: &Scaled, expected: &Scaled| -> Result<()> {
        assert_eq!(got.scale(), expected.scale());
        for (got, expected) in data(got)?.iter().zip(data(expected)?) {
            // Half a step of f16 numbers up to 4, and f32 sums in another order.
            assert!(
                (got - expected).abs() <= 2f64.powi(-10) + 1e-5,
                "{got} {expected}"
            );
        }
        Ok(())
    };
    close(&y, &expected)?;
    close(grads.get(&x).unwrap(), expected_grads.get(&x32).unwrap())?;
    close(grads.get(&w).unwrap(), expected_grads.get(&w32).unwrap())
}

#[test]
fn a_factor_on_the_input_changes_scales_alone() -> Result<()> {
    let run = |exponent: i32, matmul| -> Result<Vec<(i32, Vec<f64>)>> {
        let _scope = scaled_scope(ScaledOptions::default().with_matmul(matmul));
        let var = |name: &str, dims: &[usize], seed, scale| {
            ScaledVar::from_scaled(name, &f16(dims, seed, scale)?)
        };
        let x = var("x", &[2, 3, 8, 8], 1, 2f32.powi(exponent))?;
        let kernel = var("kernel", &[4, 3, 3, 3], 2, 0.25)?;
        let w = var("w", &[5, 36], 3, 0.5)?;
        let square = var("square", &[5, 5], 4, 2.0)?;
        let y = x
            .value()
            .conv2d(&kernel.value(), 0, 1, 1, 1)?
            .max_pool2d(2)?
            .reshape(&[2, 36])?
            .dropout(0.25, 3)?
            .linear(&w.value(), None)?
            .matmul(&square.value())?;
        let grads = y.backward_with(&f16(&[2, 5], 5, 2f32.powi(-exponent))?)?;
        let mut out = vec![(y.scale().exponent().unwrap() - exponent, data(&y)?)];
        // Gradients of the weights do not change at all; that of the input changes with its cotangent.
        for (var, shift) in [(&x, -exponent), (&kernel, 0), (&w, 0), (&square, 0)] {
            let grad = grads.get(var).unwrap();
            out.push((grad.scale().exponent().unwrap() - shift, data(grad)?));
        }
        Ok(out)
    };
    for matmul in [MatmulPrecision::Data, MatmulPrecision::FP8] {
        let plain = run(0, matmul)?;
        for exponent in [20, -20, -60] {
            assert_eq!(run(exponent, matmul)?, plain);
        }
        assert!(plain.iter().all(|(_, data)| data.iter().any(|&x| x != 0.0)));
    }
    Ok(())
}

/// Saturated codes would hide them from the optimizer, which skips a step whose gradients are not finite.
#[test]
fn infinities_reach_the_results_of_products_in_fp8() -> Result<()> {
    let with = |dims: &[usize], bad: f32| -> Result<Scaled> {
        let mut values = wave(dims, 1)
            .to_dtype(DType::F32)?
            .flatten_all()?
            .to_vec1()?;
        values[1] = bad;
        Scaled::from_parts(&Tensor::from_vec(values, dims, &Device::Cpu)?, 1.)
    };
    let (x, w, image, kernel) = ([4, 6], [3, 6], [1, 2, 4, 4], [2, 2, 3, 3]);
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e9] {
        let is_lost = |x: &Scaled| -> Result<bool> { Ok(data(x)?.iter().all(|x| x.is_nan())) };
        for place in 0..3 {
            let value =
                |own: usize, dims: &[usize]| with(dims, if own == place { bad } else { 1. });
            let x = ScaledVar::from_scaled("x", &value(0, &x)?)?;
            let w = ScaledVar::from_scaled("w", &value(1, &w)?)?;
            let image = ScaledVar::from_scaled("image", &value(0, &image)?)?;
            let kernel = ScaledVar::from_scaled("kernel", &value(1, &kernel)?)?;
            let (y, z) = {
                let options = ScaledOptions::default().with_matmul(MatmulPrecision::FP8);
                let _scope = scaled_scope(options);
                let z = image.value().conv2d(&kernel.value(), 0, 1, 1, 1)?;
                (x.value().linear(&w.value(), None)?, z)
            };
            let (grads, convolved) = (
                y.backward_with(&value(2, &[4, 3])?)?,
                z.backward_with(&value(2, &[1, 2, 2, 2])?)?,
            );
            // The result reads x and w, the gradient of x those of w and y, the gradient of w those of x and y.
            let found = [&y, grads.get(&x).unwrap(), grads.get(&w).unwrap()];
            let of_image = [
                &z,
                convolved.get(&image).unwrap(),
                convolved.get(&kernel).unwrap(),
            ];
            for (result, (own, of_image)) in found.into_iter().zip(of_image).enumerate() {
                let reads = [[0, 1], [1, 2], [0, 2]][result].contains(&place);
                let expected = reads && !bad.is_finite();
                assert_eq!(is_lost(own)?, expected, "{bad} in {place}: {result}");
                assert_eq!(is_lost(of_image)?, expected, "{bad} in {place}: {result}");
            }
        }
    }
    // A cast that is asked for saturates.
    let codes = with(&[2, 2], f32::INFINITY)?.astype(Format::E4M3)?;
    assert_eq!(data(&codes.astype(DType::F32)?)?[1], 448.);
    Ok(())
}
