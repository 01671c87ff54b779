//! The FP8 GEMM of a backend against products in f64 of values decoded here, code by code.

use candle_core::op::BackpropOp;
use candle_core::{DType, Tensor};
use fp8_candle::device::{GemmCodes, GemmOutput, backend};
use fp8_candle::{Fp8Tensor, Result};
use fp8_core::Contraction::{self, Cols, Rows};
use fp8_core::{Cast, Format, Granularity};
use fp8_test_support::{device, isa, on_cuda, rounding};
use rand::{Rng, SeedableRng, rngs::StdRng};

const BLOCK_1X128: Granularity = Granularity::Blockwise { rows: 1, cols: 128 };
const BLOCK_128X128: Granularity = Granularity::Blockwise {
    rows: 128,
    cols: 128,
};

const COMBINATIONS: [(Contraction, Contraction); 4] =
    [(Cols, Cols), (Cols, Rows), (Rows, Rows), (Rows, Cols)];

const FORMATS: [(Format, Format); 3] = [
    (Format::E4M3, Format::E4M3),
    (Format::E4M3, Format::E5M2),
    (Format::E5M2, Format::E4M3),
];

/// The value of a finite or NaN code, from its bits.
fn value(format: Format, code: u8) -> f64 {
    let (mantissa_bits, bias) = match format {
        Format::E4M3 => (3, 7),
        _ => (2, 15),
    };
    let exponent = i32::from((code & 0x7F) >> mantissa_bits);
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let magnitude = match (format, code & 0x7F) {
        (Format::E4M3, 0x7F) | (Format::E5M2, 0x7D..) => f64::NAN,
        (Format::E5M2, 0x7C) => f64::INFINITY,
        _ if exponent == 0 => mantissa * 2f64.powi(1 - bias),
        _ => (1. + mantissa) * 2f64.powi(exponent - bias),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// Any finite code. Large magnitudes would dominate the sums, so E5M2 stays below 2^6.
fn code(rng: &mut StdRng, format: Format) -> u8 {
    let top = if format == Format::E4M3 { 0x7F } else { 0x55 };
    rng.random_range(0..top) | rng.random::<u8>() & 0x80
}

/// One operand, with its values in f64 as `[kept, contracted]`.
struct Operand {
    tensor: Fp8Tensor,
    contraction: Contraction,
    values: Tensor,
}

impl Operand {
    fn new(
        seed: u64,
        (kept, contracted): (usize, usize),
        (format, granularity, contraction): (Format, Granularity, Contraction),
    ) -> Result<Self> {
        // The scales run in the direction that the GEMM needs.
        Self::with_scales_along(
            seed,
            (kept, contracted),
            (format, granularity, contraction),
            contraction,
        )
    }

    fn with_scales_along(
        seed: u64,
        (kept, contracted): (usize, usize),
        (format, granularity, contraction): (Format, Granularity, Contraction),
        scales_along: Contraction,
    ) -> Result<Self> {
        let (rows, cols) = match contraction {
            Cols => (kept, contracted),
            Rows => (contracted, kept),
        };
        let mut rng = StdRng::seed_from_u64(seed);
        let codes = (0..rows * cols).map(|_| code(&mut rng, format)).collect();
        let scales = granularity.grid(rows, cols, scales_along).len();
        let scales = (0..scales)
            .map(|_| 2f32.powf(rng.random_range(-2f32..2.)))
            .collect();
        Self::from_parts(
            (rows, cols),
            codes,
            scales,
            (format, granularity, contraction),
            scales_along,
        )
    }

    fn from_parts(
        (rows, cols): (usize, usize),
        codes: Vec<u8>,
        scales: Vec<f32>,
        (format, granularity, contraction): (Format, Granularity, Contraction),
        scales_along: Contraction,
    ) -> Result<Self> {
        let grid = granularity.grid(rows, cols, scales_along);
        let mut table = [0f64; 256];
        (0..=255).for_each(|code: u8| table[usize::from(code)] = value(format, code));
        let mut values = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            for col in 0..cols {
                let decoded = table[usize::from(codes[row * cols + col])];
                values.push(decoded * f64::from(scales[grid.index(row, col)]));
            }
        }
        let device = &device();
        let values = Tensor::from_vec(values, (rows, cols), device)?;
        let scales = Tensor::from_vec(scales, grid.len(), device)?;
        let codes = Tensor::from_vec(codes, (rows, cols), device)?;
        Ok(Self {
            tensor: Fp8Tensor::from_parts(codes, format, granularity, scales_along, scales)?,
            contraction,
            values: if contraction == Cols {
                values
            } else {
                values.t()?.contiguous()?
            },
        })
    }
}

/// The product as the CPU backend computes it.
fn multiply(a: &Operand, b: &Operand, dtype: DType, bias: Option<&Tensor>) -> Result<Tensor> {
    let out = GemmOutput {
        dtype,
        bias,
        use_fast_accum: true,
    };
    let (a, b) = (
        a.tensor.operand(a.contraction),
        b.tensor.operand(b.contraction),
    );
    let storage = backend(&device())?.gemm(&a, &b, &out)?;
    let shape = (a.kept(), b.kept());
    Ok(Tensor::from_storage(
        storage,
        shape,
        BackpropOp::none(),
        false,
    ))
}

fn flat(x: &Tensor) -> Vec<f64> {
    if x.elem_count() == 0 {
        return vec![]; // candle cannot convert empty tensors on a GPU
    }
    x.to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Fails if the error is larger than the roundings of a sum of k terms explain, see `rounding.rs`.
#[track_caller]
fn check(what: &str, a: &Operand, b: &Operand) -> Result<()> {
    let got = flat(&multiply(a, b, DType::F32, None)?);
    let expected = flat(&a.values.matmul(&b.values.t()?)?);
    let magnitude = flat(&a.values.abs()?.matmul(&b.values.abs()?.t()?)?);
    let square = flat(&a.values.sqr()?.matmul(&b.values.sqr()?.t()?)?);
    let k = a.values.dim(1)?;
    let n = b.values.dim(0)?;
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let (error, magnitude) = ((got - expected).abs(), magnitude[at]);
        let bound = rounding::bound(k, magnitude, square[at]);
        // Tensor cores add products of FP8 values with fewer bits than f32 has.
        let bound = if on_cuda() {
            bound.max(3e-3 * magnitude)
        } else {
            bound
        };
        assert!(
            error <= bound,
            "{what} [{}, {}]: {got:e}, expected {expected:e}; sum of |a||b| {magnitude:e}",
            at / n,
            at % n
        );
    }
    Ok(())
}

#[test]
fn every_instruction_set_passes() {
    if !on_cuda() {
        isa::run_again_on_each(&[]);
    }
}

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

/// A slab holds 2^20 decoded values, at least 64 rows.
#[test]
fn every_combination_at_slab_edges() -> Result<()> {
    let sizes = [
        // Both operands have one row more than a slab of rows of k, and more rows of m or n than a slab has.
        (131, 130, 8070),
        // Rows so long that the minimum of 64 applies.
        (65, 66, 17_000),
        (1025, 3, 1024),
        (2, 1030, 1024),
        (1024, 1024, 1024),
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
                    flat(&y).iter().all(|&y| y == 0.),
                    "{granularity} {m} {n} {k}: {y}"
                );
            }
        }
    }
    Ok(())
}

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
                    for (at, y) in flat(&multiply(&a, &b, DType::F32, None)?)
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
                    for (at, y) in flat(&multiply(&b, &a, DType::BF16, None)?)
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
    let y = flat(&multiply(&a, &b, DType::F32, None)?);
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
            let y = flat(&multiply(x, y, DType::F32, None)?);
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

