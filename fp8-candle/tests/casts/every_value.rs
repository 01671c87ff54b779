//! Every number of 16 bits through the casts of a device, against the definition: flat, by tiles, by blocks, and where no tile fits.

use candle_core::{DType, Tensor};
use fp8_candle::Result;
use fp8_candle::device::{Orientation, backend};
use fp8_core::{Cast, Format, Overflow, ScaleGrid};
use fp8_test_support::{device, flat};

fn codes(codes: &Tensor) -> Vec<u8> {
    codes.flatten_all().unwrap().to_vec1().unwrap()
}

/// All bit patterns of bf16, NaN and infinities included.
fn all_bf16() -> Result<Tensor> {
    let values = (0..=u16::MAX).map(half::bf16::from_bits);
    let values: Vec<half::bf16> = values.collect();
    Ok(Tensor::from_vec(values, 1 << 16, &device())?)
}

#[test]
fn every_number_has_the_code_of_the_definition() -> Result<()> {
    let all = all_bf16()?;
    let values = flat(&all.to_dtype(DType::F32)?);
    for format in [Format::E4M3, Format::E5M2] {
        for overflow in [Overflow::Saturate, Overflow::NonFinite] {
            let cast = Cast::new(format).with_overflow(overflow);
            for (rows, cols) in [(256, 256), (1, 1 << 16), (4096, 16), (1 << 14, 4)] {
                let grids = [
                    ScaleGrid::tensorwise(rows, cols),
                    ScaleGrid::per_row(rows, cols),
                    ScaleGrid::per_col(rows, cols),
                    ScaleGrid::new(rows, cols, 16, 16).expect("a grid"),
                ];
                for grid in grids {
                    let scales: Vec<f32> =
                        (0..grid.len()).map(|i| [1., 3.7, -0.3][i % 3]).collect();
                    let quant_scale = Tensor::from_slice(&scales, grid.len(), &device())?;
                    let what = format!("{format} {overflow:?} [{rows}, {cols}] {grid:?}");
                    let x = all.reshape((rows, cols))?;
                    let backend = backend(&device())?;
                    let made =
                        backend.quantize(&x, &grid, &quant_scale, &cast, Orientation::Both)?;
                    let ours = codes(made.row_major.as_ref().expect("row-major codes"));
                    let turned = codes(made.transposed.as_ref().expect("transposed codes"));
                    for (at, &x) in values.iter().enumerate() {
                        let scale = scales[grid.index(at / cols, at % cols)];
                        let expected = cast.encode_scaled(x, scale, 0);
                        assert_eq!(
                            ours[at], expected,
                            "{what}: code of {x:e} times {scale} at {at}"
                        );
                        let across = at % cols * rows + at / cols;
                        assert_eq!(turned[across], expected, "{what}: transposed code of {x:e}");
                    }
                }
            }
        }
    }
    Ok(())
}
