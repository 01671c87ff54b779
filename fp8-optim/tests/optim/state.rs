//! Saving and loading.

use crate::helpers::*;
use candle_core::{DType, Tensor};
use fp8_optim::*;
use fp8_test_support::device;
use std::collections::HashMap;

#[test]
fn a_loaded_state_continues_bit_for_bit() {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let config = AdamWConfig {
            max_grad_norm: Some(1.0),
            ..AdamWConfig::default()
        };
        let straight = vars(dtype);
        let mut optimizer = AdamW::from_named(straight.clone(), config.clone()).unwrap();
        for step in 0..5 {
            let _ = optimizer.apply(&grads(&straight, step, 1.0)).unwrap();
        }
        let saved = optimizer.state().unwrap();
        let resumed = copies(&straight);
        let expected_snapshot = state_bits(&optimizer);
        for step in 5..9 {
            let _ = optimizer.apply(&grads(&straight, step, 1.0)).unwrap();
        }
        // Later steps did not change the saved state.
        let mut other = AdamW::from_named(resumed.clone(), config).unwrap();
        other.load_state(&saved).unwrap();
        assert_eq!(state_bits(&other), expected_snapshot);
        assert_eq!(other.steps().unwrap(), 5);
        for step in 5..9 {
            let _ = other.apply(&grads(&resumed, step, 1.0)).unwrap();
        }
        assert_eq!(all_bits(&straight), all_bits(&resumed));
        assert_eq!(state_bits(&optimizer), state_bits(&other));
    }
}

#[test]
fn loading_names_what_does_not_fit_and_changes_nothing() {
    let all = vars(DType::F32);
    let mut optimizer = AdamW::from_named(all.clone(), AdamWConfig::default()).unwrap();
    let _ = optimizer.apply(&grads(&all, 0, 1.0)).unwrap();
    let good = optimizer.state().unwrap();
    let before = state_bits(&optimizer);
    let mut refused = |change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let mut state = good.clone();
        change(&mut state);
        let error = optimizer.load_state(&state).unwrap_err();
        assert_eq!(state_bits(&optimizer), before);
        error
    };
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device()).unwrap();

    let missing = refused(&|state| drop(state.remove("w.exp_avg_sq")));
    assert!(matches!(&missing, OptimError::MissingState { name } if name == "w.exp_avg_sq"));
    let shape =
        refused(&|state| drop(state.insert("bias.exp_avg".into(), zeros(&[12], DType::F32))));
    assert!(matches!(shape, OptimError::StateShape { .. }));
    let message = shape.to_string();
    assert!(
        message.contains("bias.exp_avg") && message.contains("[13]") && message.contains("[12]")
    );
    let dtype =
        refused(&|state| drop(state.insert("bias.exp_avg".into(), zeros(&[13], DType::F16))));
    let message = dtype.to_string();
    assert!(
        message.contains("F32") && message.contains("F16"),
        "{message}"
    );
    let extra = refused(&|state| drop(state.insert("v.exp_avg".into(), zeros(&[1], DType::F32))));
    assert!(matches!(&extra, OptimError::UnexpectedState { name } if name == "v.exp_avg"));
    let no_step = refused(&|state| drop(state.remove(STEP_NAME)));
    assert!(matches!(&no_step, OptimError::MissingState { name } if name == STEP_NAME));
    let minus = Tensor::new(-3i64, &device()).unwrap();
    let negative = refused(&|state| drop(state.insert(STEP_NAME.into(), minus.clone())));
    assert!(matches!(negative, OptimError::NegativeStep { got: -3, .. }));
    let empty = refused(&|state| drop(state.insert(STEP_NAME.into(), zeros(&[0], DType::I64))));
    assert!(matches!(empty, OptimError::StateShape { .. }));
}
