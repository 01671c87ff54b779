//! Moments of finite gradients whose squares or sums are beyond the range of f32.

use crate::helpers::{all_bits, copies, flat64, grads, state_bits, vars};
use crate::sides::{CPU, DTYPES, Side, assert_same, config, storages};
use candle_core::{DType, Result, Tensor, Var};
use fp8_optim::*;
use fp8_test_support::{device, largest_of};

fn largest(tensor: &Tensor) -> f64 {
    largest_of(flat64(tensor).into_iter().map(f64::abs))
}

#[test]
fn a_second_moment_that_overflows_stays_finite() {
    for dtype in [DType::F32, DType::BF16] {
        for moments in storages() {
            let case = format!("{dtype:?}, {moments:?}");
            let config = AdamWConfig {
                moments,
                ..AdamWConfig::default()
            };
            let all = vars(dtype);
            let mut optimizer = AdamW::from_named(all.clone(), config.clone()).unwrap();
            let _ = optimizer.apply(&grads(&all, 0, 1.)).unwrap();
            let report = optimizer.apply(&grads(&all, 1, 1e20)).unwrap();
            assert!(!report.skipped().unwrap(), "{case}");
            let saved = optimizer.state().unwrap();
            for (name, tensor) in &saved {
                let finite = flat64(tensor).into_iter().all(f64::is_finite);
                assert!(finite, "{case}: {name}");
            }
            if moments == MomentStorage::F32 {
                let found = largest(&saved["w.exp_avg_sq"]);
                assert_eq!(found, f64::from(f32::MAX), "{case}");
            }
            // So the state can be loaded, and training goes on.
            let resumed = copies(&all);
            let mut other = AdamW::from_named(resumed.clone(), config).unwrap();
            other.load_state(&saved).unwrap();
            for step in 2..5 {
                let _ = optimizer.apply(&grads(&all, step, 1.)).unwrap();
                let _ = other.apply(&grads(&resumed, step, 1.)).unwrap();
            }
            assert_eq!(all_bits(&all), all_bits(&resumed), "{case}");
            assert_eq!(state_bits(&optimizer), state_bits(&other), "{case}");
            for (name, var) in &all {
                assert!(largest(var).is_finite(), "{case}: {name}");
            }
            if moments == MomentStorage::F32 {
                let now = optimizer.state().unwrap();
                let found = largest(&now["w.exp_avg_sq"]);
                assert!(found < f64::from(f32::MAX), "{case}: it falls again");
            }
        }
    }
}

#[test]
fn a_device_agrees_with_the_cpu() -> Result<()> {
    for dtypes in [&DTYPES[..1], &DTYPES[1..2]] {
        for moments in storages() {
            let config = AdamWConfig {
                moments,
                seed: 9,
                ..config(None, false)
            };
            let mut ours = Side::new(dtypes, &config, |_| device())?;
            let mut reference = Side::new(dtypes, &config, |_| CPU)?;
            for step in 0..4 {
                let large = (step == 1).then_some(3e19);
                let report = ours.step(step, large)?;
                assert!(!report.skipped()?);
                let _ = reference.step(step, large)?;
                let what = format!("{dtypes:?}, {moments:?}, step {step}");
                assert_same(&what, &ours, &reference)?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_momentum_that_overflows_stays_finite() {
    let var = Var::zeros(3, DType::F32, &device()).unwrap();
    let config = SgdConfig::default().with_momentum(0.9);
    let named = vec![("w".to_string(), var.clone())];
    let mut sgd = Sgd::from_named(named.clone(), config.clone()).unwrap();
    for sign in [1f32, -1.] {
        for _ in 0..3 {
            let mut step = grads(&named, 0, 1.);
            step.insert(&var, Tensor::full(3e38 * sign, 3, &device()).unwrap());
            assert!(!sgd.apply(&step).unwrap().skipped().unwrap());
        }
        let state = sgd.state().unwrap();
        let buffer = state["w.momentum_buffer"].to_vec1::<f32>().unwrap();
        assert_eq!(buffer, [f32::MAX * sign; 3]);
        let mut other = Sgd::from_named(named.clone(), config.clone()).unwrap();
        other.load_state(&state).unwrap();
    }
}
