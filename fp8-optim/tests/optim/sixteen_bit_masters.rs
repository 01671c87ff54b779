//! Master weights in bf16 and f16, rounded at random.

use crate::helpers::*;
use candle_core::{DType, Tensor, Var};
use fp8_optim::*;
use fp8_test_support::device;
use std::collections::HashMap;

const HALVES: [MasterDType; 2] = [MasterDType::Bf16, MasterDType::F16];

/// What the tests need of both optimizers.
trait WithMasters: NamedOptimizer + ResumableOptimizer + Sized {
    fn make(
        vars: Vec<(String, Var)>,
        lr: f64,
        masters: MasterDType,
        seed: u64,
    ) -> Result<Self, OptimError>;
    fn tensors(&self) -> HashMap<String, Tensor>;
}

impl WithMasters for AdamW {
    fn make(
        vars: Vec<(String, Var)>,
        lr: f64,
        master_dtype: MasterDType,
        seed: u64,
    ) -> Result<Self, OptimError> {
        let config = AdamWConfig {
            lr,
            weight_decay: 0.,
            master_weights: true,
            master_dtype,
            seed,
            ..AdamWConfig::default()
        };
        Self::from_named(vars, config)
    }

    fn tensors(&self) -> HashMap<String, Tensor> {
        self.state().unwrap()
    }
}

impl WithMasters for Sgd {
    fn make(
        vars: Vec<(String, Var)>,
        lr: f64,
        masters: MasterDType,
        seed: u64,
    ) -> Result<Self, OptimError> {
        let config = SgdConfig::default().with_lr(lr).with_momentum(0.5);
        Self::from_named(vars, config.with_masters(masters).with_seed(seed))
    }

    fn tensors(&self) -> HashMap<String, Tensor> {
        self.state().unwrap()
    }
}

macro_rules! for_both {
    ($($name:ident = $body:ident)+) => {$(
        #[test]
        fn $name() {
            $body::<AdamW>();
            $body::<Sgd>();
        }
    )+};
}

for_both! {
    the_variable_is_its_master = variable_is_master
    no_thread_and_no_resume_changes_a_bit = same_bits
    a_skipped_step_leaves_masters_as_they_are = skipped
    integers_have_none = integers
    masters_stay_finite = finite
}

fn state_bits<O: WithMasters>(optimizer: &O) -> Vec<(String, Vec<u64>)> {
    let mut all: Vec<_> = optimizer
        .tensors()
        .into_iter()
        .map(|(n, t)| (n, bits(&t)))
        .collect();
    all.sort();
    all
}

fn variable_is_master<O: WithMasters>() {
    for masters in HALVES {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let all = vars(dtype);
            let mut optimizer = O::make(all.clone(), 1e-2, masters, 5).unwrap();
            let _ = optimizer.apply_gradients(&grads(&all, 0, 1.)).unwrap();
            let state = optimizer.tensors();
            for (name, var) in &all {
                let master = state.get(&format!("{name}.master_param"));
                // f64 variables and those of the masters' own dtype have no copy.
                let copied = dtype != DType::F64 && dtype != masters.dtype();
                assert_eq!(master.is_some(), copied, "{dtype:?} {masters:?}");
                if let Some(master) = master {
                    assert_eq!(master.dtype(), masters.dtype());
                    assert_eq!(bits(&master.to_dtype(dtype).unwrap()), bits(var));
                }
            }
        }
    }
}

/// One step takes 1 a quarter of the way to the next f16 value below: a quarter of the elements is rounded down, different ones for
/// different seeds and steps.
#[test]
fn the_mean_is_the_exact_result() {
    const N: usize = 1 << 18;
    // Below 1 the gap of f16 is 2^-11, of bf16 2^-8.
    for (masters, gap) in [
        (MasterDType::F16, 2f64.powi(-11)),
        (MasterDType::Bf16, 2f64.powi(-8)),
    ] {
        // As an f32 variable with a copy, and as its own master.
        for dtype in [DType::F32, masters.dtype()] {
            let run = |seed, before: u64| {
                let start = Tensor::ones(N, dtype, &device()).unwrap();
                let var = Var::from_tensor(&start).unwrap();
                let named = vec![("v".to_string(), var.clone())];
                let config = SgdConfig::default().with_masters(masters).with_seed(seed);
                let mut optimizer =
                    Sgd::from_named(named.clone(), config.with_lr(gap / 4.)).unwrap();
                for step in 0..=before {
                    let mut store = grads(&named, 0, 0.);
                    let grad = if step == before {
                        start.copy()
                    } else {
                        start.zeros_like()
                    };
                    store.insert(&var, grad.unwrap());
                    let _ = optimizer.apply(&store).unwrap();
                }
                flat64(&var)
            };
            let first = run(1, 0);
            let down = first.iter().filter(|x| **x == 1. - gap).count();
            let stayed = first.iter().filter(|x| **x == 1.).count();
            assert_eq!(down + stayed, N);
            let (share, error) = (down as f64 / N as f64, (0.1875 / N as f64).sqrt());
            assert!(
                (share - 0.25).abs() <= 4. * error,
                "{masters:?} {dtype:?}: {share}"
            );
            assert_eq!(first, run(1, 0));
            assert_ne!(first, run(2, 0), "another seed");
            assert_ne!(first, run(1, 1), "another step");
        }
    }
}

