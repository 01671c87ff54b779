//! Master weights.

use crate::helpers::*;
use candle_core::{DType, Device, Tensor, Var};
use fp8_optim::*;
use fp8_test_support::device;

/// Without a master copy, updates below half a unit in the last place are lost in bf16 and f16; with one they add up.
#[test]
fn master_weights_keep_what_rounding_drops() {
    for dtype in [DType::BF16, DType::F16] {
        let start = Tensor::ones(1000, dtype, &device()).unwrap();
        let run = |dtype: DType, master_weights| {
            let var = Var::from_tensor(&start.to_dtype(dtype).unwrap().copy().unwrap()).unwrap();
            let config = AdamWConfig {
                lr: 1e-4,
                weight_decay: 0.0,
                master_weights,
                ..AdamWConfig::default()
            };
            let named = vec![("v".to_string(), var.clone())];
            let mut optimizer = AdamW::from_named(named.clone(), config).unwrap();
            for _ in 0..100 {
                let mut step = grads(&named, 0, 0.0);
                step.insert(&var, Tensor::ones(1000, dtype, &device()).unwrap());
                let _ = optimizer.apply(&step).unwrap();
            }
            (var, optimizer.state().unwrap())
        };
        let (lost, state) = run(dtype, false);
        assert_eq!(bits(&lost), bits(&start), "{dtype:?}");
        assert!(!state.contains_key("v.master_param"));
        let (kept, state) = run(dtype, true);
        let (wide, wide_state) = run(DType::F32, true);
        assert!(!wide_state.contains_key("v.master_param"));
        // The copy is what an f32 variable would be, and the variable is the copy rounded.
        let master = &state["v.master_param"];
        assert_eq!(master.dtype(), DType::F32);
        assert_eq!(bits(master), bits(&wide));
        assert_eq!(bits(&master.to_dtype(dtype).unwrap()), bits(&kept));
        assert!((flat64(&kept)[0] - 0.99).abs() < 0.004);
    }
}

#[test]
fn master_weights_resume_follow_their_variables_and_can_be_turned_on_and_off() {
    for dtype in [DType::BF16, DType::F16] {
        let config = AdamWConfig {
            max_grad_norm: Some(1.0),
            master_weights: true,
            ..AdamWConfig::default()
        };
        let straight = vars(dtype);
        let mut optimizer = AdamW::from_named(straight.clone(), config.clone()).unwrap();
        for step in 0..4 {
            let _ = optimizer.apply(&grads(&straight, step, 1.0)).unwrap();
        }
        let saved = optimizer.state().unwrap();
        let resumed = copies(&straight);
        for step in 4..7 {
            let _ = optimizer.apply(&grads(&straight, step, 1.0)).unwrap();
        }
        let mut other = AdamW::from_named(resumed.clone(), config.clone()).unwrap();
        other.load_state(&saved).unwrap();
        for step in 4..7 {
            let _ = other.apply(&grads(&resumed, step, 1.0)).unwrap();
        }
        assert_eq!(all_bits(&straight), all_bits(&resumed));
        assert_eq!(state_bits(&optimizer), state_bits(&other));

        // A state with copies does not fit an optimizer without them, and vice versa.
        let plain = AdamWConfig {
            master_weights: false,
            ..config.clone()
        };
        let mut without = AdamW::from_named(copies(&straight), plain.clone()).unwrap();
        let error = without.load_state(&saved).unwrap_err();
        assert!(
            matches!(&error, OptimError::UnexpectedState { name } if name.ends_with(".master_param"))
        );
        let error = other.load_state(&without.state().unwrap()).unwrap_err();
        assert!(
            matches!(&error, OptimError::MissingState { name } if name == "bias.master_param"),
            "{error}"
        );

        // Elements of a variable that were written to are used, and the others keep their copy.
        let big = &straight[3].1;
        let half = big.narrow(0, 0, 20_000).unwrap().copy().unwrap();
        let ones = Tensor::ones(20_000, dtype, &device()).unwrap();
        big.set(&Tensor::cat(&[&ones, &half], 0).unwrap()).unwrap();
        let _ = optimizer.apply(&grads(&straight, 7, 0.0)).unwrap();
        let state = optimizer.state().unwrap();
        let master = flat64(&state["big.master_param"]);
        assert!(master[..20_000].iter().all(|x| (x - 1.0).abs() < 0.01));
        assert!(master[..20_000].iter().any(|x| *x != 1.0));

        // Turned off, the copies are dropped; turned on again, they are taken from the variables.
        other.set_config(plain).unwrap();
        assert!(!other.state().unwrap().contains_key("w.master_param"));
        other.set_config(config).unwrap();
        assert_eq!(
            bits(&other.state().unwrap()["w.master_param"]),
            bits(&resumed[0].1)
        );
    }
}

#[test]
fn optimizers_of_parts_refuse_them() {
    let group = fp8_ranks::ProcessGroup::single();
    let map = fp8_ranks::ShardedVarMap::new(&group, &Device::Cpu);
    let init = candle_nn::Init::Const(1.);
    let vb = map.var_builder();
    vb.get_with_hints((4, 8), "w", init).unwrap();
    let w = map.get("w").unwrap();
    w.claim();
    let plain = AdamWConfig::default();
    let masters = AdamWConfig {
        lr: 0.5,
        master_weights: true,
        ..AdamWConfig::default()
    };
    let error = AdamW::from_sharded(&map, masters.clone()).err();
    assert!(
        matches!(error, Some(OptimError::ShardedMasters)),
        "{error:?}"
    );
    let sgd = SgdConfig::default().with_masters(MasterDType::F16);
    let error = Sgd::from_sharded(&map, sgd).err();
    assert!(
        matches!(error, Some(OptimError::ShardedMasters)),
        "{error:?}"
    );

    // Nor later: the optimizer stays as it is.
    let mut optimizer = AdamW::from_sharded(&map, plain.clone()).unwrap();
    let loss = w.value().unwrap().sqr().unwrap().sum_all().unwrap();
    let report = optimizer.apply(&loss.backward().unwrap()).unwrap();
    assert!(!report.skipped().unwrap());
    let before = state_bits(&optimizer);
    let error = optimizer.set_config(masters).err();
    assert!(
        matches!(error, Some(OptimError::ShardedMasters)),
        "{error:?}"
    );
    assert_eq!(optimizer.config(), &plain);
    assert_eq!(state_bits(&optimizer), before);
}
