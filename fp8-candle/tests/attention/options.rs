//! Windows, lengths, dropout and operands: f64 tensors, which are composed, against the definition, and kernels against f64.

use super::*;
use fp8_candle::ops::AttentionDropout;
use fp8_test_support::rounding::{UNIT, UNIT_F64};

fn plain() -> AttentionOptions {
    AttentionOptions::default()
}

pub fn all_options() -> Vec<AttentionOptions> {
    let dropout = AttentionDropout::new(0.3, 0x1_2345_6789);
    vec![
        plain(),
        plain().with_causal(true),
        plain().with_window(5),
        plain().with_window(40).with_softmax_scale(-0.3),
        plain().with_window(0),
        plain().with_key_lengths(vec![37, 0]),
        plain().with_key_lengths(vec![1, 64]).with_causal(true),
        plain().with_key_lengths(vec![70, 33]).with_window(9),
        plain().with_dropout(dropout),
        plain().with_dropout(dropout).with_causal(true),
        plain()
            .with_dropout(dropout)
            .with_window(33)
            .with_key_lengths(vec![61, 70]),
    ]
}

/// Result and gradients in `dtype`, heads first, from values that are exact in bf16.
fn run_with(
    case: &Case,
    options: &AttentionOptions,
    dtype: DType,
    tokens_first: bool,
) -> Result<Vec<Tensor>> {
    run_with_values(case.values(DType::BF16), options, dtype, tokens_first)
}

/// [`run_with`] of these q, k, v and gradient of the result, heads first.
pub fn run_with_values(
    [q, k, v, weights]: [Tensor; 4],
    options: &AttentionOptions,
    dtype: DType,
    tokens_first: bool,
) -> Result<Vec<Tensor>> {
    let device = device();
    let turned = |x: &Tensor| match tokens_first {
        true => x.transpose(1, 2)?.contiguous(),
        false => Ok(x.clone()),
    };
    let here = |x: &Tensor| turned(&x.to_dtype(dtype)?.to_device(&device)?);
    let [q, k, v] = [
        Var::from_tensor(&here(&q)?)?,
        Var::from_tensor(&here(&k)?)?,
        Var::from_tensor(&here(&v)?)?,
    ];
    let y = match tokens_first {
        true => attention_tokens_first(&q, &k, &v, options.clone())?,
        false => attention(&q, &k, &v, options.clone())?,
    };
    let found = results(&y, &here(&weights)?, &[&q, &k, &v])?;
    Ok(found
        .iter()
        .map(turned)
        .collect::<candle_core::Result<_>>()?)
}

/// The difference relative to the reference, by norms.
pub fn relative(got: &Tensor, expected: &Tensor) -> f64 {
    let (got, expected) = (flat64(got), flat64(expected));
    assert_eq!(got.len(), expected.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(&expected).map(|(a, b)| a - b));
    match norm(&mut expected.iter().copied()) {
        0.0 => difference,
        size => difference / size,
    }
}

fn cases() -> Vec<Case> {
    vec![
        Case::new(70, 70, 16, false).heads(2, 4, 2),
        Case::new(61, 70, 40, false).heads(2, 2, 2),
        Case::new(1, 70, 8, false).heads(2, 3, 1),
    ]
}

