//! AdamW against the same update in f64, and against the AdamW of plain parameters.

use crate::helpers::*;
use candle_core::{DType, Tensor, Var};
use fp8_candle::scaled::{ScaledGrads, as_scaled};
use fp8_recipes::optim::scaled::*;
use fp8_recipes::optim::*;

fn config(lr: f64) -> AdamWConfig {
    AdamWConfig {
        lr,
        weight_decay: 0.1,
        ..AdamWConfig::default()
    }
}

#[test]
fn it_is_the_update_in_f64() {
    for (dtype, unit) in [
        (DType::F32, 1e-6),
        (DType::F16, 1. / 2048.),
        (DType::BF16, 1. / 256.),
    ] {
        let vars = vars(dtype);
        let c = config(1e-3);
        let mut adam = ScaledAdamW::from_vars(vars.clone(), c.clone()).unwrap();
        adam = adam.with_rounding(RoundTo::Nearest);
        let mut states: Vec<[Vec<f64>; 3]> = (vars.iter())
            .map(|var| {
                let zeros = vec![0.; values(&var.value()).len()];
                [values(&var.value()), zeros.clone(), zeros]
            })
            .collect();
        for step in 0..5 {
            let grads = grads(&vars, step, 2f32.powi(-7));
            let _ = adam.apply(&grads).unwrap();
            let t = step as i32 + 1;
            let (c1, c2) = (1. - c.beta1.powi(t), 1. - c.beta2.powi(t));
            for (var, [p, m, v]) in vars.iter().zip(&mut states) {
                let g = values(grads.get(var).unwrap());
                for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
                    *m = c.beta1 * *m + (1. - c.beta1) * g;
                    *v = c.beta2 * *v + (1. - c.beta2) * g * g;
                    let change = (*m / c1) / ((*v / c2).sqrt() + c.eps);
                    *p = (1. - c.lr * c.weight_decay) * *p - c.lr * change;
                }
                let got = values(&var.value());
                let largest = p.iter().fold(0f64, |max, p| max.max(p.abs()));
                for (got, p) in got.iter().zip(&*p) {
                    // A rounding of the parameter per step, and of the quotient, which is 7 at most: it has the roundings of both moments.
                    let allowed = f64::from(t) * unit * (largest + 8. * 2. * c.lr);
                    assert!(
                        (got - p).abs() < allowed,
                        "{dtype:?} {} {step}: {got} {p}",
                        var.name()
                    );
                }
            }
        }
    }
}

/// Least squares by both, from the same start.
#[test]
fn it_goes_where_plain_adamw_goes() {
    let target = random(3, &[64]);
    let start = random(4, &[64]);
    let plain = Var::from_tensor(&start).unwrap();
    let mut reference = AdamW::from_named(
        vec![("w".into(), plain.clone())],
        AdamWConfig {
            lr: 0.01,
            weight_decay: 0.,
            ..AdamWConfig::default()
        },
    )
    .unwrap();
    let var = fp8_candle::scaled::ScaledVar::rescaled("w", &start, DType::F16).unwrap();
    let mut adam = ScaledAdamW::from_vars(vec![var.clone()], reference.config().clone()).unwrap();
    for _ in 0..1500 {
        let loss = (plain.as_tensor() - &target)
            .unwrap()
            .sqr()
            .unwrap()
            .sum_all()
            .unwrap();
        let _ = reference.apply(&loss.backward().unwrap()).unwrap();
        let here = var.value().detach().to_tensor(DType::F32).unwrap();
        let grad = ((here - &target).unwrap() * 2.).unwrap();
        let mut grads = ScaledGrads::default();
        let grad = as_scaled(&grad, None)
            .unwrap()
            .dynamic_rescale_max()
            .unwrap();
        grads.insert(&var, grad.astype(DType::F16).unwrap());
        let _ = adam.apply(&grads).unwrap();
    }
    let error = |w: &Tensor| {
        let off = (w - &target).unwrap().abs().unwrap().max(0).unwrap();
        off.to_scalar::<f32>().unwrap()
    };
    let plain = error(plain.as_tensor());
    let scaled = error(&var.value().detach().to_tensor(DType::F32).unwrap());
    // At the end both are within steps of the target: f16 adds units in the last place of a number near 1.
    assert!(
        plain < 0.01 && scaled < plain + 8. / 2048.,
        "{plain} {scaled}"
    );
}

