//! Products in FP8: against the definition in f64, with the casts written out here, and against high precision.

use super::*;
use fp8_candle::ops::AttentionDropout;
use fp8_core::{Format, mx_dequant_scale_rceil};
use fp8_test_support::rounding::{UNIT, UNIT_F64};

/// The values of the codes of rows of `d` values, each row with its own scale; without a format the values themselves.
pub fn cast_values(x: &[f64], d: usize, format: Option<Format>) -> Vec<f64> {
    let Some(format) = format else {
        return x.to_vec();
    };
    let rows = x.chunks(d).map(|row| {
        let amax = row.iter().fold(0f64, |a, x| a.max(x.abs()));
        row.iter().map(|&x| round(format, x, amax)).collect()
    });
    rows.collect::<Vec<Vec<f64>>>().concat()
}

/// The value of the code of `x` in a row with this amax.
fn round(format: Format, x: f64, amax: f64) -> f64 {
    let dequant_scale = mx_dequant_scale_rceil(amax as f32, format).to_f32();
    let code = fp8_core::Cast::new(format).encode_scaled(x as f32, 1.0 / dequant_scale, 0);
    f64::from(format.decode(code)) * f64::from(dequant_scale)
}

/// The cast of rows that are computed.
#[derive(Clone, Copy)]
pub struct Cast {
    format: Format,
    /// That of [`Approx::error`] in tests of this dtype.
    unit: f64,
    /// The relative error of the rounding to f32 before the cast.
    before: f64,
}

impl Cast {
    pub fn new(format: Format, dtype: DType) -> Self {
        let [unit, before] = match dtype {
            DType::F64 => [2.0 * UNIT_F64, UNIT],
            _ => [UNIT, 0.0],
        };
        Self {
            format,
            unit,
            before,
        }
    }

    /// A cast is monotone: the casts of the ends of what a value may be bound the cast of what it is. The same holds for the scale,
    /// which follows from the largest magnitude.
    pub fn row(self, row: &[Approx]) -> Vec<Approx> {
        let off = |x: &Approx| 1.01 * x.error * self.unit + self.before * x.value.abs();
        let largest = |sign: f64| {
            let magnitudes = row.iter().map(|x| x.value.abs() + sign * off(x));
            magnitudes.fold(0f64, f64::max)
        };
        let (amax, amaxes) = (largest(0.0), [largest(-1.0), largest(1.0)]);
        let cast = |x: &Approx| {
            let value = round(self.format, x.value, amax);
            let ends = amaxes.into_iter().flat_map(|amax| {
                [x.value - off(x), x.value + off(x)].map(|x| round(self.format, x, amax))
            });
            let error = ends.fold(0f64, |error, end| error.max((end - value).abs()));
            Approx::exact(value).off_by(error / self.unit)
        };
        row.iter().map(cast).collect()
    }
}

fn all() -> AttentionProducts {
    AttentionProducts::all()
}

/// Every combination of products.
fn combinations() -> impl Iterator<Item = AttentionProducts> {
    (1..16u32).map(|bits| {
        let has = |bit: u32| bits >> bit & 1 == 1;
        AttentionProducts::none()
            .with_scores(has(0))
            .with_values(has(1))
            .with_grad_probabilities(has(2))
            .with_grad_inputs(has(3))
    })
}

/// Result and gradients, heads first.
pub fn run_fp8(
    case: &Case,
    options: &AttentionOptions,
    dtype: DType,
    tokens_first: bool,
) -> Result<Vec<Tensor>> {
    super::options::run_with_values(case.values(dtype), options, dtype, tokens_first)
}

pub fn check_fp8(case: Case, products: AttentionProducts, dtypes: &[DType]) -> Result<()> {
    for &dtype in dtypes {
        let options = case.options().with_products(products);
        let got = run_fp8(&case, &options, dtype, false)?;
        let model = Attention {
            products,
            ..case.model(dtype)
        };
        let expected = model.run(case.values(dtype).each_ref().map(flat64));
        assert_close(&got, &expected, dtype, &format!("{case:?} {products:?}"));
    }
    Ok(())
}

#[test]
fn all_products_follow_the_definition() -> Result<()> {
    for causal in [false, true] {
        for (tq, tk) in [(1, 1), (17, 17), (70, 70), (65, 129), (3, 131)] {
            check_fp8(Case::new(tq, tk, 64, causal), all(), &ALL)?;
        }
    }
    for d in [8, 32, 96, 128] {
        check_fp8(Case::new(40, 70, d, true), all(), &[DType::F32])?;
    }
    Ok(())
}

