//! A training that is interrupted and resumed.

use crate::helpers::*;
use candle_core::{DType, Device, Tensor};
use fp8_recipes::optim::scaled::*;
use fp8_recipes::optim::*;
use fp8_recipes::scaled::{ScaledVarMap, TrainingState, load, resume_training, save_training};
use fp8_recipes::{Error, FilesError};
use fp8_scaled::ScaledVar;

fn map(vars: &[ScaledVar]) -> ScaledVarMap {
    let map = ScaledVarMap::new(DType::F16, &Device::Cpu).unwrap();
    for var in vars {
        map.insert(var).unwrap();
    }
    map
}

fn interrupted<O: ScaledOptimizer>(make: impl Fn(&ScaledVarMap) -> O) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let run = |steps: std::ops::Range<u64>, resume: bool| {
        let vars = vars(DType::F16);
        let map = map(&vars);
        let mut optimizer = make(&map);
        if resume {
            for var in &vars {
                map.set(var.name(), &cpu_tensor(77, var.dims())).unwrap();
            }
            optimizer.set_lr(0.7).unwrap();
            let back = resume_training(&path, &map, &mut optimizer).unwrap();
            assert_eq!((back.step, back.extra["epoch"].as_u64()), (3, Some(1)));
        }
        for step in steps {
            // Gradients that shrink, so that scales move.
            let _ = optimizer
                .apply(&grads(&vars, step, 2f32.powi(-3 * step as i32)))
                .unwrap();
            if step == 2 {
                let training = TrainingState::new(3).with_extra("epoch", 1);
                save_training(&path, &map, &optimizer, &training).unwrap();
            }
        }
        assert_eq!(optimizer.steps(), 6);
        bits(&vars)
    };
    let whole = run(0..6, false);
    assert_eq!(run(3..6, true), whole);
    // Parameters alone, without the optimizer's tensors.
    assert_eq!(load(&path, &Device::Cpu).unwrap().len(), 4);
}

#[test]
fn adamw_goes_on_bit_for_bit() {
    interrupted(|map| {
        let config = AdamWConfig {
            lr: 0.01,
            seed: 9,
            ..AdamWConfig::default()
        };
        let adam = ScaledAdamW::new(map, config).unwrap();
        adam.with_no_decay(|name, _| name == "bias")
    });
}

#[test]
fn sgd_goes_on_bit_for_bit() {
    for momentum in [0., 0.9] {
        interrupted(|map| {
            let config = SgdConfig::default().with_lr(0.1).with_momentum(momentum);
            ScaledSgd::new(map, config.with_dampening(0.5)).unwrap()
        });
    }
}

/// An optimizer with a loss scaler and a count of all steps, as the `Emulator` has them.
struct Driven {
    inner: LossScaled<ScaledSgd>,
    steps: Option<u64>,
}

impl Driven {
    fn new(map: &ScaledVarMap, steps: Option<u64>) -> Self {
        let sgd = ScaledSgd::new(map, SgdConfig::default()).unwrap();
        let inner = LossScaled::new(sgd, DynamicLossScaler::default());
        Self { inner, steps }
    }
}

impl ResumableOptimizer for Driven {
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
        let state = self.inner.optimizer_state()?;
        Ok(match self.steps {
            Some(steps) => state.with_global_steps(steps),
            None => state,
        })
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
        self.inner.load_optimizer_state(state)?;
        self.steps = state.global_steps();
        Ok(())
    }

    fn scales_loss(&self) -> bool {
        true
    }
}

