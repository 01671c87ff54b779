//! Loss scaling.

use crate::helpers::*;
use candle_core::{DType, Tensor, Var};
use candle_nn::Optimizer;
use fp8_optim::*;
use fp8_test_support::device;

fn scaler(config: LossScalerConfig) -> DynamicLossScaler {
    DynamicLossScaler::new(config).unwrap()
}

fn config() -> LossScalerConfig {
    LossScalerConfig::default()
}

/// A loss whose gradients depend on the step; with `bad`, that of one element of `big` is infinite.
fn loss(vars: &[(String, Var)], step: u64, bad: Option<usize>) -> Tensor {
    let mut all = Tensor::zeros((), DType::F32, &device()).unwrap();
    for (name, var) in vars {
        let factors = (0..var.elem_count()).map(|i| match bad {
            Some(at) if name == "big" && i == at => f32::INFINITY,
            _ => ((i as f32 + step as f32) * 0.37).sin(),
        });
        let factors = Tensor::from_iter(factors, &device()).unwrap();
        let factors = factors.reshape(var.shape()).unwrap();
        let wide = var.to_dtype(DType::F32).unwrap();
        let part = (wide * factors).unwrap().sum_all().unwrap();
        all = (all + part).unwrap();
    }
    all
}

#[test]
fn moves_as_configured() {
    let mut s = DynamicLossScaler::default();
    assert_eq!(s.loss_scale(), 65536.);
    for _ in 0..1999 {
        s.update(false);
    }
    assert_eq!((s.loss_scale(), s.clean_steps()), (65536., 1999));
    s.update(false);
    assert_eq!((s.loss_scale(), s.clean_steps()), (131072., 0));
    // A skipped step restarts the count.
    s.update(false);
    s.update(true);
    assert_eq!(
        (s.loss_scale(), s.clean_steps(), s.skipped_steps()),
        (65536., 0, 1)
    );
    for _ in 0..2000 * 20 {
        s.update(false);
    }
    assert_eq!(s.loss_scale(), 16_777_216., "the cap");

    let mut s = scaler(config().with_min_loss_scale(16384.));
    for _ in 0..9 {
        s.update(true);
    }
    assert_eq!(
        (s.loss_scale(), s.skipped_steps()),
        (16384., 9),
        "the floor"
    );
    let mut s = DynamicLossScaler::default();
    for _ in 0..1000 {
        s.update(true);
    }
    assert_eq!(s.loss_scale(), 2f64.powi(-126));
}

/// Powers of two round nothing, so training gives the same bits with and without the scaler.
#[test]
fn changes_no_bit_of_f32_training() {
    let (plain, scaled) = (vars(DType::F32), vars(DType::F32));
    let adam = AdamWConfig {
        max_grad_norm: Some(1.),
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::from_named(plain.clone(), adam.clone()).unwrap();
    let mut other = AdamW::from_named(scaled.clone(), adam).unwrap();
    let mut scaler = scaler(config().with_growth_interval(2));
    for step in 0..5 {
        let _ = optimizer
            .apply(&loss(&plain, step, None).backward().unwrap())
            .unwrap();
        let step = scaler
            .backward_step(&loss(&scaled, step, None), &mut other)
            .unwrap();
        assert_eq!((step.skipped(), step.non_finite()), (false, 0));
    }
    assert_eq!(scaler.loss_scale(), 65536. * 4.);
    assert_eq!(all_bits(&plain), all_bits(&scaled));
    assert_eq!(state_bits(&optimizer), state_bits(&other));
}

/// Wherever the element is, exactly one step is skipped, and the loss scale backs off once.
#[test]
fn an_overflow_skips_one_step() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for at in [0, 16_383, 16_384, 39_999] {
            let (all, clean) = (vars(dtype), vars(dtype));
            let sgd = SgdConfig::default()
                .with_momentum(0.5)
                .with_masters(MasterDType::F16);
            let mut optimizer = Sgd::from_named(all.clone(), sgd.clone()).unwrap();
            let mut other = Sgd::from_named(clean.clone(), sgd).unwrap();
            let (mut scaler, mut undisturbed) = (
                scaler(config().with_initial_loss_scale(1024.)),
                scaler(config().with_initial_loss_scale(512.)),
            );
            for step in 0..4u64 {
                let bad = (step == 1).then_some(at);
                let before = (all_bits(&all), optimizer.steps().unwrap());
                let done = scaler
                    .backward_step(&loss(&all, step, bad), &mut optimizer)
                    .unwrap();
                assert_eq!(done.loss_scale(), if step < 2 { 1024. } else { 512. });
                assert_eq!(
                    (done.skipped(), done.non_finite()),
                    (step == 1, usize::from(step == 1))
                );
                if step == 1 {
                    assert_eq!((all_bits(&all), optimizer.steps().unwrap()), before);
                } else {
                    let done = undisturbed
                        .backward_step(&loss(&clean, step, None), &mut other)
                        .unwrap();
                    assert!(!done.skipped());
                }
            }
            assert_eq!((scaler.skipped_steps(), scaler.clean_steps()), (1, 2));
            // Scales of 1024 and 512 round nothing, and the skipped step is not counted.
            assert_eq!(all_bits(&all), all_bits(&clean), "{dtype:?} {at}");
        }
    }
}

