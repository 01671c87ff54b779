//! `metrics.jsonl` and `loss.svg`: numbers that JSON does not have, and the figures of a run.

use crate::support::Outcome;
use fp8::training::{Line, Metrics, StepRecord, loss_svg};

/// Losses that are not finite, as they are written.
const NAMED: [(f64, &str); 3] = [
    (f64::NAN, "\"NaN\""),
    (f64::INFINITY, "\"Infinity\""),
    (f64::NEG_INFINITY, "\"-Infinity\""),
];

fn bits(curve: &[(u64, f64)]) -> Vec<(u64, u64)> {
    curve
        .iter()
        .map(|(step, loss)| (*step, loss.to_bits()))
        .collect()
}

#[test]
fn losses_that_are_not_finite_are_read_as_they_were_written() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut written = Metrics::open(dir.path(), |_| true)?;
    for (step, loss) in (1..).zip(NAMED.map(|named| named.0).into_iter().chain([2.5])) {
        written.push_step("run", &StepRecord::new(step, loss))?;
        written.push_validation("run", step, loss, None)?;
    }
    let text = std::fs::read_to_string(dir.path().join("metrics.jsonl"))?;
    assert_eq!(text.lines().count(), 2 * (NAMED.len() + 1));
    for (line, (_, name)) in text.lines().step_by(2).zip(NAMED) {
        assert!(line.contains(&format!("\"train_loss\":{name},")), "{line}");
    }
    // Reading writes the file again.
    for _ in 0..2 {
        let read = Metrics::open(dir.path(), |_| true)?;
        assert_eq!(
            bits(&read.train_curve("run")),
            bits(&written.train_curve("run"))
        );
        let curves = [&read, &written].map(|metrics| bits(&metrics.validation_curve("run")));
        assert_eq!(curves[0], curves[1]);
    }
    Ok(())
}

