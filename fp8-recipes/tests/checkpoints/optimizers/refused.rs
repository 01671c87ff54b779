//! Refused: the state of another optimizer, and invalid hyperparameters.

use super::*;

#[test]
fn the_state_of_another_optimizer_is_refused_and_nothing_changes() -> Outcome {
    fn refused<O: ResumableOptimizer>(path: &Path, mut run: Run<O>, expected: &str, got: &str) {
        let before = run.bits();
        let error = run.resume(path).unwrap_err();
        match &error {
            Error::Optim(OptimError::StateKind {
                expected: e,
                got: g,
            }) => assert_eq!((e.as_str(), g.as_str()), (expected, got)),
            other => panic!("{expected} from {got}: {other:?}"),
        }
        assert!(error.to_string().contains(got), "{error}");
        assert_eq!(run.bits(), before);
    }
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    Run::new(1, ours(0.1)).save(&path("fp8.AdamW"));
    Run::new(1, candles_adamw(0.1)).save(&path("candle_nn.AdamW"));
    Run::new(1, sgd(0.1)).save(&path("candle_nn.SGD"));
    Run::new(1, Momentum::new).save(&path(KIND));
    Run::new(1, |_: &VarMap| NoOptimizer).save(&path("none"));
    let kinds = [
        "fp8.AdamW",
        "candle_nn.AdamW",
        "candle_nn.SGD",
        KIND,
        "none",
    ];
    for got in kinds {
        for expected in kinds.into_iter().filter(|kind| *kind != got) {
            let path = path(got);
            match expected {
                "fp8.AdamW" => refused(&path, Run::new(2, ours(0.2)), expected, got),
                "candle_nn.AdamW" => refused(&path, Run::new(2, candles_adamw(0.2)), expected, got),
                "candle_nn.SGD" => refused(&path, Run::new(2, sgd(0.2)), expected, got),
                "none" => refused(&path, Run::new(2, |_: &VarMap| NoOptimizer), expected, got),
                _ => refused(&path, Run::new(2, Momentum::new), expected, got),
            }
        }
    }
    let mut run = Run::new(2, |_: &VarMap| NoOptimizer);
    assert_eq!(run.resume(&path("none"))?, meta(3));
    Ok(())
}

#[test]
fn invalid_hyperparameters_are_refused_and_nothing_changes() -> Outcome {
    let mut optimizer = Run::new(1, ours(0.1)).optimizer;
    let good = optimizer.optimizer_state()?;
    let config = good.hyperparameters_json()["config"].clone();
    let changed = |key: &str, value: Value| {
        let mut config = config.clone();
        config[key] = value;
        json!({ "config": config, "no_decay": [] })
    };
    for (case, value) in [
        ("no object", json!(3)),
        ("nothing in it", json!({})),
        ("another key", changed("momentum", json!(0.9))),
        ("a text", changed("lr", json!("fast"))),
        ("negative", changed("lr", json!(-1.))),
        ("one", changed("beta1", json!(1.))),
        (
            "an unknown variable",
            json!({ "config": config, "no_decay": ["fc.other"] }),
        ),
    ] {
        let state = good.clone().with_hyperparameters(value)?;
        let error = optimizer.load_optimizer_state(&state).unwrap_err();
        let fits = match case {
            "negative" | "one" => matches!(error, OptimError::InvalidHyperparameter { .. }),
            "an unknown variable" => matches!(error, OptimError::UnexpectedState { .. }),
            _ => matches!(error, OptimError::StateHyperparameters { .. }),
        };
        assert!(fits, "{case}: {error:?}");
        let now = optimizer.optimizer_state()?;
        assert_eq!(now.hyperparameters_json(), good.hyperparameters_json());
    }
    let mut candles = Run::new(1, candles_adamw(0.1)).optimizer;
    let good = candles.optimizer_state()?;
    for value in [
        json!(1),
        json!({"lr": 1e-3}),
        json!([0.1, 0.9, 0.9, 1., -2.]),
    ] {
        let state = good.clone().with_hyperparameters(value)?;
        candles.load_optimizer_state(&state).unwrap_err();
    }
    // An invalid learning rate cannot be saved.
    candles.set_learning_rate(f64::NAN);
    candles.optimizer_state().unwrap_err();
    let mut candles = Run::new(1, sgd(0.1)).optimizer;
    let state = candles.optimizer_state()?.with_hyperparameters(-1.)?;
    candles.load_optimizer_state(&state).unwrap_err();
    assert_eq!(candles.learning_rate(), 0.1);
    // Without any, an optimizer keeps its own.
    let state = candles.optimizer_state()?.with_hyperparameters(())?;
    candles.load_optimizer_state(&state)?;
    assert_eq!(candles.learning_rate(), 0.1);
    Ok(())
}
