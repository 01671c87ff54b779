//! Inf and NaN, and inputs of the wrong shape, dtype or device.

use super::*;
use candle_core::{D, DType, Module, Result, Tensor, Var};
use fp8::nn::Linear;
use fp8::{DelayedScaling, Recipe, RecipeName, Role, fp8_autocast};
use fp8_test_support::{Model, assert_same, device, flat64, normal};

/// `x` with one element replaced.
fn with_value(x: &Tensor, row: usize, col: usize, value: f32) -> Result<Tensor> {
    let mut rows = x.to_vec2::<f32>()?;
    rows[row][col] = value;
    Tensor::new(rows, &device())
}

#[test]
fn non_finite_values_under_dynamic_scales_fail_loudly() -> Result<()> {
    let (m, k, n) = (8, 16, 12);
    let (x, weight, g) = operands(m, k, n);
    let weight = Var::from_tensor(&weight)?;
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let x = Var::from_tensor(&with_value(&x, 3, 5, value)?)?;
        for emulate in [false, true] {
            for name in [RecipeName::Tensorwise, RecipeName::Rowwise] {
                let what = format!("{name} {value} emulate={emulate}");
                let recipe = config(name).with_emulate(emulate);
                let step = Model::prepared(&weight, None).step(&x, &g, recipe)?;
                for row in 0..m {
                    for col in 0..n {
                        let bad = name == RecipeName::Tensorwise || row == 3;
                        let got = step.y.to_vec2::<f32>()?[row][col];
                        assert_eq!(got.is_nan(), bad, "{what}: y [{row}, {col}] = {got}");
                    }
                }
                // x has no part in grad_input, and only one of its columns in each row of grad_weight.
                assert!(
                    flat64(step.grad_x()).iter().all(|g| g.is_finite()),
                    "{what}: grad_x"
                );
                for row in 0..n {
                    for col in 0..k {
                        let bad = name == RecipeName::Tensorwise || col == 5;
                        let got = step.grad_weight().to_vec2::<f32>()?[row][col];
                        assert_eq!(
                            got.is_nan(),
                            bad,
                            "{what}: grad_weight [{row}, {col}] = {got}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn non_finite_values_under_delayed_scales_saturate_and_are_counted() -> Result<()> {
    let (m, k, n) = (8, 16, 12);
    let (x, weight, g) = operands(m, k, n);
    let weight = Var::from_tensor(&weight)?;
    let recipe = || Recipe::from(DelayedScaling::default().with_amax_history_len(4));
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let model = Model::prepared(&weight, None);
        let state = model.l.fp8_state().unwrap().clone();
        let clean = Var::from_tensor(&x)?;
        model.step(&clean, &g, recipe())?;
        let before = state.slot(Role::Input).unwrap().tensors().unwrap();
        assert_eq!(state.slot(Role::Input).unwrap().non_finite_count()?, 0);

        let bad = Var::from_tensor(&with_value(&x, 3, 5, value)?)?;
        let step = model.step(&bad, &g, recipe())?;
        assert_eq!(
            state.slot(Role::Input).unwrap().non_finite_count()?,
            1,
            "{value}"
        );
        let after = state.slot(Role::Input).unwrap().tensors().unwrap();
        assert_same("quant_scale", &after.quant_scale, &before.quant_scale);
        assert_same("amax_history", &after.amax_history, &before.amax_history);
        assert_eq!(state.slot(Role::Weight).unwrap().non_finite_count()?, 0);

        if value.is_nan() {
            for (row, y) in step.y.to_vec2::<f32>()?.iter().enumerate() {
                assert!(
                    y.iter().all(|y| y.is_nan() == (row == 3)),
                    "NaN: y row {row} {y:?}"
                );
            }
            continue;
        }
        // An infinity saturates at the largest value that the scale can represent.
        let limit = 448. / before.quant_scale.to_vec1::<f32>()?[0];
        let saturated = Var::from_tensor(&with_value(&x, 3, 5, limit.copysign(value))?)?;
        let expected = Model::prepared(&weight, None);
        expected.step(&clean, &g, recipe())?;
        let expected = expected.step(&saturated, &g, recipe())?;
        for (gemm, ours, expected) in step.beside(&expected) {
            assert_same(&format!("{value}: {gemm}"), ours, expected);
            assert!(
                flat64(ours).iter().all(|y| y.is_finite()),
                "{value}: {gemm}"
            );
        }
    }
    Ok(())
}

#[test]
fn non_finite_gradients_are_counted_too() -> Result<()> {
    let (m, k, n) = (8, 16, 12);
    let (x, weight, g) = operands(m, k, n);
    let (x, weight) = (Var::from_tensor(&x)?, Var::from_tensor(&weight)?);
    let model = Model::prepared(&weight, None);
    let state = model.l.fp8_state().unwrap().clone();
    model.step(&x, &g, RecipeName::Delayed)?;
    let before = state.slot(Role::GradOutput).unwrap().tensors().unwrap();
    model.step(
        &x,
        &with_value(&g, 1, 1, f32::INFINITY)?,
        RecipeName::Delayed,
    )?;
    assert_eq!(state.slot(Role::GradOutput).unwrap().non_finite_count()?, 1);
    assert_same(
        "history",
        &state
            .slot(Role::GradOutput)
            .unwrap()
            .tensors()
            .unwrap()
            .amax_history,
        &before.amax_history,
    );
    Ok(())
}

#[track_caller]
fn assert_error(result: Result<Tensor>, parts: &[&str]) {
    let text = match result {
        Ok(y) => panic!("no error but {y}; expected one with {parts:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let weight = Var::from_tensor(&normal(2, (12, 16)))?;
    let l = Linear::new(weight.as_tensor().clone(), None).with_path("blocks.3.fc");
    fp8::prepare_fp8(&l, &Default::default())?;
    let device = &device();
    for guarded in [false, true] {
        let _guard = match guarded {
            true => Some(fp8_autocast(RecipeName::Tensorwise)?),
            false => None,
        };
        for dims in [vec![4, 15], vec![17], vec![2, 16, 3]] {
            let x = Tensor::zeros(dims.as_slice(), DType::F32, device)?;
            let got = format!("{} features", dims[dims.len() - 1]);
            assert_error(
                l.forward(&x),
                &["blocks.3.fc", "expected 16", &got, &format!("{dims:?}")],
            );
        }
        let scalar = Tensor::zeros((), DType::F32, device)?;
        assert_error(l.forward(&scalar), &["blocks.3.fc", "expected 16"]);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let x = Tensor::zeros((4, 16), dtype, device)?;
            assert_error(
                l.forward(&x),
                &["blocks.3.fc", dtype.as_str(), "expected f32"],
            );
        }
    }
    // Outside a guard the layer works like candle-nn's and accepts f64, for which FP8 has no kernel.
    let x = normal(1, (4, 16)).to_dtype(DType::F64)?;
    assert_eq!(l.forward(&x)?.dtype(), DType::F64);
    let guard = fp8_autocast(RecipeName::Tensorwise)?;
    assert_error(l.forward(&x), &["F64", "x", "f32, bf16 or f16"]);
    for dims in [vec![11], vec![1, 12], vec![]] {
        let bias = Tensor::zeros(dims.as_slice(), DType::F32, device)?;
        let model = Model::prepared(&weight, Some(&bias));
        let x = normal(1, (4, 16));
        assert_error(model.l.forward(&x), &["bias", "[12]", &format!("{dims:?}")]);
    }
    guard.close()?;
    // A failed call leaves the layer usable.
    let x = normal(1, (4, 16));
    let _guard = fp8_autocast(RecipeName::Tensorwise)?;
    assert_eq!(l.forward(&x)?.dim(D::Minus1)?, 12);
    Ok(())
}
