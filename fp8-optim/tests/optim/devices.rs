//! The optimizer on the test device against the CPU: the same bits, whatever the dtypes, sizes and options.
//! `FP8_TEST_DEVICE=cuda` makes it a test of the CUDA kernels.

use crate::sides::*;
use candle_core::{DType, Device, Result, Tensor, Var};
use fp8_optim::*;
use fp8_test_support::{device, skipped_on_cpu};
use std::collections::HashMap;

#[test]
fn equal_to_the_cpu() -> Result<()> {
    for moments in storages() {
        equal_to_the_cpu_with(moments)?;
    }
    Ok(())
}

fn equal_to_the_cpu_with(moments: MomentStorage) -> Result<()> {
    let classes: [&[DType]; 5] = [
        &DTYPES[..1],
        &DTYPES[1..2],
        &DTYPES[2..3],
        &DTYPES[3..],
        &DTYPES,
    ];
    for dtypes in classes {
        let has_halves = dtypes.iter().any(|d| d.size_in_bytes() == 2);
        for (limit, masters) in [(None, false), (Some(0.5), false), (Some(1e9), true)] {
            let config = AdamWConfig {
                moments,
                seed: 9,
                ..config(limit, masters)
            };
            let what = format!("{dtypes:?}, {moments:?}, limit {limit:?}, masters {masters}");
            let mut ours = Side::new(dtypes, &config, |_| device())?;
            let mut reference = Side::new(dtypes, &config, |_| CPU)?;
            for step in 0..5 {
                let bad = match step {
                    1 => Some(f32::NAN),
                    3 => Some(f32::NEG_INFINITY),
                    _ => None,
                };
                for side in [&mut ours, &mut reference] {
                    side.optimizer.set_lr(3e-3 / (step + 1) as f64).unwrap();
                }
                let report = ours.step(step, bad)?;
                let expected = reference.step(step, bad)?;
                assert_eq!(values(&report)?, values(&expected)?, "{what}, step {step}");
                assert_eq!(report.skipped()?, bad.is_some(), "{what}, step {step}");
                assert_eq!((report.lr, report.updated), (expected.lr, expected.updated));
                assert_same(&format!("{what}, step {step}"), &ours, &reference)?;
            }
            assert_eq!(ours.optimizer.steps()?, 3);
            let state = ours.optimizer.state()?;
            let copies = state
                .keys()
                .filter(|k| k.ends_with(".master_param"))
                .count();
            assert_eq!(copies > 0, masters && has_halves, "{what}");
        }
    }
    Ok(())
}

#[test]
fn clips_when_the_norm_is_above_the_limit() -> Result<()> {
    let mut side = Side::new(&DTYPES, &config(Some(0.5), false), |_| device())?;
    let report = side.step(1, None)?;
    let norm = report.grad_norm()?;
    assert!(norm > 100.0 && report.clip_coefficient()? == 0.5 / (norm + 1e-6));
    let mut side = Side::new(&DTYPES, &config(Some(1e9), false), |_| device())?;
    assert_eq!(side.step(1, None)?.clip_coefficient()?, 1.0);
    Ok(())
}

/// Gradients at odd offsets, transposed, shared by two variables, and in the memory of another variable.
#[test]
fn gradients_that_are_views() -> Result<()> {
    for dtype in DTYPES {
        let run = |device: &Device| -> Result<_> {
            let long = random(50, &[5003], dtype)?.to_device(device)?;
            let matrix = random(51, &[31, 77], dtype)?.to_device(device)?;
            let var = |seed, shape: &[usize]| -> Result<Var> {
                Var::from_tensor(&random(seed, shape, dtype)?.to_device(device)?)
            };
            let vars = [
                ("a".to_string(), var(1, &[5000])?),
                ("b".to_string(), var(2, &[5000])?),
                ("c".to_string(), var(3, &[77, 31])?),
                ("d".to_string(), var(4, &[40, 50])?),
                ("e".to_string(), var(5, &[40, 50])?),
            ];
            let config = config(Some(0.5), true);
            let optimizer = AdamW::from_named(vars.to_vec(), config)?;
            let mut side = Side {
                vars: vars.to_vec(),
                optimizer,
            };
            for offset in [0, 1, 2, 3] {
                let mut grads = no_grads()?;
                let view = long.narrow(0, offset, 5000)?;
                grads.insert(&side.vars[0].1, view.clone());
                grads.insert(&side.vars[1].1, view);
                grads.insert(&side.vars[2].1, matrix.t()?);
                // d is the gradient of e and is updated before it.
                grads.insert(&side.vars[3].1, side.vars[3].1.as_detached_tensor());
                grads.insert(&side.vars[4].1, side.vars[3].1.as_detached_tensor());
                assert!(!side.optimizer.apply(&grads)?.skipped()?);
            }
            Ok(side)
        };
        assert_same(&format!("{dtype:?}"), &run(&device())?, &run(&CPU)?)?;
    }
    Ok(())
}

#[test]
fn states_go_from_device_to_device() -> Result<()> {
    for moments in storages() {
        let config = AdamWConfig {
            moments,
            ..config(Some(0.5), true)
        };
        states_go_from_device_to_device_with(config)?;
    }
    Ok(())
}

