//! Which tensors get gradients, and which recipe and scales a backward pass uses.

use super::*;
use candle_core::{DType, Module, Result, Var};
use fp8::{Autocast, DelayedScaling, Fp8LinearConfig, Recipe, RecipeName, end_step, fp8_autocast};
use fp8_test_support::{Model, assert_same, assert_within, normal, rounding};

#[test]
fn a_layer_with_disabled_casts_equals_the_plain_one() -> Result<()> {
    for (x_dtype, w_dtype) in [(DType::F32, DType::F32), (DType::BF16, DType::F32)] {
        for dims in [vec![37], vec![4, 11]] {
            let (k, n) = (96, 72);
            let weight = var(&normal(2, (n, k)), w_dtype)?;
            let bias = var(&normal(4, n), w_dtype)?;
            let x = var(&normal(1, [&dims[..], &[k]].concat()), x_dtype)?;
            let g = normal(3, [&dims[..], &[n]].concat()).to_dtype(x_dtype)?;
            let model = Model::prepared(&weight, Some(&bias));
            let step = model.step(&x, &g, Fp8LinearConfig::disabled())?;
            let plain = model.step(&x, &g, Autocast::disabled())?;
            assert_eq!(model.casts(), 0);
            for (gemm, ours, plain) in step.beside(&plain) {
                let what = format!("{dims:?} x {x_dtype:?} w {w_dtype:?}: {gemm}");
                if gemm == "grad_bias" {
                    // We sum in f32, candle in the dtype and in another order, so both round differently.
                    let wider = match x_dtype {
                        DType::F32 => 1.,
                        _ => 2f64.powi(-9) / rounding::UNIT,
                    };
                    let bounds = bias_bounds(&g)?;
                    assert_within(&what, ours, plain, |at, _| (1. + wider) * bounds[at]);
                } else {
                    assert_same(&what, ours, plain);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn frozen_tensors_get_no_gradient_and_cost_no_cast() -> Result<()> {
    let (m, k, n) = (16, 32, 24);
    let (x, weight, g) = operands(m, k, n);
    let (x_var, weight_var) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    // Casts of a step: x, w and go for the output and grad_input; x and go again for grad_weight.
    for (what, x, weight, rowwise, tensorwise) in [
        (
            "both trainable",
            x_var.as_tensor(),
            weight_var.as_tensor(),
            6,
            3,
        ),
        ("weight frozen", x_var.as_tensor(), &weight, 4, 3),
        ("x frozen", &x, weight_var.as_tensor(), 4, 3),
        ("both frozen", &x, &weight, 2, 2),
    ] {
        for (name, casts) in [
            (RecipeName::Rowwise, rowwise),
            (RecipeName::Tensorwise, tensorwise),
        ] {
            let model = Model::prepared(weight, None);
            let step = model.step(x, &g, config(name))?;
            assert_eq!(
                step.grad_x.is_some(),
                what != "x frozen" && what != "both frozen",
                "{what}"
            );
            assert_eq!(
                step.grad_weight.is_some(),
                what != "weight frozen" && what != "both frozen",
                "{what}"
            );
            assert_eq!(model.casts(), casts, "{name} {what}: casts");
            assert_eq!(step.y.track_op(), what != "both frozen", "{what}");
        }
    }
    // Only the bias is trainable.
    let bias = Var::from_tensor(&normal(4, n))?;
    let model = Model::prepared(&weight, Some(&bias));
    let step = model.step(&x, &g, config(RecipeName::Rowwise))?;
    assert!(step.grad_x.is_none() && step.grad_weight.is_none());
    let bounds = bias_bounds(&g)?;
    assert_within("grad_bias", step.grad_bias(), &g.sum(0)?, |at, _| {
        2. * bounds[at]
    });
    Ok(())
}

#[test]
fn backward_uses_the_recipe_of_the_forward() -> Result<()> {
    let (m, k, n) = (24, 40, 32);
    let (x, weight, g) = operands(m, k, n);
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    for name in DYNAMIC {
        let expected = Model::prepared(&weight, None).step(&x, &g, config(name))?;
        let others = [
            ("no guard", None),
            ("tensorwise", Some(Autocast::new(RecipeName::Tensorwise))),
            ("rowwise", Some(Autocast::new(RecipeName::Rowwise))),
            ("delayed", Some(Autocast::new(RecipeName::Delayed))),
            ("disabled", Some(Autocast::disabled())),
            ("calibrating", Some(Autocast::default().calibrating(true))),
        ];
        for (other, autocast) in others {
            let model = Model::prepared(&weight, None);
            let guard = fp8_autocast(config(name))?;
            let y = model.l.forward(&x)?;
            guard.close()?;
            let guard = autocast.map(fp8_autocast).transpose()?;
            let step = model.backward(&x, y, &g)?;
            drop(guard);
            for (gemm, ours, expected) in step.beside(&expected) {
                assert_same(
                    &format!("{name}, backward under {other}: {gemm}"),
                    ours,
                    expected,
                );
            }
        }
    }
    // The other way round: a plain forward pass has a plain backward pass.
    let model = Model::prepared(&weight, None);
    let y = model.l.forward(&x)?;
    let guard = fp8_autocast(config(RecipeName::Tensorwise))?;
    let step = model.backward(&x, y, &g)?;
    guard.close()?;
    assert_same("plain grad_x", step.grad_x(), &g.matmul(&weight)?);
    assert_eq!(model.casts(), 0);
    Ok(())
}

#[test]
fn delayed_backward_uses_the_scales_of_its_own_step() -> Result<()> {
    let (m, k, n) = (16, 24, 20);
    let (x, weight, g) = operands(m, k, n);
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    let model = Model::prepared(&weight, None);
    let recipe = || Recipe::from(DelayedScaling::default().with_amax_history_len(4));
    model.step(&x, &g, recipe())?;
    let expected = model.step(&x, &g, recipe())?;
    // Here the guard closes between forward and backward, which already updates the forward scales.
    let guard = fp8_autocast(recipe())?;
    let y = model.l.forward(&x)?;
    guard.close()?;
    let step = model.backward(&x, y, &g)?;
    end_step()?;
    for (gemm, ours, expected) in step.beside(&expected) {
        assert_same(gemm, ours, expected);
    }
    Ok(())
}
