//! SGD against the same update in f64.

use crate::helpers::*;
use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use fp8_recipes::optim::scaled::*;
use fp8_recipes::optim::*;
use fp8_scaled::{Error, Scaled, ScaledGrads, ScaledVar};
use fp8_test_support::rounding::{LAMBDA, UNIT, UNIT_F64};

/// One variable in f64, rounded nowhere.
struct Reference {
    parameter: Vec<f64>,
    buffer: Option<Vec<f64>>,
}

impl Reference {
    fn step(&mut self, grad: &[f64], c: &SgdConfig, clip: f64) {
        let g: Vec<f64> = (grad.iter().zip(&self.parameter))
            .map(|(g, p)| g * clip + c.weight_decay * p)
            .collect();
        let change = if c.momentum == 0. {
            g
        } else {
            let buffer: Vec<f64> = match &self.buffer {
                None => g.clone(),
                Some(buffer) => (buffer.iter().zip(&g))
                    .map(|(b, g)| c.momentum * b + (1. - c.dampening) * g)
                    .collect(),
            };
            self.buffer = Some(buffer.clone());
            match c.nesterov {
                true => (g.iter().zip(&buffer))
                    .map(|(g, b)| g + c.momentum * b)
                    .collect(),
                false => buffer,
            }
        };
        for (p, change) in self.parameter.iter_mut().zip(&change) {
            *p -= c.lr * change;
        }
    }
}

fn configs() -> Vec<SgdConfig> {
    let plain = SgdConfig::default().with_lr(0.05);
    vec![
        plain.clone(),
        plain.clone().with_weight_decay(0.1).with_max_grad_norm(0.5),
        plain.clone().with_momentum(0.9).with_dampening(0.25),
        plain
            .with_momentum(0.75)
            .with_nesterov(true)
            .with_weight_decay(0.1),
    ]
}

