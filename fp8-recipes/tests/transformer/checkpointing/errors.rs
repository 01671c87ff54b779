//! Errors, and where they are reported.

use super::harness::{CPU, bits, tensor};
use candle_core::{DType, Tensor, Var};
use fp8_candle::Error as Fp8Error;
use fp8_candle::wide::backward;
use fp8_recipes::nn::{self, checkpoint};
use fp8_recipes::{Error, is_recomputing, prepare_fp8, with_fp8};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn var(seed: u64, dims: &[usize]) -> Var {
    Var::from_tensor(&tensor(seed, dims)).unwrap()
}

#[test]
fn a_changed_variable() {
    let (x, w) = (var(1, &[4]), var(2, &[4]));
    let weight = w.as_tensor().clone();
    let y = checkpoint(move |x| x * &weight, x.as_tensor()).unwrap();
    let loss = y.sum_all().unwrap();
    let before = w.as_tensor().copy().unwrap();
    w.set(&(w.as_tensor() * 2.).unwrap()).unwrap();
    let error = backward(&loss).unwrap_err();
    let Fp8Error::RecomputedValues { shape, dtype } = &error else {
        panic!("{error}");
    };
    assert_eq!((shape.as_slice(), *dtype), ([4].as_slice(), DType::F32));
    let text = loss.backward().unwrap_err().to_string();
    assert!(text.contains("has changed since"), "{text}");
    // Where it was.
    w.set(&before).unwrap();
    let grads = backward(&loss).unwrap();
    assert_eq!(bits(grads.get(&w).unwrap()), bits(&x));
}

/// One that the function is called with, too.
#[test]
fn a_changed_input() {
    let w = var(2, &[4]);
    let y = checkpoint(Tensor::sqr, w.as_tensor()).unwrap();
    let loss = y.sum_all().unwrap();
    w.set(&(w.as_tensor() * 2.).unwrap()).unwrap();
    let error = backward(&loss).unwrap_err();
    assert!(
        matches!(error, Fp8Error::RecomputedValues { .. }),
        "{error}"
    );
}

#[test]
fn different_variables_in_the_second_run_are_an_error() {
    let (x, a, b) = (var(1, &[4]), var(2, &[4]), var(3, &[4]));
    for (first, again, word) in [
        (vec![&a], vec![&a, &b], "only now"),
        (vec![&a, &b], vec![&a], "no longer"),
        (vec![&a], vec![&b], "no longer"),
    ] {
        let clone = |list: &[&Var]| -> Vec<Tensor> {
            list.iter().map(|var| var.as_tensor().clone()).collect()
        };
        let (first, again) = (clone(&first), clone(&again));
        let counts = (first.len(), again.len());
        let f = move |x: &Tensor| {
            let list = if is_recomputing() { &again } else { &first };
            list.iter().try_fold(x.clone(), |x, w| x * w)
        };
        let y = checkpoint(f, x.as_tensor()).unwrap();
        match backward(&y.sum_all().unwrap()).unwrap_err() {
            Fp8Error::RecomputedVariables {
                what,
                shape,
                first,
                again,
            } => {
                assert_eq!((what, shape, (first, again)), (word, vec![4], counts));
            }
            error => panic!("{error}"),
        }
    }
}

#[test]
fn a_different_shape_in_the_second_run_is_an_error() {
    let x = var(1, &[4]);
    let f = |x: &Tensor| x.narrow(0, 0, if is_recomputing() { 3 } else { 4 });
    let y = checkpoint(f, x.as_tensor()).unwrap();
    let error = backward(&y.sum_all().unwrap()).unwrap_err();
    let Fp8Error::RecomputedShape { first, again } = error else {
        panic!("{error}");
    };
    assert_eq!((first, again), (vec![4], vec![3]));
}

#[test]
fn a_layer_used_differently_in_the_second_run_is_an_error() {
    let (x, w) = (var(1, &[4, 32]), var(2, &[32, 32]));
    let layer = nn::Linear::new(w.as_tensor().clone(), None).with_path("fc");
    prepare_fp8(&layer, &Default::default()).unwrap();
    let f = move |x: &Tensor| {
        let y = layer.try_forward(x)?;
        if is_recomputing() {
            layer.try_forward(&y)
        } else {
            Ok(y)
        }
    };
    let y = with_fp8("delayed", || checkpoint(f, x.as_tensor())).unwrap();
    let text = y.sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(text.contains("layer `fc` more often"), "{text}");
}

#[test]
fn errors_of_the_function() {
    let x = var(1, &[4]);
    let error = checkpoint(
        |_: &Tensor| {
            Err::<Tensor, _>(Error::Guard(fp8_recipes::GuardError::NotRepeated {
                path: "mine".into(),
            }))
        },
        x.as_tensor(),
    );
    assert!(
        matches!(error, Err(Error::Guard(fp8_recipes::GuardError::NotRepeated { path })) if path == "mine")
    );
    let failed = Arc::new(AtomicBool::new(false));
    let fails = failed.clone();
    let f = move |x: &Tensor| match fails.load(Ordering::Relaxed) {
        true => candle_core::bail!("out of luck"),
        false => x.sqr(),
    };
    let loss = checkpoint(f, x.as_tensor()).unwrap().sum_all().unwrap();
    failed.store(true, Ordering::Relaxed);
    for text in [
        loss.backward().unwrap_err().to_string(),
        backward(&loss).unwrap_err().to_string(),
    ] {
        assert!(text.contains("out of luck"), "{text}");
    }
    // The thread is as it was.
    assert!(!is_recomputing());
    let zero = Tensor::zeros(4, DType::F32, CPU).unwrap();
    failed.store(false, Ordering::Relaxed);
    let grads = backward(&loss).unwrap();
    assert_ne!(bits(grads.get(&x).unwrap()), bits(&zero));
}
