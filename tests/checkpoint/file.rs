//! What a checkpoint stores and restores.

use crate::run::*;
use fp8::checkpoint::{TrainingMeta, resume_training, save_training, training_meta};
use fp8::load::Checkpoint;
use fp8_test_support::{delayed, device};
use serde_json::{Value, json};

#[test]
fn the_file_has_named_tensors_and_readable_metadata() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(1, Some(delayed(4).into()), Style::Plain);
    run.train();
    run.save(&file(&dir));
    let stored = Checkpoint::open(&[file(&dir)]).unwrap();
    let mut expected = vec!["optimizer/step".to_string()];
    for var in [
        "down.bias",
        "down.weight",
        "norm.bias",
        "norm.weight",
        "up.bias",
        "up.weight",
    ] {
        expected.push(var.to_string());
        expected.extend(["exp_avg", "exp_avg_sq"].map(|m| format!("optimizer/{var}.{m}")));
    }
    for (column, dims) in [
        ("quant_scale", &[6][..]),
        ("dequant_scale", &[6]),
        ("amax_history", &[6, 4]),
        ("calibrated_amax", &[6]),
        ("kept_quant_scale", &[6]),
        ("non_finite", &[6]),
    ] {
        let name = format!("fp8/{column}");
        let tensor = stored.tensor(&name, &device()).unwrap();
        assert_eq!(tensor.dims(), dims, "{name}");
        expected.push(name);
    }
    expected.sort();
    assert_eq!(stored.names(), expected);
    let meta: Value = serde_json::from_str(stored.metadata("fp8_training").unwrap()).unwrap();
    assert_eq!(meta["step"], 1);
    assert_eq!(meta["recipe"]["linear"]["delayed"]["amax_history_len"], 4);
    assert_eq!(training_meta(file(&dir)).unwrap(), run.meta());
    let rows: Value = serde_json::from_str(stored.metadata("fp8_state").unwrap()).unwrap();
    let names = rows["rows"].as_array().unwrap().iter();
    let names: Vec<&str> = names.map(|row| row["name"].as_str().unwrap()).collect();
    let expected = ["down.grad_output", "down.input", "down.weight"];
    assert_eq!(names[..3], expected);
    assert_eq!(rows["rows"][3]["format"], "e5m2");
}

#[test]
fn random_state_and_extra_values_come_back() {
    use rand::{Rng, SeedableRng, rngs::StdRng};
    let next = |seed: u64, drawn: u64| -> Vec<u64> {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..drawn + 4)
            .map(|_| rng.random())
            .skip(drawn as usize)
            .collect()
    };
    let dir = tempfile::tempdir().unwrap();
    let run = Run::new(1, None, Style::Plain);
    // Above 2^53, where a float would lose bits.
    let seed = (1u64 << 63) + 1;
    let meta = TrainingMeta {
        step: u64::MAX,
        recipe: None,
        random: json!({"seed": seed, "drawn": 17, "words": [u64::MAX, 0, 0.1]}),
        extra: json!({"data": "src/lib.rs", "nested": {"list": [null, true, "\u{1F980} \"quoted\""]}}),
    };
    save_training(file(&dir), &run.mlp, &run.vars, &run.optimizer, &meta).unwrap();
    for (place, got) in [
        ("training_meta", training_meta(file(&dir)).unwrap()),
        ("resume_training", {
            let mut run = Run::new(2, None, Style::Plain);
            resume_training(file(&dir), &run.mlp, &run.vars, &mut run.optimizer, None).unwrap()
        }),
    ] {
        assert_eq!(got, meta, "{place}");
        let state = |key: &str| got.random[key].as_u64().unwrap();
        assert_eq!(
            next(state("seed"), state("drawn")),
            next(seed, 17),
            "{place}: the next numbers"
        );
    }
}
