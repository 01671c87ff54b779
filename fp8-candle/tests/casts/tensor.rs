//! FP8 tensors: values, scales, shapes, conversion from and to candle's F8E4M3, and bad input.

use candle_core::{D, DType, Device, Tensor, Var};
use fp8_candle::{Fp8Tensor, Quantizer, Result, ScaleSource};
use fp8_core::Contraction::{Cols, Rows};
use fp8_core::{Cast, Format, Granularity, dynamic_quant_scale, mx_dequant_scale_rceil};
use fp8_test_support::{device, flat};
use rand::{Rng, SeedableRng, rngs::StdRng};

const FORMATS: [Format; 4] = [
    Format::E4M3,
    Format::E5M2,
    Format::E4M3Fnuz,
    Format::E5M2Fnuz,
];

const GRANULARITIES: [Granularity; 5] = [
    Granularity::Tensorwise,
    Granularity::Rowwise,
    Granularity::Blockwise { rows: 1, cols: 128 },
    Granularity::Blockwise { rows: 16, cols: 8 },
    Granularity::Mx,
];

const FLOATS: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

/// Values over several orders of magnitude, row by row.
fn values(seed: u64, dims: &[usize]) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let cols = *dims.last().unwrap();
    let values: Vec<f32> = (0..dims.iter().product())
        .map(|at: usize| rng.random_range(-1f32..1.) * 2f32.powi((at / cols % 9) as i32 - 4))
        .collect();
    Tensor::from_vec(values, dims, &device()).unwrap()
}

fn codes(x: &Fp8Tensor) -> Vec<u8> {
    x.codes().flatten_all().unwrap().to_vec1().unwrap()
}

