//! Every number of 16 bits through the casts of a device, against the definition: flat, by tiles, by blocks, and where no tile fits.

use candle_core::{DType, Device, Tensor};
use fp8_candle::Result;
use fp8_candle::device::{CurrentScale, Orientation, ScalePolicy, backend};
use fp8_core::{Cast, Format, Overflow, Rounding, ScaleGrid, StochasticKey};
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

/// Casts that a GPU has fast kernels for, and others.
fn casts() -> impl Iterator<Item = Cast> {
    let key = StochasticKey {
        seed: 0x0123_4567_89ab_cdef,
        step: 5,
        tensor: 7,
    };
    let nearest = [Format::E4M3, Format::E5M2].into_iter().map(Cast::new);
    let nearest = nearest.flat_map(|cast| [cast, cast.with_overflow(Overflow::NonFinite)]);
    let random = Rounding::Stochastic(key);
    let other = [
        Cast::new(Format::E5M2)
            .with_rounding(random)
            .with_overflow(Overflow::NonFinite),
        Cast::new(Format::E4M3).with_rounding(random),
        Cast::new(Format::E4M3Fnuz).with_rounding(Rounding::TowardZero),
        Cast::new(Format::E5M2).with_via_f16(true),
    ];
    let divided = [
        Cast::new(Format::E4M3),
        Cast::new(Format::E5M2).with_overflow(Overflow::NonFinite),
        other[1],
    ];
    let divided = divided.map(|cast| cast.with_division(true));
    nearest.chain(other).chain(divided)
}

#[test]
fn every_number_has_the_code_of_the_definition() -> Result<()> {
    let all = all_bf16()?;
    let values = flat(&all.to_dtype(DType::F32)?);
    for cast in casts() {
        for (rows, cols) in [(256, 256), (1, 1 << 16), (4096, 16), (21845, 3)] {
            let grids = [
                ScaleGrid::tensorwise(rows, cols),
                ScaleGrid::per_row(rows, cols),
                ScaleGrid::per_col(rows, cols),
                ScaleGrid::new(rows, cols, 16, 16).expect("a grid"),
            ];
            for grid in grids {
                let scales: Vec<f32> = (0..grid.len()).map(|i| [1., 3.7, -0.3][i % 3]).collect();
                let given = Tensor::from_slice(&scales, grid.len(), &device())?;
                let what = format!("{cast:?} [{rows}, {cols}] {grid:?}");
                // 2^16 is not a multiple of three: there the last number is left out.
                let x = all.narrow(0, 0, rows * cols)?.reshape((rows, cols))?;
                let backend = backend(&device())?;
                let made = backend.quantize(&x, &grid, &given, &cast, Orientation::Both)?;
                let ours = codes(made.row_major.as_ref().expect("row-major codes"));
                let turned = codes(made.transposed.as_ref().expect("transposed codes"));
                for (at, &x) in values[..rows * cols].iter().enumerate() {
                    let scale = scales[grid.index(at / cols, at % cols)];
                    let expected = match cast.divides {
                        true => cast.encode_divided(x, scale, at as u64),
                        false => cast.encode_scaled(x, scale, at as u64),
                    };
                    assert_eq!(
                        ours[at], expected,
                        "{what}: code of {x:e} with {scale} at {at}"
                    );
                    let across = at % cols * rows + at / cols;
                    assert_eq!(turned[across], expected, "{what}: transposed code of {x:e}");
                }
            }
        }
    }
    Ok(())
}

