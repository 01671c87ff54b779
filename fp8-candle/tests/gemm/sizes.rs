//! Every combination of formats, contractions and granularities, at every edge.

use super::*;

#[test]
fn every_combination_at_block_edges() -> Result<()> {
    let granularities = [
        (Granularity::Tensorwise, Granularity::Tensorwise),
        (Granularity::Rowwise, Granularity::Rowwise),
        (Granularity::Tensorwise, Granularity::Rowwise),
        (BLOCK_1X128, BLOCK_128X128),
        (BLOCK_1X128, BLOCK_1X128),
        (BLOCK_128X128, BLOCK_128X128),
        (Granularity::Rowwise, BLOCK_128X128),
        (Granularity::Mx, Granularity::Mx),
    ];
    let sizes = [
        (1, 1, 1),
        (1, 7, 128),
        (3, 1, 129),
        (7, 3, 1000),
        (127, 129, 128),
        (128, 128, 127),
        (129, 130, 257),
    ];
    for (a_contraction, b_contraction) in COMBINATIONS {
        for (a_format, b_format) in FORMATS {
            for (a_granularity, b_granularity) in granularities {
                for (m, n, k) in sizes {
                    let a = Operand::new(1, (m, k), (a_format, a_granularity, a_contraction))?;
                    let b = Operand::new(2, (n, k), (b_format, b_granularity, b_contraction))?;
                    let what = format!(
                        "{a_contraction:?} x {b_contraction:?}, {a_format} x {b_format}, \
                         {a_granularity} x {b_granularity}, m {m} n {n} k {k}"
                    );
                    check(&what, &a, &b)?;
                }
            }
        }
    }
    Ok(())
}

/// Sizes around the numbers of values that are decoded at a time.
#[test]
fn every_combination_of_large_sizes() -> Result<()> {
    let sizes = [
        // Long sums, and one row more than a power of two.
        (131, 130, 8070),
        // Rows so long that tasks have few of them.
        (65, 66, 17_000),
        (1025, 3, 1024),
        (2, 1030, 1024),
        (1024, 640, 520),
    ];
    for (m, n, k) in sizes {
        for (a_contraction, b_contraction) in COMBINATIONS {
            for granularity in [Granularity::Tensorwise, Granularity::Rowwise, BLOCK_128X128] {
                let a = Operand::new(3, (m, k), (Format::E4M3, granularity, a_contraction))?;
                let b = Operand::new(4, (n, k), (Format::E5M2, granularity, b_contraction))?;
                let what = format!(
                    "{a_contraction:?} x {b_contraction:?}, {granularity}, m {m} n {n} k {k}"
                );
                check(&what, &a, &b)?;
            }
        }
    }
    Ok(())
}

#[test]
fn normal_data() -> Result<()> {
    let (m, n, k) = (130, 257, 1030);
    for (a_contraction, b_contraction) in COMBINATIONS {
        for (a_format, b_format) in FORMATS {
            for granularity in [Granularity::Tensorwise, Granularity::Rowwise, BLOCK_128X128] {
                let operand = |seed, kept, format, contraction| {
                    let (rows, cols) = if contraction == Cols {
                        (kept, k)
                    } else {
                        (k, kept)
                    };
                    let mut rng = StdRng::seed_from_u64(seed);
                    // A sum of twelve uniform values is close to normal.
                    let mut normal = || (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.;
                    let cast = Cast::new(format);
                    let codes = (0..rows * cols)
                        .map(|_| cast.encode(normal() * 64., 0))
                        .collect();
                    let scales = granularity.grid(rows, cols, contraction).len();
                    let scales = (0..scales)
                        .map(|at| 0.01 + 1e-4 * (at % 50) as f32)
                        .collect();
                    let kind = (format, granularity, contraction);
                    Operand::from_parts((rows, cols), codes, scales, kind, contraction)
                };
                let a = operand(1, m, a_format, a_contraction)?;
                let b = operand(2, n, b_format, b_contraction)?;
                let what = format!(
                    "{a_contraction:?} x {b_contraction:?}, {a_format} x {b_format}, {granularity}"
                );
                check(&what, &a, &b)?;
            }
        }
    }
    Ok(())
}

/// Scales made for one GEMM are used in another, where they vary along the sum.
#[test]
fn scales_across_the_contraction() -> Result<()> {
    for (a_contraction, b_contraction) in COMBINATIONS {
        for granularity in [Granularity::Rowwise, BLOCK_1X128, BLOCK_128X128] {
            let other = |contraction| if contraction == Cols { Rows } else { Cols };
            for (m, n, k) in [(5, 9, 300), (140, 33, 129)] {
                let a_kind = (Format::E4M3, granularity, a_contraction);
                let b_kind = (Format::E4M3, granularity, b_contraction);
                let a = Operand::with_scales_along(5, (m, k), a_kind, other(a_contraction))?;
                let b = Operand::new(6, (n, k), b_kind)?;
                let what =
                    format!("{a_contraction:?} x {b_contraction:?}, {granularity} {m} {n} {k}");
                check(&format!("a across, {what}"), &a, &b)?;
                let a = Operand::new(5, (m, k), a_kind)?;
                let b = Operand::with_scales_along(6, (n, k), b_kind, other(b_contraction))?;
                check(&format!("b across, {what}"), &a, &b)?;
            }
        }
    }
    Ok(())
}

#[test]
fn empty_sides() -> Result<()> {
    for (a_contraction, b_contraction) in COMBINATIONS {
        for granularity in [Granularity::Tensorwise, Granularity::Rowwise, BLOCK_128X128] {
            for (m, n, k) in [(0, 5, 6), (5, 0, 6), (5, 6, 0), (0, 0, 0)] {
                let a = Operand::new(1, (m, k), (Format::E4M3, granularity, a_contraction))?;
                let b = Operand::new(2, (n, k), (Format::E4M3, granularity, b_contraction))?;
                let y = multiply(&a, &b, DType::F32, None)?;
                assert_eq!(y.dims(), [m, n]);
                assert!(
                    flat64(&y).iter().all(|&y| y == 0.),
                    "{granularity} {m} {n} {k}: {y}"
                );
            }
        }
    }
    Ok(())
}