/// The same bits; on a GPU, where each product may use another algorithm, within a tolerance of the largest value.
#[track_caller]
fn assert_same(what: &str, got: &Tensor, expected: &Tensor) {
    let tolerance = match (on_cuda(), got.dtype()) {
        (false, _) => 0.,
        (true, DType::F32) => 3e-3,
        (true, _) => 7e-2,
    };
    let expected = flat(expected);
    let largest = expected.iter().fold(0f64, |max, x| max.max(x.abs()));
    for (at, (got, expected)) in flat(got).iter().zip(&expected).enumerate() {
        let error = (got - expected).abs();
        assert!(
            error <= tolerance * largest,
            "{what}, {at}: {got:e}, expected {expected:e}, largest {largest:e}"
        );
    }
}

#[test]
fn sixteen_bit_results_and_bias() -> Result<()> {
    let (m, n, k) = (33, 130, 70);
    let kind = (Format::E4M3, Granularity::Rowwise, Cols);
    let kept = |values: usize, seed| {
        let mut rng = StdRng::seed_from_u64(seed);
        let codes = (0..values * k)
            .map(|_| code(&mut rng, Format::E4M3))
            .collect();
        // Small enough for f16.
        let scales = (0..values)
            .map(|_| rng.random_range(1e-3f32..2e-2))
            .collect();
        Operand::from_parts((values, k), codes, scales, kind, Cols)
    };
    let (a, b) = (kept(m, 1)?, kept(n, 2)?);
    let exact = multiply(&a, &b, DType::F32, None)?;
    let mut rng = StdRng::seed_from_u64(3);
    let bias: Vec<f32> = (0..n).map(|_| rng.random_range(-50f32..50.)).collect();
    let bias = Tensor::from_vec(bias, n, &device())?;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let rounded = exact.to_dtype(dtype)?;
        assert!(flat(&rounded).iter().all(|y| y.is_finite()), "{dtype:?}");
        let got = multiply(&a, &b, dtype, None)?;
        assert_eq!(got.dtype(), dtype);
        assert_same(&format!("{dtype:?}"), &got, &rounded);
        // Added in the output dtype, the bias rounded to it first.
        let expected = rounded.broadcast_add(&bias.to_dtype(dtype)?)?;
        let got = multiply(&a, &b, dtype, Some(&bias))?;
        assert_same(&format!("{dtype:?} with bias"), &got, &expected);
    }
    Ok(())
}

