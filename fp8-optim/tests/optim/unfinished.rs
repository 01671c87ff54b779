//! A step that ends in the middle of its updates.

use candle_core::{DType, Device, Var};
use fp8_optim::{
    DecayScope, Engine, Moment, MomentStorage, OptimError, Rates, Real, Rule, Settings, Variable,
};
use serde::{Deserialize, Serialize};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Gradient descent that panics at the second variable of one step.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Failing {
    lr: f64,
    step: u64,
}

impl Rule for Failing {
    const KIND: &'static str = "test.Failing";
    const MOMENTS: &'static [Moment] = &[];

    fn settings(&self) -> Settings {
        Settings {
            lr: self.lr,
            weight_decay: 0.,
            decay_scope: DecayScope::All,
            max_grad_norm: None,
            masters: None,
            moments: MomentStorage::F32,
            seed: 0,
            max_skipped_steps: None,
        }
    }

    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn formula<V: Real>(&self, at: &Rates) -> impl Fn(V, V, &mut [V]) -> V + Copy + Sync {
        assert!((at.step, at.index) != (self.step, 1), "it fails here");
        let lr = V::number(at.lr);
        move |theta, grad, _| theta - grad.times(lr)
    }
}

#[test]
fn no_step_follows_before_a_state_is_loaded() -> Result<(), Box<dyn std::error::Error>> {
    let vars = ["a", "b"].map(|name| (name, Var::ones(2, DType::F32, &Device::Cpu).unwrap()));
    let named = vars
        .iter()
        .map(|(name, var)| (name.to_string(), var.clone()));
    let rule = Failing { lr: 0.5, step: 2 };
    let mut optimizer = Engine::<_, Variable>::from_named(named.collect(), rule)?;
    let grads = || {
        let loss = (vars[0].1.as_tensor() + vars[1].1.as_tensor()).unwrap();
        loss.sum_all().unwrap().backward().unwrap()
    };
    let values = || {
        vars.each_ref()
            .map(|(_, var)| var.to_vec1::<f32>().unwrap())
    };
    optimizer.apply(&grads())?;
    let state = optimizer.state()?;
    assert_eq!(values(), [[0.5; 2]; 2]);

    assert!(catch_unwind(AssertUnwindSafe(|| optimizer.apply(&grads()))).is_err());
    assert_eq!(values(), [[0.; 2], [0.5; 2]], "one of them was updated");
    for _ in 0..2 {
        let again = optimizer.apply(&grads());
        assert!(
            matches!(again, Err(OptimError::UnfinishedStep)),
            "{again:?}"
        );
    }
    assert_eq!(values(), [[0.; 2], [0.5; 2]], "nothing counts twice");
    // Nor does a checkpoint take the place of a good one.
    let saved = optimizer.state();
    assert!(
        matches!(saved, Err(OptimError::UnfinishedStep)),
        "{saved:?}"
    );

    optimizer.load_state(&state)?;
    optimizer.set_config(Failing { lr: 0.5, step: 0 })?;
    vars[0].1.set(&vars[1].1)?;
    optimizer.apply(&grads())?;
    assert_eq!(values(), [[0.; 2]; 2]);
    assert_eq!(optimizer.steps()?, 2);
    Ok(())
}
