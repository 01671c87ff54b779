//! How accurate results are, for every dtype, and with emulation.

use super::*;
use candle_core::{DType, Module, Result, Tensor, Var};
use fp8::{Recipe, RecipeName, fp8_autocast};
use fp8_test_support::{
    Model, assert_same, assert_within, device, flat64, largest, normal, rounding, sqnr, ulp,
};

#[test]
fn fidelity_on_normal_data() -> Result<()> {
    let (m, k, n) = (512, 1024, 512);
    let (x, weight, g) = operands(m, k, n);
    let exact = [
        ("output", x.matmul(&weight.t()?)?, 28.),
        ("grad_input", g.matmul(&weight)?, 0.),
        ("grad_weight", g.t()?.matmul(&x)?, 0.),
    ];
    for name in RecipeName::ALL {
        // Gradients in E5M2 are less accurate.
        let gradients = match name {
            RecipeName::Tensorwise | RecipeName::Delayed | RecipeName::Current => 24.,
            // Three casts of E5M2, two of them stochastic.
            RecipeName::Direct | RecipeName::Hybrid => 15.,
            _ => 28.,
        };
        let less = match name {
            RecipeName::Direct => 8.,
            // The output is cast too.
            RecipeName::Hybrid => 2.,
            _ => 0.,
        };
        let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
        let model = Model::prepared(&weight, None);
        let mut step = model.step(&x, &g, Recipe::from(name))?;
        if name == RecipeName::Delayed {
            // The first step casts with scale 1.
            step = model.step(&x, &g, Recipe::from(name))?;
        }
        let ours = [&step.y, step.grad_x(), step.grad_weight()];
        for ((gemm, exact, floor), ours) in exact.iter().zip(ours) {
            let floor = match *gemm {
                "output" => *floor - less,
                _ => gradients,
            };
            let got = sqnr(exact, ours);
            println!("{name} {gemm}: {got:.2} dB");
            assert!(got >= floor, "{name} {gemm}: {got:.2} dB, at least {floor}");
            // A good result alone does not prove that FP8 was used.
            let is_exact = name == RecipeName::RowwiseWithGwHp && *gemm == "grad_weight";
            assert_eq!(got > 60., is_exact, "{name} {gemm}: {got:.2} dB");
        }
    }
    Ok(())
}