/// f16 gradients that would underflow without loss scaling reach the variable.
#[test]
fn small_f16_gradients_survive() {
    let var = Var::from_tensor(&Tensor::ones(4, DType::F16, &device()).unwrap()).unwrap();
    // 2^-30 is below half of f16's smallest value.
    let small = || {
        let wide = var.to_dtype(DType::F32).unwrap();
        (wide.sum_all().unwrap() * 2f64.powi(-30)).unwrap()
    };
    let scaler = DynamicLossScaler::default();
    let grad = |scaler: Option<&DynamicLossScaler>| match scaler {
        None => small().backward().unwrap().get(&var).unwrap().clone(),
        Some(scaler) => {
            let mut grads = scaler.scaled(&small()).unwrap().backward().unwrap();
            assert_eq!(scaler.unscale(&mut grads, [&var]).unwrap(), 0);
            grads.get(&var).unwrap().clone()
        }
    };
    assert_eq!(flat64(&grad(None)), [0.; 4]);
    let wide = grad(Some(&scaler));
    assert_eq!(
        (wide.dtype(), flat64(&wide)),
        (DType::F32, vec![2f64.powi(-30); 4])
    );
    // Optimizers that need gradients in the variable's dtype get them, rounded.
    let narrow = grad(Some(&self::scaler(config().with_f32_gradients(false))));
    assert_eq!((narrow.dtype(), flat64(&narrow)), (DType::F16, vec![0.; 4]));

    let named = vec![("v".to_string(), var.clone())];
    let sgd = SgdConfig::default().with_lr(2f64.powi(28));
    let mut optimizer = Sgd::from_named(named, sgd).unwrap();
    let mut scaler = scaler;
    assert!(
        !scaler
            .backward_step(&small(), &mut optimizer)
            .unwrap()
            .skipped()
    );
    assert_eq!(flat64(&var), [0.75; 4]);
}

#[test]
fn drives_candles_optimizers() {
    for dtype in [DType::F32, DType::F16] {
        let all = vars(dtype);
        let plain: Vec<Var> = all.iter().map(|(_, var)| var.clone()).collect();
        let mut scaler = scaler(
            config()
                .with_f32_gradients(false)
                .with_initial_loss_scale(256.),
        );
        let mut sgd = candle_nn::SGD::new(plain.clone(), 0.1).unwrap();
        let mut adam = candle_nn::AdamW::new_lr(plain.clone(), 1e-3).unwrap();
        for (step, bad) in [(0, None), (1, Some(9)), (2, None)] {
            let before = all_bits(&all);
            let done = scaler
                .step(&loss(&all, step, bad), &plain, |grads| sgd.step(grads))
                .unwrap();
            assert_eq!(done.skipped(), bad.is_some());
            assert_eq!(all_bits(&all) == before, bad.is_some());
            let done = scaler.step(&loss(&all, step, None), &plain, |grads| adam.step(grads));
            assert!(!done.unwrap().skipped());
        }
        assert_eq!(scaler.skipped_steps(), 1);
        // An error of the optimizer is returned, and the loss scale does not change.
        let state = scaler.state();
        let failed = scaler.step(&loss(&all, 0, None), &plain, |_| {
            Err::<(), _>(candle_core::Error::msg("the optimizer fails"))
        });
        let error = failed.map(drop).unwrap_err().to_string();
        assert!(error.contains("the optimizer fails"), "{error}");
        assert_eq!(scaler.state(), state);
    }
}