#[test]
fn same_bits_for_any_number_of_threads() -> Result<()> {
    for (m, n, k) in [
        (131, 130, 8070),
        (700, 600, 513),
        (1, 4096, 1024),
        (3000, 40, 64),
    ] {
        for (a_contraction, b_contraction) in COMBINATIONS {
            for granularity in [Granularity::Rowwise, BLOCK_128X128] {
                let a = Operand::new(1, (m, k), (Format::E4M3, granularity, a_contraction))?;
                let b = Operand::new(2, (n, k), (Format::E5M2, granularity, b_contraction))?;
                let mut first: Option<Vec<f64>> = None;
                for threads in [1, 2, 3, 5] {
                    let pool = rayon::ThreadPoolBuilder::new()
                        .num_threads(threads)
                        .build()
                        .unwrap();
                    let got = flat(&pool.install(|| multiply(&a, &b, DType::F32, None))?);
                    let first = first.get_or_insert_with(|| got.clone());
                    let differing = first.iter().zip(&got).filter(|(a, b)| a != b).count();
                    assert_eq!(
                        differing, 0,
                        "{a_contraction:?} x {b_contraction:?} {granularity} m {m} n {n} k {k}: \
                         values that differ between 1 and {threads} threads"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn operands_that_do_not_fit_are_errors() -> Result<()> {
    let kind = (Format::E4M3, Granularity::Tensorwise, Cols);
    let (a, b) = (
        Operand::new(1, (3, 40), kind)?,
        Operand::new(2, (5, 41), kind)?,
    );
    let error = multiply(&a, &b, DType::F32, None).unwrap_err().to_string();
    assert!(
        error.contains("operand B") && error.contains("[5, 41]"),
        "{error}"
    );

    let backend = backend(&device())?;
    let Some(packed) = backend.pack(a.tensor.codes())? else {
        return Ok(()); // This processor reads row-major codes.
    };
    let mut packed_a = a.tensor.operand(Cols);
    packed_a.codes = GemmCodes::Packed(&packed);
    let out = GemmOutput {
        dtype: DType::F32,
        bias: None,
        use_fast_accum: false,
    };
    let error = backend.gemm(&packed_a, &a.tensor.operand(Cols), &out);
    let error = error.expect_err("a packed operand A").to_string();
    assert!(error.contains("operand A"), "{error}");
    Ok(())
}
