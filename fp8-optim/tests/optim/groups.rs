//! Parameter groups.

use crate::helpers::*;
use candle_core::{DType, Var};
use fp8_optim::*;
use serde_json::Value;

fn group(pattern: &str) -> ParamGroup {
    ParamGroup::new(pattern).unwrap()
}

/// `w` in the first group, `bias` in both, `big` and `one` in none.
fn groups() -> Vec<ParamGroup> {
    vec![
        group("[wb][!e]*").with_lr(0.5),
        group("w").with_lr_factor(0.5).with_weight_decay(0.25),
        group("bia?").with_weight_decay(0.),
    ]
}

/// An optimizer for each variable alone, with the hyperparameters of its group: the same bits.
fn as_if_alone<O: NamedOptimizer>(
    make: impl Fn(Vec<(String, Var)>, f64, f64) -> O,
    with_groups: impl Fn(O) -> O,
) {
    let (lr, decay) = (0.25, 0.125);
    let together = vars(DType::F32);
    let mut optimizer = with_groups(make(together.clone(), lr, decay));
    let apart = copies(&together);
    let mut alone: Vec<O> = (apart.iter())
        .map(|(name, var)| {
            let (lr, decay) = match name.as_str() {
                "w" => (lr * 0.5, 0.25),
                "bias" => (lr, 0.),
                "big" => (0.5, decay),
                _ => (lr, decay),
            };
            make(vec![(name.clone(), var.clone())], lr, decay)
        })
        .collect();
    for step in 0..3 {
        let _ = optimizer
            .apply_gradients(&grads(&together, step, 1.))
            .unwrap();
        let grads = grads(&apart, step, 1.);
        for alone in &mut alone {
            let _ = alone.apply_gradients(&grads).unwrap();
        }
    }
    assert_eq!(all_bits(&together), all_bits(&apart));
}

#[test]
fn a_group_has_its_own_rates() {
    // "bias" is in two groups, of which the last counts: it has the optimizer's learning rate.
    as_if_alone(
        |vars, lr, weight_decay| {
            let config = AdamWConfig {
                lr,
                weight_decay,
                ..AdamWConfig::default()
            };
            AdamW::from_named(vars, config).unwrap()
        },
        |optimizer| optimizer.with_groups(groups()).unwrap(),
    );
    as_if_alone(
        |vars, lr, decay| {
            let config = SgdConfig::default().with_lr(lr).with_weight_decay(decay);
            Sgd::from_named(vars, config.with_momentum(0.5)).unwrap()
        },
        |optimizer| optimizer.with_groups(groups()).unwrap(),
    );
}

/// The weight decay of a group applies to variables that the scope excludes.
#[test]
fn a_groups_decay_overrides_the_scope() {
    let all = vars(DType::F32);
    let config = SgdConfig::default().with_lr(1.).with_weight_decay(0.5);
    let config = config.with_decay_scope(DecayScope::Matrices);
    let optimizer = Sgd::from_named(all.clone(), config).unwrap();
    let groups = vec![group("bias").with_weight_decay(0.5)];
    let mut optimizer = optimizer.with_groups(groups).unwrap();
    let before: Vec<_> = all.iter().map(|(_, var)| flat64(var)).collect();
    let _ = optimizer.apply(&grads(&all, 0, 0.)).unwrap();
    for ((name, var), before) in all.iter().zip(before) {
        let factor = if matches!(name.as_str(), "w" | "bias") {
            0.5
        } else {
            1.
        };
        let expected: Vec<f64> = before.into_iter().map(|x| x * factor).collect();
        assert_eq!(flat64(var), expected, "{name}");
    }
}

#[test]
fn a_pattern_without_a_variable_is_refused() {
    let make = || AdamW::from_named(vars(DType::F32), AdamWConfig::default()).unwrap();
    let error = make()
        .with_groups(vec![group("w"), group("bais")])
        .unwrap_err();
    let OptimError::NoSuchVariable { pattern, near } = &error else {
        panic!("{error}")
    };
    assert_eq!(
        (pattern.as_str(), near.as_slice()),
        ("bais", &["bias".to_string()][..])
    );
    assert_eq!(
        error.to_string(),
        "`bais` names no variable; did you mean bias?"
    );
    let malformed = ParamGroup::new("[w").unwrap_err();
    assert!(
        matches!(&malformed, OptimError::Pattern(error) if error.pattern == "[w"),
        "{malformed:?}"
    );
    for (text, group) in [
        ("lr_factor = inf", group("w").with_lr_factor(f64::INFINITY)),
        ("lr = -1", group("w").with_lr(-1.)),
        ("weight_decay = NaN", group("w").with_weight_decay(f64::NAN)),
    ] {
        let error = make().with_groups(vec![group]).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
}

fn comes_back<O: ResumableOptimizer>(
    make: impl Fn(Vec<ParamGroup>) -> O,
    of: impl Fn(&O) -> Vec<ParamGroup>,
) {
    let state = make(groups()).optimizer_state().unwrap();
    // The values come from the checkpoint; the patterns are the same.
    let patterns = || {
        groups()
            .iter()
            .map(|g| group(g.pattern().as_str()))
            .collect()
    };
    let mut other = make(patterns());
    other.load_optimizer_state(&state).unwrap();
    assert_eq!(of(&other), groups());

    let mut none = make(vec![]);
    let error = none.load_optimizer_state(&state).unwrap_err();
    assert!(
        matches!(&error, OptimError::StateGroups { expected, got } if expected.is_empty() && got.len() == 3)
    );
    assert!(error.to_string().contains("bia?"), "{error}");
    // Its own hyperparameters, its own groups.
    let kept = state.with_hyperparameters(Value::Null).unwrap();
    none.load_optimizer_state(&kept).unwrap();
    assert!(of(&none).is_empty());

    // A state without groups does not fit an optimizer with groups.
    let plain = make(vec![]).optimizer_state().unwrap();
    let error = other.load_optimizer_state(&plain).unwrap_err();
    assert!(matches!(error, OptimError::StateGroups { .. }), "{error}");
    assert_eq!(of(&other), groups());
}

#[test]
fn groups_are_saved_and_checked() {
    let all = vars(DType::F32);
    comes_back(
        |groups| {
            let optimizer = AdamW::from_named(all.clone(), AdamWConfig::default()).unwrap();
            optimizer.with_groups(groups).unwrap()
        },
        |optimizer| optimizer.groups().to_vec(),
    );
    comes_back(
        |groups| {
            let optimizer = Sgd::from_named(all.clone(), SgdConfig::default()).unwrap();
            optimizer.with_groups(groups).unwrap()
        },
        |optimizer| optimizer.groups().to_vec(),
    );
}