fn same_bits<O: WithMasters>() {
    for masters in HALVES {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let run = |threads: usize, resume: bool| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                pool.build().unwrap().install(|| {
                    let all = vars(dtype);
                    let make = || O::make(all.clone(), 1e-3, masters, 5).unwrap();
                    let mut optimizer = make();
                    for step in 0..4 {
                        if resume && step == 2 {
                            let saved = optimizer.optimizer_state().unwrap();
                            optimizer = make();
                            optimizer.load_optimizer_state(&saved).unwrap();
                        }
                        let _ = optimizer.apply_gradients(&grads(&all, step, 1.)).unwrap();
                    }
                    (all_bits(&all), state_bits(&optimizer))
                })
            };
            let one = run(1, false);
            assert!(one == run(2, false), "{dtype:?} {masters:?}: threads");
            assert!(one == run(2, true), "{dtype:?} {masters:?}: resume");
        }
    }
}

fn skipped<O: WithMasters>() {
    for masters in [MasterDType::F32, MasterDType::Bf16, MasterDType::F16] {
        for dtype in [DType::F32, DType::BF16] {
            let all = vars(dtype);
            let mut optimizer = O::make(all.clone(), 1e-3, masters, 5).unwrap();
            let _ = optimizer.apply_gradients(&grads(&all, 0, 1.)).unwrap();
            let before = (all_bits(&all), state_bits(&optimizer));
            let mut bad = grads(&all, 1, 1.);
            let nan = Tensor::new(f32::NAN, &device())
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            bad.insert(&all[2].1, nan);
            assert!(optimizer.apply_gradients(&bad).unwrap().skipped().unwrap());
            assert!(
                before == (all_bits(&all), state_bits(&optimizer)),
                "{dtype:?} {masters:?}"
            );
        }
    }
}

fn integers<O: WithMasters>() {
    let mut all = vars(DType::F32);
    let codes = Tensor::zeros(3, DType::U8, &device()).unwrap();
    all.push(("codes".into(), Var::from_tensor(&codes).unwrap()));
    let error = O::make(all, 1e-3, MasterDType::F16, 0).err().unwrap();
    assert!(
        matches!(&error, OptimError::MasterOfInteger { name, dtype: DType::U8 } if name == "codes")
    );
    assert!(error.to_string().contains("`codes`"), "{error}");
}

/// The largest f16 is 65504: a larger variable is rejected, and a step beyond it stops there.
fn finite<O: WithMasters>() {
    let named = |values: &[f32]| {
        let values = Tensor::new(values, &device()).unwrap();
        vec![(
            "bn.running_var".to_string(),
            Var::from_tensor(&values).unwrap(),
        )]
    };
    // 65519 is still rounded to 65504.
    let make = |values: &[f32]| O::make(named(values), 1., MasterDType::F16, 3);
    assert!(make(&[1., 65519., -65519.]).is_ok());
    let error = make(&[1., 1e5]).err().unwrap();
    assert!(
        matches!(&error, OptimError::MasterOverflow { name, index: 1, value: 1e5, .. } if name == "bn.running_var"),
        "{error}"
    );
    assert!(error.to_string().contains("1e5"), "{error}");
    assert!(O::make(named(&[1e5]), 1., MasterDType::Bf16, 3).is_ok());
    // Values that are not finite themselves are accepted.
    assert!(make(&[f32::INFINITY]).is_ok());

    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let start = Tensor::new(&[65000f32, -65000.], &device()).unwrap();
        let var = Var::from_tensor(&start.to_dtype(dtype).unwrap()).unwrap();
        let named = vec![("w".to_string(), var.clone())];
        let mut optimizer = O::make(named.clone(), 4000., MasterDType::F16, 3).unwrap();
        let mut store = grads(&named, 0, 0.);
        let grad = Tensor::new(&[-1f32, 1.], &device()).unwrap();
        store.insert(&var, grad.to_dtype(dtype).unwrap());
        let _ = optimizer.apply_gradients(&store).unwrap();
        let master = optimizer.tensors().remove("w.master_param");
        let master = master.unwrap_or(var.as_tensor().clone());
        assert_eq!(flat64(&master), [65504., -65504.], "{dtype:?}");
        let state = optimizer.optimizer_state().unwrap();
        optimizer.load_optimizer_state(&state).unwrap();
    }
}

/// A value written to the variable replaces the master, and masters of another dtype do not load.
#[test]
fn written_to_and_loaded() {
    let all = vars(DType::F32);
    let mut optimizer = AdamW::make(all.clone(), 1e-3, MasterDType::F16, 1).unwrap();
    let _ = optimizer.apply(&grads(&all, 0, 1.)).unwrap();
    let state = optimizer.state().unwrap();
    let big = &all[3].1;
    big.set(&Tensor::full(7f32, 40_000, &device()).unwrap())
        .unwrap();
    let _ = optimizer.apply(&grads(&all, 1, 1.)).unwrap();
    assert!(flat64(big).iter().all(|x| (x - 7.).abs() < 0.02));

    let mut other = AdamW::make(copies(&all), 1e-3, MasterDType::Bf16, 1).unwrap();
    let error = other.load_state(&state).unwrap_err();
    assert!(
        matches!(
            &error,
            OptimError::StateDtype {
                expected: DType::BF16,
                got: DType::F16,
                ..
            }
        ),
        "{error}"
    );
    // After a change to f16 masters they fit.
    other.set_config(optimizer.config().clone()).unwrap();
    other.load_state(&state).unwrap();
}