#[test]
fn grouped_heads_follow_the_definition() -> Result<()> {
    for (heads, kv_heads) in [(4, 2), (3, 1)] {
        let case = Case::new(67, 70, 32, true).heads(2, heads, kv_heads);
        check_fp8(case, all(), &[DType::F32, DType::BF16])?;
    }
    Ok(())
}

#[test]
fn each_choice_of_products_follows_the_definition() -> Result<()> {
    for products in combinations() {
        let case = Case::new(33, 70, 32, true);
        check_fp8(case, products, &[DType::F32, DType::BF16])?;
    }
    Ok(())
}

#[test]
fn other_formats_follow_the_definition() -> Result<()> {
    for (format, grad_format) in [
        (Format::E4M3, Format::E5M2),
        (Format::E5M2, Format::E4M3),
        (Format::E4M3Fnuz, Format::E5M2Fnuz),
    ] {
        let products = all().with_format(format).with_grad_format(grad_format);
        check_fp8(Case::new(40, 40, 32, true), products, &[DType::F32])?;
    }
    Ok(())
}

/// The bounds above are narrow enough to tell FP8 from high precision.
#[test]
fn high_precision_is_outside_the_bounds() -> Result<()> {
    let case = Case::new(70, 70, 64, true);
    let model = Attention {
        products: all(),
        ..case.model(DType::F32)
    };
    let expected = model.run(case.values(DType::F32).each_ref().map(flat64));
    let got = run_fp8(&case, &case.options(), DType::F32, false)?;
    assert_eq!((got.len(), expected.len()), (4, 4));
    for (got, expected) in got.iter().zip(&expected) {
        let got = flat64(got);
        assert_eq!(got.len(), expected.len());
        let outside = got
            .iter()
            .zip(expected)
            .filter(|(got, expected)| (*got - expected.value).abs() > expected.bound(DType::F32));
        assert!(10 * outside.count() > 9 * got.len());
    }
    Ok(())
}

/// The distance from high precision, by norms, against what independent roundings give.
#[test]
fn errors_are_those_of_the_roundings() -> Result<()> {
    // Values in [-2, 2): dot products over sqrt(d) have a standard deviation of 4 / 3.
    let deviation = 4.0 / 3.0;
    // A cast to E4M3 has a relative error of at most 2^-4, evenly distributed: its root mean square.
    let cast = 2f64.powi(-4) / 3f64.sqrt();
    // A probability is off by the errors of its logit, in which two casts meet; then it is cast itself, as is its value.
    let probability = (2.0 * (cast * deviation).powi(2)).sqrt();
    let y = (probability.powi(2) + 2.0 * cast * cast).sqrt();
    // The gradient of a logit p (dp - delta) has the error of p and that of dp, in which two casts meet.
    let logit = (probability.powi(2) + 2.0 * cast * cast).sqrt();
    let dqk = (logit.powi(2) + 2.0 * cast * cast).sqrt();
    for causal in [false, true] {
        let case = Case::new(192, 192, 64, causal).heads(2, 4, 2);
        let exact = run_fp8(&case, &case.options(), DType::F32, true)?;
        let options = case.options().with_products(all());
        let got = run_fp8(&case, &options, DType::F32, true)?;
        for (i, expected) in [y, dqk, dqk, y].into_iter().enumerate() {
            let error = super::options::relative(&got[i], &exact[i]);
            // Up to twice: a few tokens with few keys weigh most, and logits have tails. A cast that does nothing fails as well.
            let range = expected / 8.0..=2.0 * expected;
            assert!(
                range.contains(&error),
                "{causal} {i}: {error} of {expected}"
            );
        }
    }
    Ok(())
}

/// With all products in FP8, operands are exact in bf16: one arithmetic for f32 tensors with and without bf16 operands; and one for
/// both layouts.
#[test]
fn layouts_and_operands_give_the_same_bits() -> Result<()> {
    let options = |case: &Case| case.options().with_window(50).with_products(all());
    for case in [
        Case::new(70, 70, 16, true).heads(2, 4, 2),
        Case::new(1, 70, 8, true).heads(2, 3, 1),
    ] {
        let bits = |options: &AttentionOptions, tokens_first| -> Result<Vec<Vec<f64>>> {
            let found = run_fp8(&case, options, DType::F32, tokens_first)?;
            Ok(found.iter().map(flat64).collect())
        };
        let expected = bits(&options(&case), false)?;
        assert!(expected == bits(&options(&case), true)?);
        let in_bf16 = options(&case).with_operands(DType::BF16);
        assert!(expected == bits(&in_bf16, false)?);
    }
    Ok(())
}