/// Rows of any length, and groups of a row, with scales from their own amaxes, as on the CPU to the bit.
#[test]
fn rows_and_groups_have_the_scales_and_codes_of_the_cpu() -> Result<()> {
    let all = all_bf16()?;
    let bits = |x: &Tensor| -> Vec<u32> {
        let known = |x: &f32| if x.is_nan() { 1 } else { x.to_bits() };
        flat(x).iter().map(known).collect()
    };
    for policy in [
        ScalePolicy::Mx,
        ScalePolicy::Dynamic,
        ScalePolicy::Inference,
    ] {
        let current = CurrentScale {
            policy,
            power_of_two: false,
        };
        for cast in casts().filter(|cast| cast.rounding == Rounding::NearestEven) {
            // Groups of 20 and of 136 features have no kernel of their own, nor have groups of 128 in rows of 192.
            for (rows, cols, group) in [
                (8192, 8, None),
                (910, 72, None),
                (512, 128, None),
                (481, 136, None),
                (3000, 20, None),
                (256, 256, Some(128)),
                (255, 256, Some(32)),
                (1, 1 << 16, Some(64)),
                (341, 192, Some(96)),
                (341, 192, Some(128)),
                (300, 100, Some(20)),
                (120, 272, Some(136)),
            ] {
                let x = all.narrow(0, 0, rows * cols)?.reshape((rows, cols))?;
                let grid = match group {
                    None => ScaleGrid::per_row(rows, cols),
                    Some(group) => ScaleGrid::new(rows, cols, 1, group).expect("a grid"),
                };
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let x = x.to_dtype(dtype)?;
                    let run = |x: &Tensor| {
                        let backend = backend(x.device())?;
                        backend.quantize_current(x, &grid, current, &cast, Orientation::RowMajor)
                    };
                    let (ours, expected) = (run(&x)?, run(&x.to_device(&Device::Cpu)?)?);
                    let what = format!("{cast:?} [{rows}, {cols}] {group:?} {policy:?} {dtype:?}");
                    let made = |made: &fp8_candle::device::CurrentCast| {
                        codes(made.codes.row_major.as_ref().expect("row-major codes"))
                    };
                    assert!(made(&ours) == made(&expected), "{what}");
                    for (ours, expected) in [
                        (&ours.amax, &expected.amax),
                        (&ours.quant_scale, &expected.quant_scale),
                        (&ours.dequant_scale, &expected.dequant_scale),
                    ] {
                        assert!(bits(ours) == bits(expected), "{what}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Every code has its value to the bit, at every place among its neighbours, beside numbers alone and beside NaN and infinity, under scales of
/// the whole range.
#[test]
fn every_code_has_the_value_of_the_definition() -> Result<()> {
    // Neighbouring codes are decoded together. The first 1920 are numbers alone; after them there are NaN and infinity among them.
    let numbers = |code: u8| code & 0x7F < 0x7C && code != 0x80;
    for format in Format::ALL {
        let finite: Vec<u8> = (0..=u8::MAX).filter(|&code| numbers(code)).collect();
        let mut all: Vec<u8> = finite.iter().copied().cycle().take(1920).collect();
        all.extend(
            (0..16).flat_map(|shift| (0..=u8::MAX).map(move |code| code.wrapping_add(shift))),
        );
        all.extend((0..=u8::MAX).flat_map(|code| [0x7F, code, 0x80]));
        let (rows, cols) = (212, 32);
        assert_eq!(all.len(), rows * cols);
        let x = Tensor::from_slice(&all, (rows, cols), &device())?;
        for (height, width) in [(rows, cols), (1, 32), (1, 16), (4, 8), (1, 1)] {
            let grid = ScaleGrid::new(rows, cols, height, width).expect("a grid");
            let scales: Vec<f32> = (0..grid.len())
                .map(|i| [1., 1e-41, 3.7e-3, 2e36, -0.25][i % 5])
                .collect();
            let dequant_scale =
                Tensor::from_slice(&scales, (grid.scale_rows(), grid.scale_cols()), &device())?;
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let backend = backend(&device())?;
                let made = backend.dequantize(&x, format, &grid, &dequant_scale, dtype)?;
                let values = all.iter().enumerate().map(|(at, &code)| {
                    format.decode(code) * scales[grid.index(at / cols, at % cols)]
                });
                let expected = Tensor::from_iter(values, &Device::Cpu)?.to_dtype(dtype)?;
                for (at, (ours, expected)) in
                    flat(&made).into_iter().zip(flat(&expected)).enumerate()
                {
                    assert!(
                        ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan(),
                        "{format} {dtype:?} {grid:?}: code {:#x} at {at} is {ours:e}, expected {expected:e}",
                        all[at]
                    );
                }
            }
        }
    }
    Ok(())
}