#[test]
fn kernels_equal_the_composed_form() -> Result<()> {
    for case in cases() {
        for options in all_options() {
            let expected = run_with(&case, &options, DType::F64, false)?;
            for (dtype, operands, tolerance) in [
                // Logits up to 10 with errors of some 2^-24 of them.
                (DType::F32, None, 2e-5),
                // Weights and their gradients are rounded by up to 2^-9; terms cancel to some part of their size.
                (DType::F32, Some(DType::BF16), 2f64.powi(-6)),
                (DType::BF16, None, 2f64.powi(-6)),
                (DType::BF16, Some(DType::F32), 2f64.powi(-7)),
                (DType::F16, None, 2f64.powi(-10)),
            ] {
                for tokens_first in [false, true] {
                    let options = options.clone().with_operands(operands);
                    let got = run_with(&case, &options, dtype, tokens_first)?;
                    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                        let error = relative(got, expected);
                        assert!(
                            error <= tolerance,
                            "{case:?} {options:?} {dtype:?} {tokens_first}, {i}: {error:e}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn the_composed_form_follows_the_definition() -> Result<()> {
    for case in cases() {
        let Case { tq, tk, d, .. } = case;
        let [q, k, v, _] = case.values(DType::BF16).map(|x| flat64(&x));
        for options in all_options() {
            let Some(lengths) = (match &options.dropout {
                Some(_) => None,
                None => Some(options.key_lengths.clone().unwrap_or(vec![tk; 2])),
            }) else {
                continue;
            };
            let got = flat64(&run_with(&case, &options, DType::F64, false)?[0]);
            let scale = options.softmax_scale.unwrap_or(1.0 / (d as f64).sqrt());
            for (row, got) in got.chunks(d).enumerate() {
                let (pair, i) = (row / tq, row % tq);
                let (batch, head) = (pair / case.heads, pair % case.heads);
                let kv = batch * case.kv_heads + head / (case.heads / case.kv_heads);
                let own = (i + tk - tq) as i64;
                let sees = |j: i64| {
                    let causal = options.causal || options.window.is_some();
                    (!causal || j <= own)
                        && options.window.is_none_or(|window| j > own - window as i64)
                        && j < lengths[batch] as i64
                };
                let (mut total, mut sums) = (0.0, vec![0.0; d]);
                for j in (0..tk).filter(|&j| sees(j as i64)) {
                    let key = &k[(kv * tk + j) * d..][..d];
                    let dot: f64 = key.iter().zip(&q[row * d..]).map(|(k, q)| k * q).sum();
                    let weight = (scale * dot).exp();
                    total += weight;
                    for (sum, v) in sums.iter_mut().zip(&v[(kv * tk + j) * d..]) {
                        *sum += weight * v;
                    }
                }
                for (got, sum) in got.iter().zip(&sums) {
                    let expected = if total > 0.0 { sum / total } else { 0.0 };
                    // Sums of up to 70 terms, with exponentials of logits up to 10 that have the error of up to 64 products.
                    let bound = (70.0 + 64.0 * 10.0 + 8.0) * UNIT_F64 * 2.0;
                    assert!(
                        (got - expected).abs() <= bound,
                        "{case:?} {options:?} {row}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Also where several tasks share a head of keys.
#[test]
fn any_number_of_threads_gives_the_same_bits() -> Result<()> {
    for heads in [1, 4] {
        let case = Case::new(200, 230, 32, true).heads(2, heads, 1);
        for options in [
            plain().with_causal(true),
            plain().with_dropout(AttentionDropout::new(0.1, 3)),
        ] {
            for (dtype, operands) in [(DType::F32, None), (DType::F32, Some(DType::BF16))] {
                let options = options.clone().with_operands(operands);
                let run = |threads| -> Result<Vec<Vec<f64>>> {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    let pool = pool.build().expect("a pool");
                    let found = pool.install(|| run_with(&case, &options, dtype, false))?;
                    Ok(found.iter().map(flat64).collect())
                };
                let one = run(1)?;
                for threads in [2, 3, 7] {
                    assert!(run(threads)? == one, "{threads} threads, {options:?}");
                }
            }
        }
    }
    Ok(())
}

/// With values that are unit vectors, the result is the probabilities.
#[test]
fn dropout_drops_its_part() -> Result<()> {
    let (t, probability) = (64, 0.3);
    let device = device();
    let x = Tensor::zeros((1, 8, t, t), DType::F32, &device)?;
    let v = Tensor::eye(t, DType::F32, &device)?.broadcast_as((1, 8, t, t))?;
    let run = |seed| -> Result<Vec<f64>> {
        let options = plain().with_dropout(AttentionDropout::new(probability, seed));
        Ok(flat64(&attention(&x, &x, &v, options)?))
    };
    let p = run(7)?;
    assert_eq!(p.len(), 8 * t * t);
    let kept = 1.0 / t as f64 / (1.0 - probability);
    // A reciprocal of 64 ones, and two factors.
    let off = 4.0 * UNIT * kept;
    assert!(p.iter().all(|&p| p == 0.0 || (p - kept).abs() <= off));
    let share = |p: &[f64]| p.iter().filter(|&&p| p == 0.0).count() as f64 / p.len() as f64;
    // Five standard deviations.
    let bound = |n: usize| 5.0 * (probability * (1.0 - probability) / n as f64).sqrt();
    assert!((share(&p) - probability).abs() < bound(p.len()));
    let heads: Vec<&[f64]> = p.chunks(t * t).collect();
    for (i, head) in heads.iter().enumerate() {
        assert!((share(head) - probability).abs() < bound(t * t));
        assert!(heads[..i].iter().all(|other| other != head), "head {i}");
    }
    // Neighbours are independent: both are dropped with the square of the probability.
    let both = p.windows(2).filter(|pair| *pair == [0.0, 0.0]).count() as f64 / p.len() as f64;
    assert!((both - probability * probability).abs() < 2.0 * bound(p.len()));
    assert_eq!(run(7)?, p);
    assert_ne!(run(8)?, p);
    Ok(())
}

/// A NaN that a query does not see has no effect on its row, nor has its row on hidden keys.
#[test]
fn padding_is_not_read() -> Result<()> {
    let case = Case::new(40, 40, 16, false).heads(1, 2, 2);
    let options = plain().with_key_lengths(vec![33]);
    let [q, k, v, _] = case.values(DType::F32);
    let here = |x: &Tensor| x.to_dtype(DType::F32)?.to_device(&device());
    let [q, k, v] = [here(&q)?, here(&k)?, here(&v)?];
    let nan = Tensor::full(f32::NAN, (1, 2, 7, 16), q.device())?;
    let poisoned = Tensor::cat(&[&k.narrow(2, 0, 33)?, &nan], 2)?;
    let y = attention(&q, &k, &v, options.clone())?;
    let again = attention(&q, &poisoned, &v, options)?;
    assert_eq!(flat64(&y), flat64(&again));
    Ok(())
}

#[test]
fn wrong_options_are_named() -> Result<()> {
    let x = Tensor::zeros((2, 1, 4, 8), DType::F32, &device())?;
    for (options, part) in [
        (plain().with_key_lengths(vec![4]), "2 lengths up to 4"),
        (
            plain().with_key_lengths(vec![4, 5]),
            "[4, 5] of key_lengths",
        ),
        (
            plain().with_dropout(AttentionDropout::new(1.0, 0)),
            "probability 1",
        ),
        (
            plain().with_dropout(AttentionDropout::new(f64::NAN, 0)),
            "probability NaN",
        ),
        (plain().with_operands(DType::F64), "F64 of the operands"),
    ] {
        let message = attention(&x, &x, &x, options).unwrap_err().to_string();
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    Ok(())
}