#[test]
fn bad_values_are_named() {
    let bad = [
        (
            "initial_loss_scale = inf",
            config().with_initial_loss_scale(f64::INFINITY),
        ),
        (
            "initial_loss_scale = NaN",
            config().with_initial_loss_scale(f64::NAN),
        ),
        (
            "initial_loss_scale = -2",
            config().with_initial_loss_scale(-2.),
        ),
        (
            "initial_loss_scale = 0",
            config().with_initial_loss_scale(0.),
        ),
        (
            "initial_loss_scale = 1000",
            config().with_initial_loss_scale(1000.),
        ),
        (
            "initial_loss_scale = 65536",
            config().with_max_loss_scale(4096.),
        ),
        (
            "max_loss_scale = inf",
            config().with_max_loss_scale(f64::INFINITY),
        ),
        ("min_loss_scale = 0", config().with_min_loss_scale(0.)),
        (
            "min_loss_scale = 33554432",
            config().with_min_loss_scale(33_554_432.),
        ),
        ("growth_factor = 0.5", config().with_growth_factor(0.5)),
        ("growth_factor = 3", config().with_growth_factor(3.)),
        ("backoff_factor = 2", config().with_backoff_factor(2.)),
        ("backoff_factor = 0", config().with_backoff_factor(0.)),
        ("growth_interval = 0", config().with_growth_interval(0)),
    ];
    for (text, config) in bad {
        let error = DynamicLossScaler::new(config).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
    let mut s = DynamicLossScaler::default();
    let before = s.clone();
    for value in ["-1.0", "3.0", "33554432.0", "1e400"] {
        let json = format!(r#"{{"loss_scale": {value}, "clean_steps": 1, "skipped_steps": 2}}"#);
        let state = match serde_json::from_str::<LossScalerState>(&json) {
            Ok(state) => state,
            // The parser refuses numbers beyond f64 itself.
            Err(error) => {
                assert_eq!(value, "1e400", "{error}");
                continue;
            }
        };
        let error = s.load_state(&state).unwrap_err().to_string();
        assert!(error.starts_with("loss_scale = "), "{error}");
        assert_eq!(s, before);
    }
}

/// Tied weights: one variable under two names.
#[test]
fn a_variable_that_comes_twice_is_divided_once() {
    let var = Var::from_tensor(&Tensor::ones(4, DType::F32, &device()).unwrap()).unwrap();
    let mut scaler = scaler(config().with_initial_loss_scale(1024.));
    let loss = || var.sqr().unwrap().sum_all().unwrap();
    let mut grads = scaler.scaled(&loss()).unwrap().backward().unwrap();
    assert_eq!(scaler.unscale(&mut grads, [&var, &var]).unwrap(), 0);
    assert_eq!(flat64(grads.get(&var).unwrap()), [2.; 4]);
    // And counted once.
    let bad = (loss() * f64::INFINITY).unwrap();
    let step = scaler.step(&bad, [&var, &var], |_| Ok::<_, OptimError>(()));
    assert_eq!(step.unwrap().non_finite(), 1);
}

/// In f32, since the product is beyond the range of f16; the gradient of the loss is in f16 and overflows from a scale of 2^16 on.
#[test]
fn an_f16_loss_is_scaled_in_f32() {
    let two = Tensor::new(2f32, &device()).unwrap();
    let loss = Var::from_tensor(&two.to_dtype(DType::F16).unwrap()).unwrap();
    for (scale, grad) in [(65536., f64::INFINITY), (32768., 32768.)] {
        let scaler = scaler(config().with_initial_loss_scale(scale));
        let scaled = scaler.scaled(&loss).unwrap();
        let got = (scaled.dtype(), flat64(&scaled));
        assert_eq!(got, (DType::F32, vec![2. * scale]));
        let grads = scaled.backward().unwrap();
        let got = grads.get(&loss).unwrap();
        assert_eq!((got.dtype(), flat64(got)), (DType::F16, vec![grad]));
    }
}
