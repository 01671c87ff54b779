//! The largest pixels of windows, and their gradients.

use candle_core::{DType, Device, Tensor, Var};
use fp8_candle::ops::max_pool2d;
use fp8_candle::{Error, Result};
use fp8_test_support::{device, flat64, wave_f32};

/// The definition, which is torch's: the gradient of each window goes to its last NaN, or else to the first of its largest elements.
fn gradient(x: &[f64], dims: [usize; 4], size: usize, grad: &[f64]) -> Vec<f64> {
    let [batch, channels, height, width] = dims;
    let (rows, cols) = (height / size, width / size);
    let mut result = vec![0.; x.len()];
    for image in 0..batch * channels {
        for row in 0..rows {
            for col in 0..cols {
                let places = (0..size * size).map(|i| {
                    let (r, c) = (row * size + i / size, col * size + i % size);
                    (image * height + r) * width + c
                });
                let better =
                    |best: usize, place: usize| match x[place] > x[best] || x[place].is_nan() {
                        true => place,
                        false => best,
                    };
                let best = places.reduce(better).unwrap();
                result[best] += grad[(image * rows + row) * cols + col];
            }
        }
    }
    result
}

#[test]
fn the_gradient_goes_to_the_largest() -> Result<()> {
    for (dims, size) in [
        ([2, 3, 4, 6], 2),
        ([1, 2, 7, 5], 2),
        ([1, 1, 9, 8], 3),
        ([2, 1, 3, 3], 1),
        ([1, 1, 5, 5], 5),
    ] {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            // Rounded, so that some are equal.
            let x = (wave_f32(&dims, 1) * 3.)?.round()?.to_dtype(dtype)?;
            let x = Var::from_tensor(&x)?;
            let y = max_pool2d(&x, size)?;
            assert_eq!(y.dtype(), dtype);
            let plain = x.as_detached_tensor().max_pool2d(size)?;
            assert_eq!((y.dims(), flat64(&y)), (plain.dims(), flat64(&plain)));
            let factor = (wave_f32(y.dims(), 2) * 8.)?.round()?.to_dtype(dtype)?;
            let loss = (y * &factor)?.sum_all()?;
            let expected = gradient(&flat64(&x), dims, size, &flat64(&factor));
            for grads in [loss.backward()?, fp8_candle::wide::backward(&loss)?] {
                let got = flat64(grads.get(&x).unwrap());
                assert_eq!(got, expected, "{dims:?} {size} {dtype:?}");
            }
        }
    }
    Ok(())
}

/// Wherever it is in its window, and outside of windows it has no effect.
#[test]
fn nan_is_the_largest() -> Result<()> {
    let dims = [1, 2, 5, 4];
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        // The last row belongs to no window.
        for places in [
            vec![0],
            vec![1],
            vec![5],
            vec![0, 1],
            vec![1, 4],
            vec![7, 22],
            vec![17],
        ] {
            let mut values = flat64(&wave_f32(&dims, 1));
            values[2] = f64::INFINITY;
            values[3] = f64::NEG_INFINITY;
            for &place in &places {
                values[place] = f64::NAN;
            }
            let x = Tensor::from_slice(&values, &dims, &Device::Cpu)?.to_dtype(dtype)?;
            let x = Var::from_tensor(&x)?;
            let y = max_pool2d(&x, 2)?;
            let factor = (wave_f32(y.dims(), 2) * 8.)?.round()?.to_dtype(dtype)?;
            let case = format!("{places:?} {dtype:?}");
            let values = flat64(&x);
            for (i, y) in flat64(&y).into_iter().enumerate() {
                let first = i / 4 * 20 + i % 4 / 2 * 8 + i % 2 * 2;
                let window = [first, first + 1, first + 4, first + 5].map(|place| values[place]);
                let largest = window.into_iter().reduce(f64::max).unwrap();
                match window.iter().any(|x| x.is_nan()) {
                    true => assert!(y.is_nan(), "{case}: {y} at {i}"),
                    false => assert_eq!(y, largest, "{case}, at {i}"),
                }
            }
            let grads = (y * &factor)?.sum_all()?.backward()?;
            let expected = gradient(&values, dims, 2, &flat64(&factor));
            assert_eq!(flat64(grads.get(&x).unwrap()), expected, "{case}");
        }
    }
    Ok(())
}

#[test]
fn no_images_give_no_results() -> Result<()> {
    for (dims, result) in [
        ([0usize, 2, 4, 6], [0usize, 2, 2, 3]),
        ([2, 0, 5, 4], [2, 0, 2, 2]),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let x = Var::zeros(&dims, dtype, &device())?;
            let y = max_pool2d(&x, 2)?;
            assert_eq!(y.dims(), result, "{dtype:?}");
            assert_eq!(y.dtype(), dtype);
            let grads = y.sum_all()?.backward()?;
            assert_eq!(grads.get(&x).unwrap().dims(), dims, "{dtype:?}");
        }
    }
    Ok(())
}

#[test]
fn images_that_do_not_fit_are_errors() -> Result<()> {
    let image = Tensor::zeros((1, 1, 3, 4), DType::F32, &Device::Cpu)?;
    for size in [0, 4] {
        let error = max_pool2d(&image, size).unwrap_err().to_string();
        assert!(
            error.contains("max_pool2d") && error.contains("[1, 1, 3, 4]"),
            "{error}"
        );
    }
    let result = max_pool2d(&image.squeeze(0)?, 2);
    assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
    let result = max_pool2d(&image.to_dtype(DType::U8)?, 2);
    assert!(matches!(result, Err(Error::DType { .. })), "{result:?}");
    Ok(())
}
