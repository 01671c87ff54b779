//! AdamW against the same update in f64, and against the AdamW of plain parameters.

use crate::helpers::*;
use candle_core::{DType, Tensor, Var};
use fp8_recipes::optim::scaled::*;
use fp8_recipes::optim::*;
use fp8_scaled::{ScaledGrads, as_scaled};
use fp8_test_support::rounding::UNIT;

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
        // About a dozen operations, each rounded; 16 bits are rounded once.
        (DType::F32, 12. * UNIT),
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
    let target = cpu_tensor(3, &[64]);
    let start = cpu_tensor(4, &[64]);
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
    let var = fp8_scaled::ScaledVar::rescaled("w", &start, DType::F16).unwrap();
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

/// A regression with scaled products, against the plain AdamW in f32 on plain ones.
#[test]
fn two_hundred_steps_of_a_regression() {
    let x = cpu_tensor(11, &[64, 16]);
    let y = x.matmul(&cpu_tensor(12, &[16, 3])).unwrap();
    let start = (cpu_tensor(13, &[3, 16]) * 0.1).unwrap();
    let config = AdamWConfig {
        lr: 0.02,
        weight_decay: 0.01,
        max_grad_norm: Some(1.),
        ..AdamWConfig::default()
    };
    let w = Var::from_tensor(&start).unwrap();
    let b = Var::zeros(3, DType::F32, start.device()).unwrap();
    let named = vec![("w".to_string(), w.clone()), ("b".to_string(), b.clone())];
    let mut plain = AdamW::from_named(named, config.clone()).unwrap();
    let of =
        |name, start: &Tensor| fp8_scaled::ScaledVar::rescaled(name, start, DType::F16).unwrap();
    // The bias begins with zeros of no size.
    let (sw, sb) = (of("w", &start), of("b", b.as_tensor()));
    let mut scaled = ScaledAdamW::from_vars(vec![sw.clone(), sb.clone()], config).unwrap();
    let sx = as_scaled(&x, None).unwrap().astype(DType::F16).unwrap();
    let sy = as_scaled(&y, None).unwrap().astype(DType::F16).unwrap();
    let (mut ours, mut theirs) = (vec![], vec![]);
    for _ in 0..200 {
        let out = x.matmul(&w.t().unwrap()).unwrap();
        let out = out.broadcast_add(b.as_tensor()).unwrap();
        let loss = (out - &y).unwrap().sqr().unwrap().mean_all().unwrap();
        let _ = plain.apply(&loss.backward().unwrap()).unwrap();
        theirs.push(loss.to_scalar::<f32>().unwrap());
        let out = sx.linear(&sw.value(), Some(&sb.value())).unwrap();
        let loss = out.sub(&sy).unwrap().square().unwrap().mean_all().unwrap();
        assert!(
            !scaled
                .apply(&loss.backward().unwrap())
                .unwrap()
                .skipped()
                .unwrap()
        );
        ours.push(loss.to_scalar().unwrap());
    }
    assert!(theirs[199] < 0.01 * theirs[0], "{theirs:?}");
    for (step, (ours, theirs_now)) in ours.iter().zip(&theirs).enumerate() {
        // Outputs are near 2: 2^-10 of them in each difference.
        let allowed = 0.03 * theirs_now + 2e-4;
        assert!(
            (ours - theirs_now).abs() < allowed,
            "{step}: {ours} {theirs_now}"
        );
    }
    assert_eq!(scaled.counts().saturated, 0);
}

/// No gradient has been, so nothing asks for a place for the learning rate.
#[test]
fn zero_gradients_do_not_move_the_scale_of_a_small_parameter() {
    let (var, _) = single(&[1e-9, -2e-9]);
    let before = bits(std::slice::from_ref(&var));
    let config = AdamWConfig {
        weight_decay: 0.,
        ..AdamWConfig::default()
    };
    let mut adam = ScaledAdamW::from_vars(vec![var.clone()], config).unwrap();
    for _ in 0..3 {
        let _ = adam.apply(&one_grad(&var, &[0., 0.])).unwrap();
    }
    assert_eq!(bits(std::slice::from_ref(&var)), before);
    let _ = adam.apply(&one_grad(&var, &[1e-6, 0.])).unwrap();
    assert!(values(&var.value())[0] < -1e-4);
}

#[test]
fn a_gradient_that_ends_leaves_moments_that_fade() {
    let (var, _) = single(&[1.]);
    let config = AdamWConfig {
        lr: 1e-3,
        weight_decay: 0.,
        ..AdamWConfig::default()
    };
    let mut adam = ScaledAdamW::from_vars(vec![var.clone()], config).unwrap();
    let _ = adam.apply(&one_grad(&var, &[1e30])).unwrap();
    for _ in 0..6000 {
        let _ = adam.apply(&one_grad(&var, &[0.])).unwrap();
    }
    let here = values(&var.value())[0];
    // Each step adds the quotient of two means, of which the first fades much sooner: ten steps in sum, at most 7.3 each.
    assert!(here.is_finite() && (1. - here).abs() < 0.073, "{here}");
    assert_eq!(adam.counts().saturated, 0);
    let _ = adam.apply(&one_grad(&var, &[1e-30])).unwrap();
    assert!(values(&var.value())[0].is_finite());
}

#[test]
fn two_optimizers_have_a_half_each_and_the_rest_is_frozen() {
    let vars = vars(DType::F16);
    let before = bits(&vars);
    let half = |vars: &[fp8_scaled::ScaledVar]| {
        ScaledAdamW::from_vars(vars.to_vec(), config(0.1)).unwrap()
    };
    let (mut first, mut second) = (half(&vars[..1]), half(&vars[2..3]));
    let grads = grads(&vars, 0, 1.);
    assert_eq!(first.apply(&grads).unwrap().updated, 1);
    assert_eq!(second.apply(&grads).unwrap().updated, 1);
    let after = bits(&vars);
    for (i, (before, after)) in before.iter().zip(&after).enumerate() {
        assert_eq!(before == after, i == 1 || i == 3, "{}", vars[i].name());
    }
}
