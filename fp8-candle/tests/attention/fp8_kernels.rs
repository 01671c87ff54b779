//! Products in FP8 where kernels have edges: tiles of queries and keys, head sizes, layouts, formats, and which gradients are wanted.

use super::fp8::{check_fp8, run_fp8};
use super::*;
use fp8_core::Format;

fn all() -> AttentionProducts {
    AttentionProducts::all()
}

/// One query or key more or fewer than kernels take at a time, and head sizes between those that they are compiled for.
#[test]
fn odd_sizes_follow_the_definition() -> Result<()> {
    for (tq, tk, d) in [
        (63, 63, 8),
        (64, 65, 40),
        (129, 130, 64),
        (130, 192, 72),
        (1, 257, 128),
        (128, 128, 128),
    ] {
        for causal in [false, true] {
            let case = Case::new(tq, tk, d, causal).heads(1, 2, 1);
            check_fp8(case, all(), &[DType::F32, DType::BF16])?;
        }
    }
    check_fp8(Case::new(130, 65, 40, false), all(), &[DType::BF16])
}

/// Several tiles of queries, and several steps over keys, in both directions.
#[test]
fn long_sequences_follow_the_definition() -> Result<()> {
    let case = Case::new(300, 300, 16, true).heads(1, 2, 1);
    check_fp8(case, all(), &[DType::F32, DType::BF16])?;
    check_fp8(
        Case::new(257, 300, 72, false).heads(1, 1, 1),
        all(),
        &[DType::BF16],
    )
}

#[test]
fn all_formats_follow_the_definition() -> Result<()> {
    for format in Format::ALL {
        for grad_format in Format::ALL {
            let products = all().with_format(format).with_grad_format(grad_format);
            let case = Case::new(66, 70, 16, true).heads(1, 2, 1);
            check_fp8(case, products, &[DType::BF16])?;
        }
    }
    Ok(())
}

/// Small and large multipliers: rows of P with one key, and with all alike.
#[test]
fn multipliers_follow_the_definition() -> Result<()> {
    for softmax_scale in [1e-3, 0.7, -0.2] {
        let case = Case {
            softmax_scale: Some(softmax_scale),
            ..Case::new(40, 70, 32, true)
        };
        check_fp8(case, all(), &[DType::F32, DType::BF16])?;
    }
    Ok(())
}

/// Sums of values in high precision, all others in FP8.
#[test]
fn values_may_stay_in_high_precision() -> Result<()> {
    let case = Case::new(130, 140, 64, true).heads(1, 2, 1);
    check_fp8(case, all().with_values(false), &[DType::F32, DType::BF16])
}

/// A projection's q, k and v as views of one tensor, with tokens first, give the bits of separate tensors with heads first.
#[test]
fn views_and_layouts_give_the_same_bits() -> Result<()> {
    let device = device();
    for (dtype, d) in [(DType::F32, 64), (DType::BF16, 40)] {
        let case = Case::new(131, 131, d, true).heads(2, 2, 2);
        let options = case.options().with_products(all());
        let expected = run_fp8(&case, &options, dtype, false)?;
        let [q, k, v, weights] = case.values(dtype);
        let here = |x: &Tensor| {
            x.transpose(1, 2)?
                .contiguous()?
                .to_dtype(dtype)?
                .to_device(&device)
        };
        let joint = Var::from_tensor(&Tensor::cat(&[here(&q)?, here(&k)?, here(&v)?], 2)?)?;
        let part = |i: usize| joint.narrow(2, 2 * i, 2);
        let y = attention_tokens_first(&part(0)?, &part(1)?, &part(2)?, options)?;
        let found = results(&y, &here(&weights)?, &[&joint])?;
        let heads_first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
        assert!(flat64(&heads_first(&found[0])?) == flat64(&expected[0]));
        for (i, expected) in expected[1..].iter().enumerate() {
            let gradient = found[1].narrow(2, 2 * i, 2)?;
            assert!(flat64(&heads_first(&gradient)?) == flat64(expected), "{i}");
        }
    }
    Ok(())
}

/// Each gradient alone has the bits that it has beside the others, and the result those that it has without a graph.
#[test]
fn each_gradient_alone_is_the_same() -> Result<()> {
    let device = device();
    let case = Case::new(70, 131, 64, true);
    let options = case.options().with_products(all());
    let expected = run_fp8(&case, &options, DType::BF16, false)?;
    let here = |x: &Tensor| x.to_dtype(DType::BF16)?.to_device(&device);
    let [q, k, v, weights] = case.values(DType::BF16);
    let values = [here(&q)?, here(&k)?, here(&v)?];
    for wanted in 0..3 {
        let var = Var::from_tensor(&values[wanted])?;
        let mut x = values.clone();
        x[wanted] = var.as_tensor().clone();
        let y = attention(&x[0], &x[1], &x[2], options.clone())?;
        let found = results(&y, &here(&weights)?, &[&var])?;
        assert!(flat64(&found[0]) == flat64(&expected[0]), "{wanted}");
        assert!(
            flat64(&found[1]) == flat64(&expected[1 + wanted]),
            "{wanted}"
        );
    }
    let y = attention(&values[0], &values[1], &values[2], options)?;
    assert!(flat64(&y) == flat64(&expected[0]));
    Ok(())
}

/// What is not finite in a query or in the gradient of its result does not reach other queries.
#[test]
fn what_is_not_finite_stays_in_its_query() -> Result<()> {
    const TOKEN: usize = 70;
    for dtype in [DType::F32, DType::BF16] {
        let case = Case::new(140, 140, 16, true).heads(1, 1, 1);
        for which in [0, 3] {
            let mut values = case.values(dtype);
            let spot = Tensor::full(f64::NAN, (1, 1, 1, 16), &Device::Cpu)?;
            let x = &values[which];
            let (before, after) = (x.narrow(2, 0, TOKEN)?, x.narrow(2, TOKEN + 1, 139 - TOKEN)?);
            values[which] = Tensor::cat(&[&before, &spot, &after], 2)?;
            let options = case.options().with_products(all());
            let got = super::options::run_with_values(values, &options, dtype, false)?;
            for (i, x) in got[..2].iter().enumerate() {
                // The gradient has no part in the result.
                let reaches = which == 0 || i == 1;
                for (row, values) in flat64(x).chunks(16).enumerate() {
                    let finite = values.iter().all(|x| x.is_finite());
                    let expected = row != TOKEN || !reaches;
                    assert_eq!(finite, expected, "{dtype:?} {which} {i} {row}");
                }
            }
        }
    }
    Ok(())
}

/// Gradients of any size have the same relative errors: scales follow them.
#[test]
fn gradients_of_any_size_are_rounded_alike() -> Result<()> {
    let case = Case::new(70, 70, 32, true).heads(1, 2, 2);
    let options = case.options().with_products(all());
    let run = |exponent: i32| -> Result<Vec<Vec<f64>>> {
        let factor = 2f64.powi(exponent);
        let mut values = case.values(DType::BF16);
        values[3] = (&values[3] * factor)?;
        let found = super::options::run_with_values(values, &options, DType::F32, false)?;
        let found = found[1..].iter().map(flat64);
        Ok(found
            .map(|x| x.iter().map(|x| x / factor).collect())
            .collect())
    };
    let expected = run(0)?;
    for exponent in [-60, -20, 30] {
        assert!(run(exponent)? == expected, "{exponent}");
    }
    Ok(())
}