fn states_go_from_device_to_device_with(config: AdamWConfig) -> Result<()> {
    let (mut on_device, mut on_cpu) = (
        Side::new(&DTYPES, &config, |_| device())?,
        Side::new(&DTYPES, &config, |_| CPU)?,
    );
    for step in 0..3 {
        let _ = on_device.step(step, None)?;
    }
    let saved = on_device.optimizer.state()?;
    let before: HashMap<_, _> = saved
        .iter()
        .map(|(name, t)| Ok((name.clone(), bits(t)?)))
        .collect::<Result<_>>()?;
    on_cpu.optimizer.load_state(&saved)?;
    for ((_, a), (_, b)) in on_cpu.vars.iter().zip(&on_device.vars) {
        a.set(&b.to_device(&CPU)?)?;
    }
    assert_same("loaded", &on_cpu, &on_device)?;
    for step in 3..5 {
        let _ = (on_device.step(step, None)?, on_cpu.step(step, None)?);
    }
    assert_same("continued", &on_cpu, &on_device)?;
    // Later steps did not change the saved state.
    for (name, tensor) in &saved {
        assert_eq!(bits(tensor)?, before[name], "{name}");
    }
    // And back, into an optimizer that has already run.
    let mut other = Side::new(&DTYPES, &config, |_| device())?;
    let _ = other.step(9, None)?;
    other.optimizer.load_state(&on_cpu.optimizer.state()?)?;
    for ((_, a), (_, b)) in other.vars.iter().zip(&on_cpu.vars) {
        a.set(&b.to_device(&device())?)?;
    }
    assert_eq!(other.optimizer.steps()?, 5);
    let _ = (other.step(5, None)?, on_cpu.step(5, None)?);
    assert_same("back", &other, &on_cpu)
}

#[test]
fn reports_keep_the_values_of_their_step() -> Result<()> {
    let mut side = Side::new(&DTYPES[..1], &config(Some(0.5), false), |_| device())?;
    let mut reference = Side::new(&DTYPES[..1], &config(Some(0.5), false), |_| CPU)?;
    let mut reports = Vec::new();
    let mut expected = Vec::new();
    for step in 0..4 {
        let bad = (step == 2).then_some(f32::INFINITY);
        reports.push(side.step(step, bad)?);
        expected.push(values(&reference.step(step, bad)?)?);
    }
    for (report, expected) in reports.iter().zip(expected) {
        assert_eq!(values(report)?, expected);
        // A report can be read twice, and through a copy.
        assert_eq!(values(&report.clone())?, expected);
    }
    Ok(())
}

/// Variables on two devices are clipped by one norm and skip steps together.
#[test]
fn variables_on_several_devices() -> Result<()> {
    let place = |i: usize| {
        if i.is_multiple_of(3) { CPU } else { device() }
    };
    let config = config(Some(1e9), true);
    let mut ours = Side::new(&DTYPES, &config, place)?;
    let mut reference = Side::new(&DTYPES, &config, |_| CPU)?;
    for step in 0..4 {
        // The bad value is in the last variable, on the CPU; all variables skip the step.
        let bad = (step == 2).then_some(f32::NAN);
        let report = ours.step(step, bad)?;
        let expected = reference.step(step, bad)?;
        let (norm, other) = (report.grad_norm()?, expected.grad_norm()?);
        assert!(norm.is_nan() && other.is_nan() || (norm / other - 1.0).abs() < 1e-14);
        assert_eq!(report.skipped()?, bad.is_some());
        assert_same(&format!("step {step}"), &ours, &reference)?;
    }
    assert_eq!(ours.optimizer.steps()?, 3);
    Ok(())
}

/// Changes of moments, flags and master copies after the first steps reach the device.
#[test]
fn changes_between_steps() -> Result<()> {
    let plain = config(Some(0.5), false);
    let mut ours = Side::new(&DTYPES, &plain, |_| device())?;
    let mut reference = Side::new(&DTYPES, &plain, |_| CPU)?;
    let mut both = |step: u64, change: &dyn Fn(&mut Side) -> Result<()>| -> Result<()> {
        for side in [&mut ours, &mut reference] {
            change(side)?;
            let _ = side.step(step, None)?;
        }
        assert_same(&format!("step {step}"), &ours, &reference)
    };
    both(0, &|_| Ok(()))?;
    // From now on with master copies, and with weight decay for matrices only.
    both(1, &|side| {
        let config = AdamWConfig {
            decay_scope: DecayScope::Matrices,
            weight_decay: 0.5,
            ..config(Some(0.5), true)
        };
        Ok(side.optimizer.set_config(config)?)
    })?;
    // A variable that was written to replaces its copy.
    both(2, &|side| {
        for (i, (_, var)) in side.vars.iter().enumerate() {
            let value = random(77 + i as u64, var.dims(), var.dtype())?;
            var.set(&value.to_device(var.device())?)?;
        }
        Ok(())
    })?;
    // Moments become codes, and values again.
    both(3, &|side| {
        let config = AdamWConfig {
            moments: MomentStorage::Fp8(Fp8Moments::default()),
            ..plain.clone()
        };
        Ok(side.optimizer.set_config(config)?)
    })?;
    both(4, &|_| Ok(()))?;
    both(5, &|side| Ok(side.optimizer.set_config(plain.clone())?))?;
    // After so many steps both bias corrections are 1.
    both(6, &|side| {
        let mut state = side.optimizer.state()?;
        state.insert(STEP_NAME.to_string(), Tensor::new(1i64 << 40, &CPU)?);
        Ok(side.optimizer.load_state(&state)?)
    })?;
    assert_eq!(ours.optimizer.steps()?, (1 << 40) + 1);
    Ok(())
}

#[test]
fn a_gradient_on_another_device_is_refused() -> Result<()> {
    if skipped_on_cpu() {
        return Ok(());
    }
    let mut side = Side::new(&DTYPES[..1], &config(None, false), |_| device())?;
    let before = side.everything()?;
    let mut grads = side.grads(1, None)?;
    grads.insert(&side.vars[3].1, Tensor::ones(3, DType::F32, &CPU)?);
    let error = side.optimizer.apply(&grads).unwrap_err().to_string();
    assert!(error.contains("`v03`") && error.contains("Cpu"), "{error}");
    assert_eq!(side.everything()?, before);
    Ok(())
}