#[test]
fn a_loss_scaler_and_the_count_of_all_steps_are_saved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let map = map(&vars(DType::F16));
    let mut driven = Driven::new(&map, Some(7));
    for overflow in [true, true, false] {
        driven.inner.scaler.update(overflow);
    }
    save_training(&path, &map, &driven, &TrainingState::new(3)).unwrap();
    let mut back = Driven::new(&map, None);
    assert_ne!(back.inner.scaler, driven.inner.scaler);
    resume_training(&path, &map, &mut back).unwrap();
    assert_eq!(back.inner.scaler, driven.inner.scaler);
    assert_eq!(back.inner.scaler.loss_scale(), 16384.);
    assert_eq!(back.steps, Some(7));

    // An optimizer alone reads the file too. Its own file has neither entry, as those of earlier versions, and leaves the scaler as it is.
    let sgd = &mut driven.inner.optimizer;
    resume_training(&path, &map, sgd).unwrap();
    save_training(&path, &map, sgd, &TrainingState::new(4)).unwrap();
    let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
    assert!(!text.contains("loss_scaler") && !text.contains("global_steps"));
    assert_eq!(resume_training(&path, &map, &mut back).unwrap().step, 4);
    assert_eq!(back.inner.scaler.loss_scale(), 16384.);
    assert_eq!(back.steps, None);
}

#[test]
fn states_that_do_not_fit_are_refused_and_change_nothing() {
    let vars = vars(DType::F16);
    let mut adam = ScaledAdamW::from_vars(vars.clone(), AdamWConfig::default()).unwrap();
    let _ = adam.apply(&grads(&vars, 0, 1.)).unwrap();
    let good = adam.optimizer_state().unwrap();
    let with = |name: &str, tensor: Tensor| good.clone().with_tensor(name, tensor);
    let scale = |x: f32| Tensor::new(&[x], &Device::Cpu).unwrap();
    let data = |x: f32, dtype| {
        Tensor::full(x, 13, &Device::Cpu)
            .unwrap()
            .to_dtype(dtype)
            .unwrap()
    };
    let bad = [
        (with("bias.exp_avg.data_scale", scale(3.)), "StateValue"),
        (
            with("bias.exp_avg.data_scale", scale(f32::NAN)),
            "StateValue",
        ),
        (
            with("bias.exp_avg_root", data(-1., DType::F16)),
            "StateValue",
        ),
        (
            with("bias.exp_avg", data(f32::NAN, DType::F16)),
            "StateValue",
        ),
        (with("bias.exp_avg", data(1., DType::F32)), "StateDtype"),
        (
            with("bias.exp_avg", scale(1.).to_dtype(DType::F16).unwrap()),
            "StateShape",
        ),
        (with("other.exp_avg", scale(1.)), "UnexpectedState"),
        (OptimizerState::new(good.kind()), "MissingState"),
        (OptimizerState::new("fp8.ScaledSgd"), "StateKind"),
    ];
    for (state, expected) in bad {
        let error = adam.load_optimizer_state(&state).unwrap_err();
        assert!(format!("{error:?}").starts_with(expected), "{error:?}");
    }
    let same = adam.optimizer_state().unwrap();
    assert_eq!(same.tensors().len(), good.tensors().len());
    assert_eq!(adam.steps(), 1);

    // A buffer that is missing is not one that has not begun.
    let config = SgdConfig::default().with_momentum(0.5);
    let mut sgd = ScaledSgd::from_vars(vars.clone(), config).unwrap();
    let _ = sgd.apply(&grads(&vars, 0, 1.)).unwrap();
    let full = sgd.optimizer_state().unwrap();
    let lost = full
        .tensors()
        .iter()
        .filter(|(name, _)| !name.starts_with("w."));
    let lost = lost.map(|(name, tensor)| (name.clone(), tensor.clone()));
    let lost = OptimizerState::new(full.kind()).with_tensors(lost);
    let error = sgd.load_optimizer_state(&lost).unwrap_err();
    assert!(
        matches!(error, OptimError::MissingState { ref name } if name == "w.momentum_buffer"),
        "{error}"
    );
}

#[test]
fn a_checkpoint_of_other_parameters_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let vars = vars(DType::F16);
    let sgd = ScaledSgd::from_vars(vars.clone(), SgdConfig::default()).unwrap();
    save_training(&path, &map(&vars), &sgd, &TrainingState::new(0)).unwrap();
    let fewer = map(&vars[1..]);
    let mut other = ScaledSgd::new(&fewer, SgdConfig::default()).unwrap();
    let error = resume_training(&path, &fewer, &mut other).unwrap_err();
    assert!(
        matches!(error, Error::Files(FilesError::UnmatchedNames { ref unused, .. }) if *unused == ["w"]),
        "{error}"
    );
}