#[test]
fn it_is_the_update_in_f64() {
    // A step rounds parameter and buffer to the 11 bits of f16 once, nearest: 2^-12 of the largest value at most. A rounding of the buffer comes back
    // in each later step, damped by the momentum: with ten steps and changes of the size of the parameter at most 10 * (1 + 4) of them.
    for (dtype, tolerance) in [
        // Every operation is rounded, at most three to an update of either.
        (DType::F32, 3. * 50. * UNIT),
        (DType::F16, 50. / 4096.),
        (DType::BF16, 50. / 512.),
    ] {
        for config in configs() {
            let vars = vars(dtype);
            let mut references: Vec<Reference> = (vars.iter())
                .map(|var| Reference {
                    parameter: values(&var.value()),
                    buffer: None,
                })
                .collect();
            let mut sgd = ScaledSgd::from_vars(vars.clone(), config.clone()).unwrap();
            sgd = sgd.with_rounding(RoundTo::Nearest);
            for step in 0..10 {
                let scale = 2f32.powi(-4 - step as i32);
                let grads = grads(&vars, step, scale);
                let report = sgd.apply(&grads).unwrap();
                let squares = |var: &ScaledVar| {
                    let values = values(grads.get(var).unwrap());
                    values.iter().map(|x| x * x).sum::<f64>()
                };
                let norm = vars.iter().map(squares).sum::<f64>().sqrt();
                let squares: usize = vars
                    .iter()
                    .map(|var| var.dims().iter().product::<usize>())
                    .sum();
                let sums = 2. * LAMBDA * UNIT_F64 * (squares as f64).sqrt();
                assert!((report.grad_norm().unwrap() - norm).abs() <= sums * norm);
                let clip = report.clip_coefficient().unwrap();
                assert_eq!(
                    clip < 1.,
                    config.max_grad_norm.is_some_and(|limit| norm > limit)
                );
                for (var, reference) in vars.iter().zip(&mut references) {
                    reference.step(&values(grads.get(var).unwrap()), &config, clip);
                    let off = difference(&values(&var.value()), &reference.parameter);
                    assert!(
                        off < tolerance,
                        "{dtype:?} {} step {step}: {off:e}",
                        var.name()
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_of_every_dtype_are_taken() {
    let codes = Tensor::new(&[0x38u8, 0xB8, 0x40], &Device::Cpu).unwrap(); // 1, -1, 2
    let floats = Tensor::new(&[1f32, -1., 2.], &Device::Cpu).unwrap();
    let mut all = vec![Scaled::from_codes(&codes, Format::E4M3, 0.5).unwrap()];
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        all.push(Scaled::from_parts(&floats.to_dtype(dtype).unwrap(), 0.5).unwrap());
    }
    for grad in all {
        let (var, _) = single(&[1., 2., -3.]);
        let mut grads = ScaledGrads::default();
        grads.insert(&var, grad);
        let mut sgd =
            ScaledSgd::from_vars(vec![var.clone()], SgdConfig::default().with_lr(0.5)).unwrap();
        let _ = sgd.apply(&grads).unwrap();
        assert_eq!(var.value().to_vec1().unwrap(), [0.75, 2.25, -3.5]);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_changes() {
    let (var, _) = single(&[1., 2., -3.]);
    let mut sgd = ScaledSgd::from_vars(vec![var.clone()], SgdConfig::default()).unwrap();
    let wide = Tensor::new(&[1f64, 2., 3.], &Device::Cpu).unwrap();
    let long = Tensor::new(&[1f32, 2., 3., 4.], &Device::Cpu).unwrap();
    for bad in [wide, long] {
        let mut grads = ScaledGrads::default();
        grads.insert(&var, Scaled::from_parts(&bad, 1.).unwrap());
        let error = sgd.apply(&grads).unwrap_err();
        assert!(
            matches!(error, OptimError::Gradient { ref name, .. } if name == "w"),
            "{error}"
        );
    }
    assert_eq!((sgd.steps(), var.version()), (0, 0));
    let double = Tensor::new(&[1f64], &Device::Cpu).unwrap();
    let double = ScaledVar::new("d", &double).unwrap();
    let error = ScaledSgd::from_vars(vec![double], SgdConfig::default()).unwrap_err();
    assert!(
        matches!(
            error,
            OptimError::ScaledDtype {
                got: DType::F64,
                ..
            }
        ),
        "{error}"
    );
    let masters = SgdConfig::default().with_masters(MasterDType::F32);
    let error = ScaledSgd::from_vars(vec![var.clone()], masters).unwrap_err();
    assert!(matches!(error, OptimError::ScaledMasters { .. }), "{error}");
    let moments = MomentStorage::Fp8(Fp8Moments::default());
    let moments = SgdConfig::default().with_moments(moments);
    let error = ScaledSgd::from_vars(vec![var], moments).unwrap_err();
    assert!(matches!(error, OptimError::ScaledMoments), "{error}");
}

#[test]
fn zeros_take_the_size_of_their_first_update() {
    // A bias begins at zero; its update is far below the smallest f16.
    let zero = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    let scaled = Scaled::zeros(3, DType::F16, &Device::Cpu).unwrap();
    for var in [
        ScaledVar::rescaled("w", &zero, DType::F16).unwrap(),
        ScaledVar::from_scaled("w", &scaled).unwrap(),
    ] {
        let mut sgd =
            ScaledSgd::from_vars(vec![var.clone()], SgdConfig::default().with_lr(1.)).unwrap();
        let _ = sgd.apply(&one_grad(&var, &[1e-20, 2e-20, -3e-20])).unwrap();
        let off = difference(&values(&var.value()), &[-1e-20, -2e-20, 3e-20]);
        assert!(off < 1. / 1024., "{off:e}");
    }
}

#[test]
fn overflow_saturates_and_is_counted() {
    // The scale cannot rise any more.
    let data = Tensor::full(60_000f32, 3, &Device::Cpu).unwrap();
    let data = data.to_dtype(DType::F16).unwrap();
    let top = Scaled::from_parts(&data, 2f32.powi(127)).unwrap();
    let var = ScaledVar::from_scaled("w", &top).unwrap();
    let mut grads = ScaledGrads::default();
    let grad = Tensor::new(&[-65504f32, 0., 65504.], &Device::Cpu).unwrap();
    grads.insert(&var, Scaled::from_parts(&grad, 2f32.powi(127)).unwrap());
    let mut sgd =
        ScaledSgd::from_vars(vec![var.clone()], SgdConfig::default().with_lr(1.)).unwrap();
    let report = sgd.apply(&grads).unwrap();
    assert!(!report.skipped().unwrap());
    let data = var
        .data_var()
        .to_dtype(DType::F32)
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    assert_eq!(data[0], 65504.);
    assert!(
        (data[1] - 60_000.).abs() <= 32. && (data[2] + 5504.).abs() <= 32.,
        "{data:?}"
    );
    assert_eq!(sgd.counts().saturated, 1);
}

#[test]
fn a_gradient_in_the_memory_of_its_parameter() {
    // The derivative of a square by one factor is the other: the data of the parameter themselves.
    let (var, _) = single(&[1., 2., -3.]);
    let mut grads = ScaledGrads::default();
    grads.insert(&var, var.value());
    let mut sgd =
        ScaledSgd::from_vars(vec![var.clone()], SgdConfig::default().with_lr(0.5)).unwrap();
    let _ = sgd.apply(&grads).unwrap();
    assert_eq!(var.value().to_vec1().unwrap(), [0.5, 1., -1.5]);
}

/// A step overwrites the data and may change the scale: what was computed from the old value has no derivative any longer.
#[test]
fn a_backward_pass_after_the_step_is_an_error() {
    let (var, _) = single(&[1., 2., -3.]);
    let mut sgd =
        ScaledSgd::from_vars(vec![var.clone()], SgdConfig::default().with_lr(100.)).unwrap();
    let value = var.value();
    let kept = value.to_tensor(DType::F32).unwrap();
    let loss = value.square().unwrap().sum_all().unwrap();
    let grads = loss.backward_retained().unwrap();
    let _ = sgd.apply(&grads).unwrap();
    assert_ne!(var.scale(), value.scale());
    for refused in [loss.backward().map(drop), value.data().map(drop)] {
        let error = refused.unwrap_err();
        assert!(
            matches!(&error, Error::ChangedParameter { name, .. } if name == "w"),
            "{error}"
        );
    }
    assert_eq!(kept.to_vec1::<f32>().unwrap(), [1., 2., -3.]);
}