#[test]
fn random_rounding_keeps_what_nearest_loses() {
    // Each change is a 20th of a unit in the last place.
    let start = vec![1.5f32; 4096];
    let run = |round: RoundTo| {
        let (var, _) = single(&start);
        let lr = 0.05 / 1024.;
        let c = AdamWConfig {
            lr,
            weight_decay: 0.,
            ..AdamWConfig::default()
        };
        let mut adam = ScaledAdamW::from_vars(vec![var.clone()], c)
            .unwrap()
            .with_rounding(round);
        for _ in 0..40 {
            let _ = adam.apply(&one_grad(&var, &vec![1e-3; 4096])).unwrap();
        }
        values(&var.value()).iter().sum::<f64>() / 4096.
    };
    assert_eq!(run(RoundTo::Nearest), 1.5);
    // 40 changes of 0.05 units: 2 units; the deviation of the mean of 4096 is below 0.05.
    let moved = (1.5 - run(RoundTo::Stochastic { seed: 1 })) * 1024.;
    assert!((moved - 2.).abs() < 0.25, "{moved}");
}

/// Where the root of the second moment rounds to zero and the first moment does not, the quotient stays what it can be.
#[test]
fn gradients_far_below_the_largest() {
    let (var, _) = single(&[1., 1.]);
    let c = AdamWConfig {
        lr: 0.1,
        weight_decay: 0.,
        eps: 0.,
        ..AdamWConfig::default()
    };
    let mut adam = ScaledAdamW::from_vars(vec![var.clone()], c).unwrap();
    let mut before = values(&var.value());
    for step in 0..60 {
        let small = if step % 3 == 0 { 1e-9 } else { 0. };
        let _ = adam.apply(&one_grad(&var, &[1., small])).unwrap();
        let now = values(&var.value());
        // 7.3 is the bound for these betas and many steps.
        assert!(
            (now[1] - before[1]).abs() < 0.1 * 7.3 + 0.01,
            "{step}: {before:?} {now:?}"
        );
        before = now;
    }
}

#[test]
fn every_tensor_of_the_state_is_in_the_dtype_of_its_parameter() {
    let vars = vars(DType::F16);
    let mut adam = ScaledAdamW::from_vars(vars.clone(), config(1e-3)).unwrap();
    let _ = adam.apply(&grads(&vars, 0, 0.5)).unwrap();
    let state = adam.optimizer_state().unwrap();
    let mut moments = 0;
    for (name, tensor) in state.tensors() {
        if name.ends_with(".exp_avg") || name.ends_with(".exp_avg_root") {
            assert_eq!(tensor.dtype(), DType::F16, "{name}");
            moments += 1;
        } else {
            assert_eq!(tensor.elem_count(), 1, "{name}");
        }
    }
    assert_eq!(moments, 2 * vars.len());
    assert!(vars.iter().all(|var| var.dtype() == DType::F16));
}

#[test]
fn groups_and_decay() {
    let run = |groups: Vec<ParamGroup>| {
        let vars = vars(DType::F16);
        let adam = ScaledAdamW::from_vars(vars.clone(), config(1e-2)).unwrap();
        let mut adam = adam.with_groups(groups).unwrap();
        let _ = adam.apply(&grads(&vars, 0, 1.)).unwrap();
        bits(&vars)
    };
    let still = ParamGroup::new("w").unwrap().with_lr(0.);
    let (plain, grouped, start) = (run(vec![]), run(vec![still]), bits(&vars(DType::F16)));
    assert_eq!(grouped[0].0, start[0].0);
    assert_ne!(plain[0].0, start[0].0);
    assert_eq!(grouped[1..], plain[1..]);
}