/// A token's codes depend on nothing beside it: later tokens have no part in the results of earlier ones.
#[test]
fn later_tokens_change_nothing() -> Result<()> {
    let case = Case::new(70, 70, 32, true).heads(1, 2, 1);
    let [q, k, v, _] = case.values(DType::F32);
    let device = device();
    let run = |factor: f64| -> Result<Vec<f64>> {
        let later = |x: &Tensor| {
            let (first, rest) = (x.narrow(2, 0, 37)?, x.narrow(2, 37, 33)?);
            let x = Tensor::cat(&[&first, &(rest * factor)?], 2)?;
            x.to_dtype(DType::F32)?.to_device(&device)
        };
        let options = case.options().with_products(all());
        let y = attention(&later(&q)?, &later(&k)?, &later(&v)?, options)?;
        Ok(flat64(&y.narrow(2, 0, 37)?.contiguous()?))
    };
    let expected = run(1.0)?;
    assert!(expected == run(1000.0)?);
    Ok(())
}

/// Any number of threads; with dropout and key lengths.
#[test]
fn any_number_of_threads_gives_the_same_bits() -> Result<()> {
    let case = Case::new(200, 230, 32, true).heads(2, 4, 1);
    let options = case
        .options()
        .with_dropout(AttentionDropout::new(0.1, 3))
        .with_key_lengths(vec![230, 190])
        .with_products(all());
    let run = |threads| -> Result<Vec<Vec<f64>>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.build().expect("a pool");
        let found = pool.install(|| run_fp8(&case, &options, DType::F32, false))?;
        Ok(found.iter().map(flat64).collect())
    };
    let one = run(1)?;
    for threads in [2, 3, 7] {
        assert!(run(threads)? == one, "{threads} threads");
    }
    Ok(())
}

/// Kernels and the composed form (f64) compute the same for all options. A value that lies between two codes may fall to either
/// side: a step of 2^-3 in few of the terms.
#[test]
fn kernels_equal_the_composed_form() -> Result<()> {
    let case = Case::new(61, 70, 40, false).heads(2, 4, 2);
    for options in super::options::all_options() {
        for products in [
            all(),
            all().with_scores(false),
            all().with_grad_inputs(false),
        ] {
            let options = options.clone().with_products(products);
            let exact = case.values(DType::F32);
            let expected =
                super::options::run_with_values(exact.clone(), &options, DType::F64, false)?;
            for tokens_first in [false, true] {
                let got = super::options::run_with_values(
                    exact.clone(),
                    &options,
                    DType::F32,
                    tokens_first,
                )?;
                for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    let error = super::options::relative(got, expected);
                    assert!(error <= 2f64.powi(-9), "{options:?} {i}: {error:e}");
                }
            }
        }
    }
    Ok(())
}

/// An Inf or NaN in a token becomes NaN in every result that reads it, in either pass.
#[test]
fn what_is_not_finite_shows() -> Result<()> {
    let case = Case::new(40, 40, 16, true).heads(1, 1, 1);
    for bad in [f64::NAN, f64::INFINITY] {
        for which in 0..4 {
            let mut values = case.values(DType::F32);
            let spot = Tensor::full(bad, (1, 1, 1, 16), &Device::Cpu)?;
            let x = &values[which];
            let (before, after) = (x.narrow(2, 0, 20)?, x.narrow(2, 21, 19)?);
            values[which] = Tensor::cat(&[&before, &spot, &after], 2)?;
            let options = case.options().with_products(all());
            let got = super::options::run_with_values(values, &options, DType::F32, false)?;
            let nan_rows = |i: usize| -> Vec<usize> {
                let rows = flat64(&got[i]);
                let rows = rows.chunks(16).enumerate();
                rows.filter(|(_, row)| row.iter().any(|x| x.is_nan()))
                    .map(|(row, _)| row)
                    .collect()
            };
            let rows: Vec<usize> = match which {
                0 => vec![20],
                1 | 2 => (20..40).collect(),
                _ => vec![],
            };
            let found = nan_rows(0);
            assert!(rows.iter().all(|row| found.contains(row)), "y of {which}");
            assert!(which != 3 || found.is_empty(), "y of {which}");
            assert!(!nan_rows(1).is_empty(), "dq of {which}");
            assert!(!nan_rows(2).is_empty(), "dk of {which}");
            // The gradient of v does not read v.
            assert!(which == 2 || !nan_rows(3).is_empty(), "dv of {which}");
        }
    }
    Ok(())
}
