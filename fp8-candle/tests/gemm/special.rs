//! NaN, infinities and extreme scales.

use super::*;

#[test]
fn nan_codes_come_out_as_nan() -> Result<()> {
    let (m, n, k) = (9, 11, 140);
    let nans = [
        (Format::E4M3, vec![0x7Fu8, 0xFF]),
        (Format::E5M2, vec![0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]),
    ];
    for (format, codes) in nans {
        for nan in codes {
            for (contraction, b_contraction) in COMBINATIONS {
                for granularity in [Granularity::Tensorwise, Granularity::Rowwise, BLOCK_1X128] {
                    let mut rng = StdRng::seed_from_u64(8);
                    let (rows, cols) = if contraction == Cols { (m, k) } else { (k, m) };
                    let mut a_codes: Vec<u8> = (0..m * k).map(|_| code(&mut rng, format)).collect();
                    // Kept index 4, the last of the sum.
                    let at = if contraction == Cols {
                        4 * k + k - 1
                    } else {
                        (k - 1) * m + 4
                    };
                    a_codes[at] = nan;
                    let scales = vec![0.5; granularity.grid(rows, cols, contraction).len()];
                    let kind = (format, granularity, contraction);
                    let a = Operand::from_parts((rows, cols), a_codes, scales, kind, contraction)?;
                    let b = Operand::new(9, (n, k), (Format::E4M3, granularity, b_contraction))?;
                    for (at, y) in flat64(&multiply(&a, &b, DType::F32, None)?)
                        .into_iter()
                        .enumerate()
                    {
                        let (row, col) = (at / n, at % n);
                        assert_eq!(
                            y.is_nan(),
                            row == 4,
                            "{format} {nan:#04x} {contraction:?} {granularity}: [{row}, {col}] is {y}"
                        );
                    }
                    // The same as operand B.
                    for (at, y) in flat64(&multiply(&b, &a, DType::BF16, None)?)
                        .into_iter()
                        .enumerate()
                    {
                        assert_eq!(
                            y.is_nan(),
                            at % m == 4,
                            "{format} {nan:#04x} as B at {at}: {y}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn infinities_of_e5m2_come_out_as_infinities() -> Result<()> {
    let kind = (Format::E5M2, Granularity::Tensorwise, Cols);
    let a = Operand::from_parts(
        (2, 3),
        vec![0x3C, 0x7C, 0x3C, 0xFC, 0x3C, 0x3C],
        vec![1.],
        kind,
        Cols,
    )?;
    // 1, and 0 at the place of the infinities.
    let kind = (Format::E4M3, Granularity::Tensorwise, Cols);
    let b = Operand::from_parts(
        (2, 3),
        vec![0x38, 0x38, 0x38, 0, 0, 0x38],
        vec![1.],
        kind,
        Cols,
    )?;
    let y = flat64(&multiply(&a, &b, DType::F32, None)?);
    assert_eq!((y[0], y[2]), (f64::INFINITY, f64::NEG_INFINITY));
    assert!(y[1].is_nan() && y[3].is_nan(), "Inf * 0: {y:?}");
    Ok(())
}

/// A quant_scale of 0 (from an Inf under dynamic scaling) has the dequant_scale Inf: its results must not look like numbers.
#[test]
fn infinite_scales_give_nan() -> Result<()> {
    let (m, n, k) = (4, 5, 6);
    for granularity in [Granularity::Tensorwise, Granularity::Rowwise, BLOCK_1X128] {
        let scales = granularity.grid(m, k, Cols).len();
        let kind = (Format::E4M3, granularity, Cols);
        let a = Operand::from_parts(
            (m, k),
            vec![0; m * k],
            vec![f32::INFINITY; scales],
            kind,
            Cols,
        )?;
        let b = Operand::new(2, (n, k), kind)?;
        for (x, y) in [(&a, &b), (&b, &a)] {
            let y = flat64(&multiply(x, y, DType::F32, None)?);
            assert_eq!(y.len(), m * n);
            assert!(y.iter().all(|y| y.is_nan()), "{granularity}: {y:?}");
        }
    }
    Ok(())
}

/// The product of two scales may leave the range of f32 although the scaled sum does not.
#[test]
fn extreme_scales_do_not_overflow_on_the_way() -> Result<()> {
    let k = 300;
    for (a_scale, b_scale) in [
        (1e30f32, 1e-30f32),
        (1e-30, 1e30),
        (3e37, 1e-10),
        (1e-10, 3e37),
        (1e-38, 1e38),
        (1e11, 1e20),
        (1e20, 1e11),
        (1e-13, 1e-20),
        (1e-20, 1e-13),
        (1e34, 1e-34),
        (1e-34, 1e34),
    ] {
        for granularity in [Granularity::Tensorwise, Granularity::Rowwise, BLOCK_1X128] {
            // Scales that vary along the sum may be applied before it: then the values themselves have to fit f32.
            if granularity == BLOCK_1X128 && 448. * a_scale.max(b_scale) > f32::MAX {
                continue;
            }
            // cuBLASLt multiplies the sum by one scale after the other.
            let sum = 448f32 * 448. * k as f32;
            if granularity != Granularity::Tensorwise
                && on_cuda()
                && sum * a_scale.max(b_scale) > f32::MAX
            {
                continue;
            }
            let operand = |seed, kept: usize, scale: f32| {
                let kind = (Format::E4M3, granularity, Cols);
                let mut rng = StdRng::seed_from_u64(seed);
                let codes = (0..kept * k)
                    .map(|_| code(&mut rng, Format::E4M3))
                    .collect();
                let scales = vec![scale; granularity.grid(kept, k, Cols).len()];
                Operand::from_parts((kept, k), codes, scales, kind, Cols)
            };
            let (a, b) = (operand(1, 6, a_scale)?, operand(2, 7, b_scale)?);
            check(&format!("{granularity} {a_scale:e} x {b_scale:e}"), &a, &b)?;
        }
    }
    Ok(())
}

/// Blocks that do not fit the tiles of the processor, against every kind of scale.
#[test]
fn large_values_in_odd_blocks_do_not_overflow_on_the_way() -> Result<()> {
    let block = Granularity::Blockwise { rows: 3, cols: 5 };
    let k = 60;
    for other in [block, Granularity::Tensorwise, Granularity::Rowwise] {
        for (contraction, b_contraction) in COMBINATIONS {
            let operand = |seed, kept, (granularity, contraction), amax: f32| {
                let mut operand =
                    Operand::new(seed, (kept, k), (Format::E4M3, granularity, contraction))?;
                let scales = operand.tensor.dequant_scale().dims().to_vec();
                let scales = vec![amax / 448.; scales.iter().product()];
                let (rows, cols) = operand.tensor.codes().dims2()?;
                let codes = operand.tensor.codes().flatten_all()?.to_vec1()?;
                let kind = (Format::E4M3, granularity, contraction);
                operand = Operand::from_parts((rows, cols), codes, scales, kind, contraction)?;
                candle_core::Result::Ok(operand)
            };
            // As an output gradient, and a weight.
            let a = operand(1, 6, (block, contraction), 1e36)?;
            let b = operand(2, 9, (other, b_contraction), 0.25)?;
            check(
                &format!("3x5 by {other}, {contraction:?} {b_contraction:?}"),
                &a,
                &b,
            )?;
            check(
                &format!("{other} by 3x5, {b_contraction:?} {contraction:?}"),
                &b,
                &a,
            )?;
        }
    }
    Ok(())
}