#[test]
fn every_pair_of_dtypes() -> Result<()> {
    let (m, k, n) = (19, 48, 21);
    let (x, weight, g) = operands(m, k, n);
    for name in DYNAMIC {
        for x_dtype in FLOATS {
            for w_dtype in FLOATS {
                let what = format!("{name} x {x_dtype:?} w {w_dtype:?}");
                let x = var(&x, x_dtype)?;
                let weight = var(&weight, w_dtype)?;
                let bias = var(&Tensor::zeros(n, DType::F32, &device())?, w_dtype)?;
                let g = g.to_dtype(x_dtype)?;
                let step =
                    Model::prepared(&weight, Some(&bias)).step(&x, &g, exact_config(name))?;
                let expected = [x_dtype, x_dtype, w_dtype, w_dtype];
                assert_eq!(step.named().len(), expected.len(), "{what}");
                for ((name, ours), dtype) in step.named().into_iter().zip(expected) {
                    assert_eq!(ours.dtype(), dtype, "{what}: {name}");
                }
                if name == RecipeName::RowwiseWithGwHp {
                    continue;
                }
                check_against_oracle(&what, &exact_config(name), (&x, &weight, &g), &step)?;
                // Each operand is cast from its own dtype. A weight rounded to the dtype of x first would give other codes.
                let sums = flat64(&g.to_dtype(DType::F64)?.sum(0)?);
                let bounds = bias_bounds(&g)?;
                assert_eq!(step.grad_bias().dims(), [n], "{what}");
                for ((got, sum), bound) in
                    flat64(step.grad_bias()).into_iter().zip(sums).zip(bounds)
                {
                    let bound = bound + ulp(w_dtype, sum);
                    assert!(
                        (got - sum).abs() <= bound,
                        "{what}: grad_bias {got}, expected {sum}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn bias_is_added_in_the_output_dtype() -> Result<()> {
    let (m, k, n) = (9, 32, 12);
    let (x, weight, _) = operands(m, k, n);
    // Large compared to the product, with more bits than 16-bit dtypes have.
    let bias = ((normal(4, n) * 100.)? + 0.123)?;
    for x_dtype in FLOATS {
        for b_dtype in FLOATS {
            for emulate in [false, true] {
                let what = format!("x {x_dtype:?} bias {b_dtype:?} emulate={emulate}");
                let x = x.to_dtype(x_dtype)?;
                let bias = bias.to_dtype(b_dtype)?;
                let recipe = config(RecipeName::Tensorwise).with_emulate(emulate);
                let _guard = fp8_autocast(recipe)?;
                let with = Model::prepared(&weight, Some(&bias)).l.forward(&x)?;
                let without = Model::prepared(&weight, None).l.forward(&x)?;
                let expected = without.broadcast_add(&bias.to_dtype(x_dtype)?)?;
                assert_same(&what, &with, &expected);
            }
        }
    }
    Ok(())
}

#[test]
fn emulation_agrees_with_the_fast_path() -> Result<()> {
    for name in RecipeName::ALL {
        // A sum that is rounded the other way may round to another code.
        let base = config(name)
            .with_output(fp8::config::CastConfig::disabled())
            .with_grad_input(fp8::config::CastConfig::disabled())
            .with_grad_weight(fp8::config::CastConfig::disabled());
        for (m, k, n) in [(5, 7, 3), (64, 96, 48), (33, 257, 130)] {
            let run = |emulate: bool| trainable(m, k, n, base.clone().with_emulate(emulate));
            let (fast, emulated) = (run(false)?, run(true)?);
            let mut differing = 0;
            for (gemm, fast, emulated) in fast.beside(&emulated) {
                // Both paths are off by some standard deviations, each at most that of the largest sum.
                let len = match gemm {
                    "y" => k,
                    "grad_x" => n,
                    _ => m,
                };
                let bound = rounding::two_products(&[len]) * largest(emulated);
                assert_within(
                    &format!("{name} {m} {k} {n}: {gemm}"),
                    fast,
                    emulated,
                    |_, _| bound,
                );
                differing += flat64(fast)
                    .iter()
                    .zip(flat64(emulated))
                    .filter(|(a, b)| *a != b)
                    .count();
            }
            // If scales are powers of two, it makes no difference whether products are scaled before or after they are
            // summed up.
            let exact = name != RecipeName::Tensorwise;
            assert!(
                m < 10 || exact || differing > 0,
                "{name}: the two paths are one"
            );
        }
    }
    Ok(())
}

#[test]
fn a_high_precision_grad_weight_equals_the_plain_one() -> Result<()> {
    for dims in [vec![37], vec![4, 11], vec![512]] {
        for (x_dtype, w_dtype) in [
            (DType::F32, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F16),
            (DType::BF16, DType::F32),
        ] {
            let (k, n) = (96, 72);
            let what = format!("{dims:?} x {x_dtype:?} w {w_dtype:?}");
            let weight = var(&normal(2, (n, k)), w_dtype)?;
            let x = var(&normal(1, [&dims[..], &[k]].concat()), x_dtype)?;
            let g = normal(3, [&dims[..], &[n]].concat()).to_dtype(x_dtype)?;
            let model = Model::prepared(&weight, None);
            let step = model.step(&x, &g, config(RecipeName::RowwiseWithGwHp))?;

            let plain = candle_nn::Linear::new(weight.to_dtype(x_dtype)?, None).forward(&x)?;
            let grads = (&plain * &g)?.sum_all()?.backward()?;
            let expected = grads.get(&weight).unwrap();
            assert_same(&what, step.grad_weight(), expected);
            assert!(sqnr(&plain, &step.y) < 60., "{what}: the output is not FP8");

            // Computed by hand, by the matmul of candle's backward pass.
            let (x2, g2) = (x.reshape(((), k))?, g.reshape(((), n))?);
            let by_hand = x2.t()?.matmul(&g2)?.t()?.to_dtype(w_dtype)?;
            assert_same(&what, step.grad_weight(), &by_hand);
        }
    }
    Ok(())
}