#[track_caller]
fn assert_error<T>(result: Result<T>, parts: &[&str]) {
    let text = result.err().expect("an error").to_string();
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

/// Element by element, from the definitions of the cast, the grid and the scale.
#[test]
fn every_element_has_the_code_and_value_of_the_definition() -> Result<()> {
    let dims = [2, 13, 150];
    for dtype in FLOATS {
        let x = values(1, &dims).to_dtype(dtype)?;
        let source = flat(&x);
        for format in FORMATS {
            for granularity in GRANULARITIES {
                for contraction in [Cols, Rows] {
                    let what = format!("{dtype:?} {format} {granularity} {contraction:?}");
                    let quantizer = Quantizer::dynamic(format, granularity);
                    let ours = Fp8Tensor::quantize(&x, &quantizer, contraction)?;
                    let (rows, cols) = (26, 150);
                    let grid = granularity.grid(rows, cols, contraction);
                    let mut amax = vec![0f32; grid.len()];
                    for (at, x) in source.iter().enumerate() {
                        let scale = &mut amax[grid.index(at / cols, at % cols)];
                        *scale = scale.max(x.abs());
                    }
                    assert_eq!(ours.dims(), dims, "{what}");
                    assert_eq!(ours.codes().dtype(), DType::U8, "{what}");
                    assert_eq!(
                        ours.dequant_scale().dims(),
                        [grid.scale_rows(), grid.scale_cols()],
                        "{what}"
                    );
                    let dequant_scales = flat(ours.dequant_scale());
                    let dequantized = ours.dequantize(dtype)?;
                    assert_eq!(
                        (dequantized.dtype(), dequantized.dims()),
                        (dtype, &dims[..])
                    );
                    let cast = Cast::new(format);
                    for (at, (code, value)) in
                        codes(&ours).into_iter().zip(flat(&dequantized)).enumerate()
                    {
                        let scale = grid.index(at / cols, at % cols);
                        let quant_scale = match granularity {
                            Granularity::Mx => {
                                1. / mx_dequant_scale_rceil(amax[scale], format).to_f32()
                            }
                            _ => dynamic_quant_scale(amax[scale], format),
                        };
                        let expected = cast.encode(source[at] * quant_scale, 0);
                        assert_eq!(code, expected, "{what}: code of {} at {at}", source[at]);
                        assert_eq!(
                            dequant_scales[scale],
                            1. / quant_scale,
                            "{what}: scale at {at}"
                        );
                        let expected = format.decode(code) * dequant_scales[scale];
                        let expected =
                            flat(&Tensor::new(expected, &Device::Cpu)?.to_dtype(dtype)?)[0];
                        assert_eq!(value, expected, "{what}: value at {at}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// A value that has a code keeps it: with a fixed scale, a second round trip changes nothing.
#[test]
fn round_trips_are_stable() -> Result<()> {
    let x = values(2, &[40, 130]);
    for format in FORMATS {
        for granularity in GRANULARITIES {
            let quantizer = Quantizer::dynamic(format, granularity).with_power_of_two(true);
            let first = Fp8Tensor::quantize(&x, &quantizer, Cols)?;
            let value = first.dequantize(DType::F32)?;
            let fixed = quantizer.with_source(ScaleSource::Fixed {
                dequant_scale: first.dequant_scale().clone(),
            });
            let second = Fp8Tensor::quantize(&value, &fixed, Cols)?;
            assert_eq!(codes(&first), codes(&second), "{format} {granularity}");
            // Half a step of the mantissa, or half the distance between subnormals.
            let bits = if matches!(format, Format::E4M3 | Format::E4M3Fnuz) {
                4
            } else {
                3
            };
            let scales = flat(first.dequant_scale());
            let grid = first.grid();
            for (at, (x, value)) in flat(&x).into_iter().zip(flat(&value)).enumerate() {
                let subnormal = format.decode(1) * scales[grid.index(at / 130, at % 130)] / 2.;
                let bound = (x.abs() * 2f32.powi(-bits)).max(subnormal);
                assert!(
                    (x - value).abs() <= bound,
                    "{format} {granularity} at {at}: {x} {value}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn any_shape_and_stride() -> Result<()> {
    let x = values(3, &[6, 20]);
    let quantizer = Quantizer::dynamic(Format::E4M3, Granularity::Rowwise);
    let views = [
        x.t()?,
        x.narrow(1, 3, 9)?,
        x.narrow(0, 2, 3)?,
        x.reshape((2, 3, 20))?.permute((2, 0, 1))?,
        x.get(2)?,
        x.get(1)?.get(1)?,
        x.narrow(0, 0, 1)?.broadcast_as((4, 20))?,
    ];
    for view in &views {
        for contraction in [Cols, Rows] {
            let of_view = Fp8Tensor::quantize(view, &quantizer, contraction)?;
            let of_copy = Fp8Tensor::quantize(&view.force_contiguous()?, &quantizer, contraction)?;
            assert_eq!(of_view.dims(), view.dims());
            assert_eq!(
                codes(&of_view),
                codes(&of_copy),
                "{:?} {contraction:?}",
                view.dims()
            );
            assert_eq!(flat(of_view.dequant_scale()), flat(of_copy.dequant_scale()));
        }
    }
    for dims in [vec![0], vec![0, 5], vec![5, 0], vec![2, 0, 3]] {
        for granularity in GRANULARITIES {
            let x = Tensor::zeros(dims.as_slice(), DType::F32, &device())?;
            let quantizer = Quantizer::dynamic(Format::E4M3, granularity);
            let empty = Fp8Tensor::quantize(&x, &quantizer, Cols)?;
            assert_eq!(empty.dequantize(DType::BF16)?.dims(), dims, "{granularity}");
        }
    }
    Ok(())
}

#[test]
fn says_what_it_holds() -> Result<()> {
    let x = Var::from_tensor(&values(4, &[3, 5, 64]))?;
    let quantizer = Quantizer::dynamic(Format::E5M2, Granularity::Rowwise);
    let q = Fp8Tensor::quantize(&x, &quantizer, Cols)?;
    assert_eq!(q.format(), Format::E5M2);
    assert_eq!(q.granularity(), Granularity::Rowwise);
    assert_eq!(q.contraction(), Cols);
    assert_eq!(q.dims(), [3, 5, 64]);
    assert_eq!(q.size_in_bytes(), 3 * 5 * 64 + 4 * 15);
    assert!(q.device().same_device(&device()));
    assert!(
        !q.codes().track_op() && !q.dequant_scale().track_op(),
        "part of a graph"
    );
    assert!(!q.dequantize(DType::F32)?.track_op(), "part of a graph");
    let operand = q.operand(Cols);
    assert_eq!((operand.kept(), operand.contracted()), (15, 64));
    let operand = q.operand(Rows);
    assert_eq!((operand.kept(), operand.contracted()), (64, 15));
    let moved = q.to_device(&device())?;
    assert_eq!(codes(&moved), codes(&q));
    assert_eq!((moved.format(), moved.dims()), (q.format(), q.dims()));
    Ok(())
}

fn all_codes() -> Tensor {
    Tensor::from_vec((0..=255).collect::<Vec<u8>>(), (2, 128), &device()).unwrap()
}

fn one() -> Tensor {
    Tensor::ones(1, DType::F32, &device()).unwrap()
}

#[test]
fn candles_f8e4m3_keeps_every_bit() -> Result<()> {
    let codes_in = all_codes();
    let tensorwise = Granularity::Tensorwise;
    let q = Fp8Tensor::from_parts(codes_in.clone(), Format::E4M3, tensorwise, Cols, one())?;
    let candles = q.to_f8e4m3()?;
    assert_eq!(
        (candles.dtype(), candles.dims()),
        (DType::F8E4M3, &[2, 128][..])
    );
    // Bits: candle's own conversion gives the value of each code; NaN codes have no bits in f32 to compare.
    let as_f32 = candles
        .to_device(&Device::Cpu)? // candle has no such conversion on a GPU
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    for (code, value) in as_f32.into_iter().enumerate() {
        let expected = Format::E4M3.decode(code as u8);
        assert!(
            value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(),
            "{code:#04x}: {value}, expected {expected}"
        );
    }
    let back = Fp8Tensor::from_f8e4m3(&candles, tensorwise, Cols, one())?;
    assert_eq!(codes(&back), (0..=255).collect::<Vec<u8>>());
    assert_eq!(back.format(), Format::E4M3);
    // Strided as well.
    let columns = candles.narrow(D::Minus1, 3, 20)?;
    let back = Fp8Tensor::from_f8e4m3(&columns, tensorwise, Cols, one())?;
    let expected = codes_in
        .narrow(D::Minus1, 3, 20)?
        .flatten_all()?
        .to_vec1::<u8>()?;
    assert_eq!(codes(&back), expected);
    let back = Fp8Tensor::from_f8e4m3(&candles.t()?, tensorwise, Cols, one())?;
    assert_eq!(codes(&back), codes_in.t()?.flatten_all()?.to_vec1::<u8>()?);
    Ok(())
}

#[test]
fn parts_that_do_not_fit() -> Result<()> {
    let device = &device();
    // Filled on the host: candle cannot fill an empty tensor on a GPU.
    let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu)?.to_device(device);
    let build = |granularity, scale: Tensor| {
        Fp8Tensor::from_parts(all_codes(), Format::E4M3, granularity, Cols, scale)
    };
    // Any shape with the right number of elements fits.
    let block = Granularity::Blockwise {
        rows: 128,
        cols: 100,
    };
    for (granularity, dims) in [
        (Granularity::Tensorwise, vec![]),
        (Granularity::Tensorwise, vec![1, 1]),
        (Granularity::Rowwise, vec![2]),
        (Granularity::Rowwise, vec![2, 1]),
        (Granularity::Rowwise, vec![1, 2]),
        (block, vec![1, 2]),
        (Granularity::Mx, vec![2, 4]),
    ] {
        let q = build(granularity, ones(&dims)?)?;
        assert_eq!(
            q.dequant_scale().elem_count(),
            dims.iter().product::<usize>()
        );
        assert_eq!(q.dequant_scale().rank(), 2);
    }
    for (granularity, dims) in [
        (Granularity::Tensorwise, vec![2]),
        (Granularity::Tensorwise, vec![0]),
        (Granularity::Rowwise, vec![1]),
        (Granularity::Rowwise, vec![128]),
        (block, vec![1]),
        (Granularity::Mx, vec![2, 3]),
    ] {
        let result = build(granularity, ones(&dims)?);
        assert_error(
            result,
            &[
                "dequant_scale",
                "[2, 128]",
                &granularity.to_string(),
                &format!("{dims:?}"),
            ],
        );
    }
    assert_error(
        build(Granularity::Tensorwise, one().to_dtype(DType::BF16)?),
        &["dequant_scale", "BF16", "f32"],
    );
    let floats = values(1, &[2, 128]);
    let tensorwise = Granularity::Tensorwise;
    assert_error(
        Fp8Tensor::from_parts(floats.clone(), Format::E4M3, tensorwise, Cols, one()),
        &["codes", "F32", "u8"],
    );
    assert_error(
        Fp8Tensor::from_f8e4m3(&floats, tensorwise, Cols, one()),
        &["F32", "f8e4m3"],
    );
    for format in [Format::E5M2, Format::E4M3Fnuz, Format::E5M2Fnuz] {
        let q = Fp8Tensor::from_parts(all_codes(), format, tensorwise, Cols, one())?;
        assert_error(q.to_f8e4m3(), &[format.name(), "e4m3"]);
    }
    let q = build(tensorwise, one())?;
    assert_error(q.dequantize(DType::U8), &["U8", "f32, bf16, f16 or f64"]);
    for dtype in [DType::U8, DType::U32, DType::I64, DType::F8E4M3] {
        let x = all_codes()
            .to_device(&Device::Cpu)? // candle has no such conversion on a GPU
            .to_dtype(dtype)?
            .to_device(device)?;
        let quantizer = Quantizer::dynamic(Format::E4M3, tensorwise);
        assert_error(
            Fp8Tensor::quantize(&x, &quantizer, Cols),
            &[&format!("{dtype:?}"), "f32, bf16, f16 or f64"],
        );
    }
    Ok(())
}

#[test]
fn scales_are_taken_row_major_by_either_contraction() -> Result<()> {
    let codes = Tensor::from_vec(vec![0x38u8; 6], (2, 3), &device())?; // 1.0
    let scales = |values: &[f32]| Tensor::from_slice(values, values.len(), &device());
    let value = |contraction, scale| {
        Fp8Tensor::from_parts(
            codes.clone(),
            Format::E4M3,
            Granularity::Rowwise,
            contraction,
            scale,
        )?
        .dequantize(DType::F32)?
        .to_vec2::<f32>()
    };
    assert_eq!(
        value(Cols, scales(&[2., 3.])?)?,
        [[2., 2., 2.], [3., 3., 3.]]
    );
    assert_eq!(
        value(Rows, scales(&[2., 3., 5.])?)?,
        [[2., 3., 5.], [2., 3., 5.]]
    );
    Ok(())
}