/// Earlier versions wrote null.
#[test]
fn a_loss_of_null_is_nan() -> Outcome {
    let line: Line = serde_json::from_str(
        r#"{"recipe":"run","step":3,"train_loss":null,"lr":null,"grad_norm":null,"step_ms":null}"#,
    )?;
    assert!(
        matches!(line, Line::Train { train_loss, .. } if train_loss.is_nan()),
        "{line:?}"
    );
    for text in ["\"nan\"", "[1]", "true"] {
        let line = format!(r#"{{"recipe":"run","step":3,"val_loss":{text}}}"#);
        let error = serde_json::from_str::<Line>(&line).unwrap_err().to_string();
        assert!(
            error.contains("neither a step") && error.contains("val_loss"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn steps_of_a_norm_that_is_not_known_are_not_skipped_steps() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("metrics.jsonl");
    // Earlier versions wrote null for a norm that was not finite.
    let old =
        r#"{"recipe":"run","step":1,"train_loss":2.0,"lr":null,"grad_norm":null,"step_ms":null}"#;
    std::fs::write(&path, format!("{old}\n"))?;
    let mut metrics = Metrics::open(dir.path(), |_| true)?;
    assert_eq!(metrics.skipped_steps("run"), 1);
    metrics.push_step("run", &StepRecord::new(2, 2.))?;
    metrics.push_step("other", &StepRecord::new(2, 2.))?;
    for (step, norm) in (3..).zip([0., 1.5, f64::NAN, f64::INFINITY]) {
        let mut record = StepRecord::new(step, 2.);
        record.grad_norm = Some(norm);
        metrics.push_step("run", &record)?;
    }
    // Reading writes the file again.
    let again = Metrics::open(dir.path(), |_| true)?;
    for metrics in [&metrics, &again] {
        assert_eq!(metrics.skipped_steps("run"), 3);
        assert_eq!(metrics.skipped_steps("other"), 0);
    }
    let text = std::fs::read_to_string(&path)?;
    let lines: Vec<serde_json::Value> = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let norms: Vec<_> = (lines.iter())
        .map(|line| line.get("grad_norm").cloned())
        .collect();
    let named = |name: &str| Some(serde_json::Value::from(name));
    let number = |norm: f64| Some(serde_json::Value::from(norm));
    let expected = [
        named("NaN"),
        None,
        None,
        number(0.),
        number(1.5),
        named("NaN"),
        named("Infinity"),
    ];
    assert_eq!(norms, expected);
    Ok(())
}

#[test]
fn losses_that_are_not_finite_are_gaps_in_the_drawing() -> Outcome {
    let drawing = |bad: Option<f64>| {
        let mut metrics = Metrics::in_memory();
        for (step, loss) in [(1, 3.), (2, 2.5)] {
            metrics.push_step("run", &StepRecord::new(step, loss))?;
            metrics.push_validation("run", step, loss, None)?;
        }
        if let Some(bad) = bad {
            metrics.push_step("run", &StepRecord::new(2, bad))?;
            metrics.push_validation("run", 2, bad, None)?;
        }
        loss_svg(&metrics, &["run"], "nats")
    };
    let plain = drawing(None)?;
    for (bad, name) in NAMED {
        assert!(drawing(Some(bad))? == plain, "{name}");
    }
    let mut metrics = Metrics::in_memory();
    metrics.push_step("run", &StepRecord::new(1, f64::NAN))?;
    let error = loss_svg(&metrics, &["run"], "nats")
        .unwrap_err()
        .to_string();
    assert!(error.contains("none is finite"), "{error}");
    Ok(())
}

/// The figures of a run's `summary.json`, while it grows beside another run to 12 steps with the losses 1, 4, 9, ..
#[test]
fn figures_are_those_of_known_losses_and_times() -> Outcome {
    let mut metrics = Metrics::in_memory();
    assert!(metrics.last_train_loss("run").is_nan());
    assert_eq!(metrics.mean_train_loss("run"), None);
    assert_eq!(metrics.median_step_ms("run"), 0.);
    assert_eq!(metrics.last_accuracy("run"), None);

    // After a step: the mean loss of the last ten, the one since the last validation, and the median of the times.
    let expected = [
        (1, 1., 1., 5.),
        (2, 2.5, 2.5, 10.), // the longer one of 5 and 10
        (3, 14. / 3., 14. / 3., 5.),
        (4, 7.5, 7.5, 8.),
        (8, 25.5, 43.5, 6.), // steps 5 to 8 since the validation after step 4
        (10, 38.5, 90.5, 6.),
        (11, 50.5, 302. / 3., 6.),
        (12, 64.5, 111.5, 6.), // without steps 1 and 2
    ];
    let times = [5., 10., 3., 8., 1., 6., 11., 4., 9., 2., 7., 0.];
    for (step, ms) in (1..).zip(times) {
        let mut record = StepRecord::new(step, (step * step) as f64);
        record.ms = ms;
        metrics.push_step("run", &record)?;
        (record.loss, record.ms) = (1000., 1000.);
        metrics.push_step("other", &record)?;
        for &(_, last, mean, median) in expected.iter().filter(|expected| expected.0 == step) {
            assert_eq!(metrics.last_train_loss("run"), last, "step {step}");
            assert_eq!(metrics.mean_train_loss("run"), Some(mean), "step {step}");
            assert_eq!(metrics.median_step_ms("run"), median, "step {step}");
        }
        let accuracy = match step {
            4 => Some(0.5),
            8 => Some(0.75),
            _ => continue,
        };
        metrics.push_validation("run", step, 1., accuracy)?;
        metrics.push_validation("other", step, 1., Some(0.25))?;
        assert_eq!(metrics.last_accuracy("run"), accuracy, "step {step}");
    }
    // A validation after the last step ends no stretch; one that counts nothing has no accuracy.
    metrics.push_validation("run", 12, 1., None)?;
    assert_eq!(metrics.mean_train_loss("run"), Some(111.5));
    assert_eq!(metrics.last_accuracy("run"), None);
    // A step whose time is not known has no part in the median.
    metrics.push_step("run", &StepRecord::new(13, 0.))?;
    assert_eq!(metrics.median_step_ms("run"), 6.);
    assert_eq!(metrics.mean_train_loss("run"), Some(0.));
    Ok(())
}
