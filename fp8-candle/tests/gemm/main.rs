//! The FP8 GEMM of a backend against products in f64 of values decoded here, code by code.

#[cfg(feature = "cuda")]
mod paths;
mod rows;
mod scaled_mm;
mod sizes;
mod special;

use candle_core::op::BackpropOp;
use candle_core::{DType, Tensor};
use fp8_candle::device::{GemmCodes, GemmOutput, backend};
use fp8_candle::{Fp8Tensor, Result};
use fp8_core::Contraction::{self, Cols, Rows};
use fp8_core::{Cast, E8M0, Format, Granularity};
use fp8_test_support::{device, flat64, on_cuda, rounding, skipped};
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
            .map(|scale| match granularity {
                Granularity::Mx => E8M0::from_f32(scale).to_f32(),
                _ => scale,
            })
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

/// Which rows of an operand are compared: all, or of a large product the ends, both sides of every 64th row and 24 others.
fn sample(kept: usize, is_large: bool) -> Vec<u32> {
    if !is_large || kept <= 64 {
        return (0..kept as u32).collect();
    }
    let mut rng = StdRng::seed_from_u64(kept as u64);
    let mut rows: Vec<_> = (0..24).map(|_| rng.random_range(0..kept as u32)).collect();
    rows.extend((0..8).flat_map(|at| [at, kept as u32 - 1 - at]));
    rows.extend((64..kept as u32).step_by(64).flat_map(|at| [at - 1, at]));
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// Fails if the error is larger than the roundings of a sum of k terms explain, see `rounding.rs`. Of products of more than 2^23
/// multiplications it looks at the rows and columns of [`sample`].
#[track_caller]
fn check(what: &str, a: &Operand, b: &Operand) -> Result<()> {
    let ((m, k), n) = (a.values.dims2()?, b.values.dim(0)?);
    let is_large = m * n * k > 1 << 23;
    let (rows, cols) = (sample(m, is_large), sample(n, is_large));
    let select = |x: &Tensor, at: &[u32], dim| x.index_select(&Tensor::new(at, x.device())?, dim);
    let got = multiply(a, b, DType::F32, None)?;
    assert_eq!(got.dims(), [m, n], "{what}");
    let got = select(&select(&got, &rows, 0)?, &cols, 1)?;
    let a = select(&a.values, &rows, 0)?;
    let b = select(&b.values, &cols, 0)?.t()?;
    let got = flat64(&got);
    let expected = flat64(&a.matmul(&b)?);
    let magnitude = flat64(&a.abs()?.matmul(&b.abs()?)?);
    let square = flat64(&a.sqr()?.matmul(&b.sqr()?)?);
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let (error, magnitude) = ((got - expected).abs(), magnitude[at]);
        let bound = rounding::product_bound(k, magnitude, square[at]);
        assert!(
            error <= bound,
            "{what} [{}, {}]: {got:e}, expected {expected:e}; sum of |a||b| {magnitude:e}",
            rows[at / cols.len()],
            cols[at % cols.len()]
        );
    }
    Ok(())
}

/// The same bits; on a GPU, where each product may use another algorithm, within a tolerance of the largest value: that of
/// `rounding::tensor_core_bound` for the hundred terms or so of these sums, of which the largest is 3.5 standard deviations; and
/// the rounding to 16 bits on top, which a bias comes before or after.
#[track_caller]
fn assert_same(what: &str, got: &Tensor, expected: &Tensor) {
    let tolerance = match (on_cuda(), got.dtype()) {
        (false, _) => 0.,
        (true, DType::F32) => 3e-3,
        (true, _) => 7e-2,
    };
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let expected = flat64(expected);
    let largest = expected.iter().fold(0f64, |max, x| max.max(x.abs()));
    for (at, (got, expected)) in flat64(got).iter().zip(&expected).enumerate() {
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
        assert!(flat64(&rounded).iter().all(|y| y.is_finite()), "{dtype:?}");
        let got = multiply(&a, &b, dtype, None)?;
        assert_eq!(got.dtype(), dtype);
        assert_same(&format!("{dtype:?}"), &got, &rounded);
        // Added in the output dtype, the bias rounded to it first. The sum is rounded here, since candle's sums of bf16 are cut off
        // on aarch64.
        let wide = |x: &Tensor| x.to_dtype(dtype)?.to_dtype(DType::F32);
        let expected = wide(&exact)?.broadcast_add(&wide(&bias)?)?;
        let expected = expected.to_dtype(dtype)?;
        let got = multiply(&a, &b, dtype, Some(&bias))?;
        assert_same(&format!("{dtype:?} with bias"), &got, &expected);
    }
    Ok(())
}

/// Sums are in f32, but the bias keeps all of its bits.
#[test]
fn a_bias_in_f64_is_added_in_f64() -> Result<()> {
    if on_cuda() {
        skipped("results in f64: only the CPU has them");
        return Ok(());
    }
    let bias: Vec<f64> = (0..33).map(|i| 1. / (3. + f64::from(i))).collect();
    let bias = Tensor::from_vec(bias, 33, &device())?;
    for granularity in [Granularity::Tensorwise, BLOCK_1X128] {
        let kind = (Format::E4M3, granularity, Cols);
        let a = Operand::new(1, (9, 300), kind)?;
        let b = Operand::new(2, (33, 300), kind)?;
        let product = multiply(&a, &b, DType::F64, None)?;
        let got = multiply(&a, &b, DType::F64, Some(&bias))?;
        let what = format!("{granularity}");
        assert_same(&what, &got, &product.broadcast_add(&bias)?);
    }
    Ok(())
}

#[test]
fn same_bits_for_any_number_of_threads() -> Result<()> {
    for (m, n, k) in [
        (131, 66, 8070),
        (700, 200, 513),
        (1, 4096, 1024),
        (3000, 40, 64),
    ] {
        for (a_contraction, b_contraction) in COMBINATIONS {
            for granularity in [Granularity::Rowwise, BLOCK_128X128] {
                let a = Operand::new(1, (m, k), (Format::E4M3, granularity, a_contraction))?;
                let b = Operand::new(2, (n, k), (Format::E5M2, granularity, b_contraction))?;
                let mut first: Option<Vec<f64>> = None;
                for threads in [1, 2, 5] {
                    let pool = rayon::ThreadPoolBuilder::new()
                        .num_threads(threads)
                        .build()
                        .unwrap();
                    let got = flat64(&pool.install(|| multiply(&a, &b, DType::F32, None))?);
                    let first = first.get_or_insert_with(|| got.clone());
                    assert_eq!((first.len(), got.len()), (m * n, m * n));
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
    let Some(packed) = backend.pack(a.tensor.codes(), a.tensor.format())? else {
        skipped("a packed operand A: this processor reads row-major codes");
        return Ok(());
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

    let format = Format::E4M3Fnuz;
    if backend.pack(a.tensor.codes(), format)?.is_some() {
        skipped("a packed operand B in FNUZ: this processor reads every format");
        return Ok(());
    }
    let mut packed_b = packed_a;
    packed_b.format = format;
    let error = backend.gemm(&a.tensor.operand(Cols), &packed_b, &out);
    let error = error.expect_err("a packed operand B in FNUZ").to_string();
    assert!(
        error.contains("operand B") && error.contains("never packed"),
        "{error}"
    );
    Ok(())
}
