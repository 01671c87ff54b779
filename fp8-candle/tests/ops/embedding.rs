//! Rows of a table, and the gradients of those rows.

use candle_core::{DType, Device, Module, Tensor, Var};
use fp8_candle::Result;
use fp8_candle::ops::{embedding, linear};
use fp8_test_support::{apart, flat64, wave_f32};

fn indexes() -> Result<Tensor> {
    Ok(Tensor::new(&[[4u32, 0, 4], [9, 1, 0]], &Device::Cpu)?)
}

/// Values and gradients, from both kinds of backward pass.
#[test]
fn equals_candle_nn() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let table = Var::from_tensor(&wave_f32(&[10, 7], 1).to_dtype(dtype)?)?;
        let factor = wave_f32(&[2, 3, 7], 2).to_dtype(dtype)?;
        let plain = candle_nn::Embedding::new(table.as_tensor().clone(), 7);
        let expected = plain.forward(&indexes()?)?;
        let y = embedding(&table, &indexes()?)?;
        assert_eq!((y.dims(), y.dtype()), (expected.dims(), dtype));
        assert_eq!(flat64(&y), flat64(&expected));
        let expected = (expected * &factor)?.sum_all()?.backward()?;
        let expected = flat64(expected.get(&table).unwrap());
        let loss = (y * &factor)?.sum_all()?;
        for grads in [loss.backward()?, fp8_candle::wide::backward(&loss)?] {
            assert_eq!(flat64(grads.get(&table).unwrap()), expected, "{dtype:?}");
        }
    }
    Ok(())
}

/// The rows are added to what a tied head gives, whichever of the two comes first in the backward pass, and to what operations of candle give.
#[test]
fn gradients_of_a_tied_table_are_added() -> Result<()> {
    let table = Var::from_tensor(&wave_f32(&[10, 7], 1))?;
    let x = wave_f32(&[4, 7], 2);
    let rows = || Ok::<_, fp8_candle::Error>(embedding(&table, &indexes()?)?.sqr()?.sum_all()?);
    let head = || Ok::<_, fp8_candle::Error>(linear(&x, &table, None)?.sqr()?.sum_all()?);
    let gradient = |loss: &Tensor| -> Result<Tensor> {
        Ok(fp8_candle::wide::backward(loss)?
            .get(&table)
            .unwrap()
            .clone())
    };
    let expected = (gradient(&rows()?)? + gradient(&head()?)?)?;
    let largest = flat64(&expected)
        .iter()
        .fold(0f64, |max, g| max.max(g.abs()));
    let of_candle = || Ok::<_, fp8_candle::Error>(table.as_tensor().sum_all()?);
    for loss in [(rows()? + head()?)?, (head()? + rows()?)?] {
        // A few more roundings of sums of three terms.
        let far = apart(&gradient(&loss)?, &expected);
        assert!(far <= 4. * f64::from(f32::EPSILON) * largest, "{far:e}");
        let more = gradient(&(loss + of_candle()?)?)?;
        let far = apart(&more, &(&expected + 1.)?);
        assert!(far <= 8. * f64::from(f32::EPSILON) * largest, "{far:e}");
    }
    // A second pass over the same graph gives the same: nothing was changed in place.
    let loss = (rows()? + head()?)?;
    assert_eq!(flat64(&gradient(&loss)?), flat64(&gradient(&loss)?));
    Ok(())
}

/// Each 1 alone would vanish beside a sum of 256 in bf16 or of 2048 in f16, also beside the gradient of a tied head.
#[test]
fn rows_of_16_bits_are_added_in_f32() -> Result<()> {
    const ROWS: usize = 2560;
    for dtype in [DType::BF16, DType::F16] {
        let table = Var::ones((3, 2), dtype, &Device::Cpu)?;
        let rows = || embedding(&table, &Tensor::full(1u32, ROWS, &Device::Cpu)?)?.sum_all();
        let x = Tensor::full(256f32, (1, 2), &Device::Cpu)?.to_dtype(dtype)?;
        let head = || linear(&x, &table, None)?.sum_all();
        let expected = |before: f64| {
            let row = [before; 2];
            [row, row.map(|sum| sum + ROWS as f64), row].concat()
        };
        let loss = rows()?;
        for grads in [loss.backward()?, fp8_candle::wide::backward(&loss)?] {
            let grad = grads.get(&table).unwrap();
            assert_eq!(grad.dtype(), dtype);
            assert_eq!(flat64(grad), expected(0.), "{dtype:?}");
        }
        for loss in [(rows()? + head()?)?, (head()? + rows()?)?] {
            let grads = fp8_candle::wide::backward(&loss)?;
            let grad = grads.get(&table).unwrap();
            assert_eq!(flat64(grad), expected(256.), "{dtype:?}");
        }
    }
    Ok(())
}

#[test]
fn misfits_are_errors() -> Result<()> {
    let table = wave_f32(&[10, 7], 1);
    let message =
        |table: &Tensor, indexes: &Tensor| embedding(table, indexes).unwrap_err().to_string();
    let error = message(&table, &indexes()?.to_dtype(DType::F32)?);
    assert!(
        error.contains("embedding") && error.contains("integer"),
        "{error}"
    );
    let error = message(&table.flatten_all()?, &indexes()?);
    assert!(error.contains("[rows, features]"), "{error}");
    let error = message(&table.narrow(0, 0, 9)?, &indexes()?);
    assert!(
        error.contains("index 9 at position 3 is not one of 9 rows"),
        "{error}"
    );
    // candle takes the largest number of a dtype for "no row".
    for index in [u32::MAX, 10] {
        let error = message(&table, &Tensor::new(&[0, index], &Device::Cpu)?);
        assert!(
            error.contains(&format!("index {index} at position 1")),
            "{error}"
        );
    }
    for index in [i64::MAX, -1] {
        let error = message(&table, &Tensor::new(&[index], &Device::Cpu)?);
        assert!(
            error.contains(&format!("index {index} at position 0")),
            "{error}"
        );
    }
    Ok(())
}

/// The last row of a table of bytes is one as all others.
#[test]
fn every_byte_is_a_row() -> Result<()> {
    let table = Var::from_tensor(&wave_f32(&[256, 3], 1))?;
    let bytes = Tensor::from_vec((0..=255u8).collect::<Vec<_>>(), 256, &Device::Cpu)?;
    let rows = embedding(&table, &bytes)?;
    assert_eq!(flat64(&rows), flat64(table.as_tensor()));
    let loss = rows.sum_all()?;
    for grads in [loss.backward()?, fp8_candle::wide::backward(&loss)?] {
        assert_eq!(flat64(grads.get(&table).unwrap()), [1.; 256 * 3]);
    }
    Ok(())
}
