//! A checkpoint that does not fit is refused and changes nothing.

use crate::run::*;
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use fp8::atomic::write_safetensors_atomic;
use fp8::checkpoint::{save_training, training_meta};
use fp8::config::{LayerFilter, Recipe};
use fp8::load::Checkpoint;
use fp8::optim::OptimError;
use fp8::{Error, FilesError, nn, prepare_fp8};
use fp8_test_support::{assert_text, delayed, device, tensor};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

/// Fails unless resuming is refused with these parts in the message and changes nothing.
#[track_caller]
fn assert_refused(case: &str, run: &mut Run, path: &Path, parts: &[&str]) -> Error {
    let before = run.everything();
    let step = run.step;
    let error = run.resume(path).expect_err(case);
    assert_text(case, &error, parts);
    assert!(run.everything() == before, "{case}: something was changed");
    assert_eq!(run.step, step);
    error
}

/// A delayed run after two steps, saved.
fn saved(dir: &tempfile::TempDir) -> Run {
    let mut run = Run::new(1, Some(delayed(4).into()), Style::Plain);
    run.train();
    run.train();
    run.save(&file(dir));
    run
}

#[test]
fn a_checkpoint_of_another_recipe_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    saved(&dir);
    let mut here: Vec<(Option<Recipe>, &str)> = vec![
        (None, "none (high precision)"),
        (Some(delayed(8).into()), "delayed(amax_history_len=8)"),
        (Some(delayed(4).with_margin(1).into()), "margin=1"),
    ];
    let names = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"];
    here.extend(names.map(|name| (Some(name.parse().unwrap()), name)));
    for (recipe, text) in here {
        let mut run = Run::new(2, recipe, Style::Plain);
        run.train();
        let parts = [
            "cannot be resumed",
            "the recipe",
            "delayed(amax_history_len=4) there",
            text,
            "here",
        ];
        let error = assert_refused(text, &mut run, &file(&dir), &parts);
        assert!(
            matches!(
                &error,
                Error::TrainingCheckpoint(fp8::TrainingCheckpointError::Mismatch { .. })
            ),
            "{text}: {error:?}"
        );
    }
    let path = dir.path().join("f32.safetensors");
    let mut plain = Run::new(1, None, Style::Plain);
    plain.train();
    plain.save(&path);
    let mut run = Run::new(2, Some(delayed(4).into()), Style::Plain);
    let parts = [
        "none (high precision) there",
        "delayed(amax_history_len=4) here",
    ];
    assert_refused("f32 file", &mut run, &path, &parts);
}

/// A copy of the saved file in which `edit` has changed some tensors.
fn edited(dir: &tempfile::TempDir, edit: impl FnOnce(&mut BTreeMap<String, Tensor>)) -> PathBuf {
    let stored = Checkpoint::open(&[file(dir)]).unwrap();
    let mut tensors: BTreeMap<String, Tensor> = stored
        .names()
        .into_iter()
        .map(|name| (name.to_string(), stored.tensor(name, &device()).unwrap()))
        .collect();
    edit(&mut tensors);
    let metadata: HashMap<String, String> = ["fp8_training", "fp8_state"]
        .into_iter()
        .map(|key| (key.to_string(), stored.metadata(key).unwrap().to_string()))
        .collect();
    let path = dir.path().join("edited.safetensors");
    write_safetensors_atomic(&path, &tensors, Some(&metadata)).unwrap();
    path
}

#[test]
fn a_checkpoint_of_another_model_is_refused_and_names_the_tensor() {
    let dir = tempfile::tempdir().unwrap();
    saved(&dir);
    type Edit = fn(&mut BTreeMap<String, Tensor>);
    let cases: [(&str, Edit, &[&str]); 13] = [
        (
            "a missing variable",
            |t| drop(t.remove("up.bias")),
            &["`up.bias`", "missing there", "f32 [20] here"],
        ),
        (
            "an extra variable",
            |t| drop(t.insert("up.extra".into(), tensor(1, &[3]))),
            &["`up.extra`", "f32 [3] there", "missing here"],
        ),
        (
            "another shape",
            |t| drop(t.insert("up.weight".into(), tensor(1, &[20, 13]))),
            &["`up.weight`", "f32 [20, 13] there", "f32 [20, 12] here"],
        ),
        (
            "another dtype",
            |t| {
                drop(t.insert(
                    "up.weight".into(),
                    tensor(1, &[20, 12]).to_dtype(DType::BF16).unwrap(),
                ))
            },
            &["`up.weight`", "bf16 [20, 12] there"],
        ),
        (
            "missing scales",
            |t| drop(t.remove("fp8/quant_scale")),
            &["`fp8/quant_scale`", "missing there"],
        ),
        (
            "missing histories",
            |t| drop(t.remove("fp8/amax_history")),
            &["`fp8/amax_history`", "missing there"],
        ),
        (
            "a column that is not here",
            |t| drop(t.insert("fp8/side".into(), tensor(1, &[1]))),
            &["`fp8/side`", "missing here"],
        ),
        (
            "a scale too many",
            |t| drop(t.insert("fp8/quant_scale".into(), tensor(1, &[7]))),
            &["`fp8/quant_scale`", "f32 [7] there", "f32 [6] here"],
        ),
        (
            "histories of one dimension",
            |t| drop(t.insert("fp8/amax_history".into(), tensor(1, &[24]))),
            &["`fp8/amax_history`", "f32 [24] there"],
        ),
        (
            "kept scales of another shape",
            |t| drop(t.insert("fp8/kept_quant_scale".into(), tensor(1, &[2]))),
            &["`fp8/kept_quant_scale`", "f32 [2] there", "f32 [6] here"],
        ),
        (
            "a missing moment",
            |t| drop(t.remove("optimizer/up.weight.exp_avg")),
            &["up.weight.exp_avg"],
        ),
        (
            "a moment too many",
            |t| drop(t.insert("optimizer/side.exp_avg".into(), tensor(1, &[3]))),
            &["side.exp_avg"],
        ),
        (
            "a moment of another shape",
            |t| drop(t.insert("optimizer/up.bias.exp_avg_sq".into(), tensor(1, &[21]))),
            &["up.bias.exp_avg_sq", "[20]", "[21]"],
        ),
    ];
    for (case, edit, parts) in cases {
        let path = edited(&dir, edit);
        let mut run = Run::new(2, Some(delayed(4).into()), Style::Plain);
        run.train();
        let error = assert_refused(case, &mut run, &path, parts);
        match case.contains("moment") {
            true => assert!(matches!(&error, Error::Optim(_)), "{case}: {error:?}"),
            false => assert!(
                matches!(
                    &error,
                    Error::TrainingCheckpoint(fp8::TrainingCheckpointError::Mismatch { .. })
                ),
                "{case}: {error:?}"
            ),
        }
    }
    // An unchanged copy resumes.
    let path = edited(&dir, |_| ());
    Run::new(2, Some(delayed(4).into()), Style::Plain)
        .resume(&path)
        .unwrap();
}

#[test]
fn a_model_prepared_or_optimized_differently_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    saved(&dir);
    let recipe: Recipe = delayed(4).into();
    // One more layer.
    let mut run = Run::new(2, Some(recipe.clone()), Style::Plain);
    nn::linear(
        3,
        3,
        VarBuilder::from_varmap(&run.vars, DType::F32, &device()).pp("side"),
    )
    .unwrap();
    assert_refused(
        "one layer more",
        &mut run,
        &file(&dir),
        &["`side.bias`", "missing there"],
    );
    // One prepared layer fewer.
    let mut run = Run::new(2, Some(recipe.clone()), Style::Plain);
    prepare_fp8(&run.mlp, &LayerFilter::new().skip_paths(["down"]).into()).unwrap();
    let parts = ["`down.grad_output`", "missing here"];
    assert_refused("one layer less prepared", &mut run, &file(&dir), &parts);
    // No prepared layer.
    let mut run = Run::new(2, None, Style::Plain);
    run.recipe = Some(recipe.clone());
    assert_refused(
        "nothing prepared",
        &mut run,
        &file(&dir),
        &["`down.grad_output`"],
    );
    // Fewer variables in the optimizer.
    let mut run = Run::new(2, Some(recipe), Style::Frozen);
    let error = assert_refused(
        "fewer in the optimizer",
        &mut run,
        &file(&dir),
        &["up.weight.exp_avg"],
    );
    assert!(
        matches!(&error, Error::Optim(OptimError::UnexpectedState { .. })),
        "{error:?}"
    );
}

#[test]
fn files_that_are_not_checkpoints_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let saved = saved(&dir);
    let bytes = fs::read(file(&dir)).unwrap();
    let mut run = Run::new(2, Some(delayed(4).into()), Style::Plain);
    run.train();

    let path = dir.path().join("weights.safetensors");
    saved.vars.save(&path).unwrap();
    let parts = ["weights.safetensors", "not a training checkpoint"];
    let error = assert_refused("weights only", &mut run, &path, &parts);
    assert!(
        matches!(&error, Error::Files(FilesError::Json { .. })),
        "{error:?}"
    );
    assert_text("training_meta", training_meta(&path).unwrap_err(), &parts);

    for (case, content) in [
        ("truncated", &bytes[..bytes.len() - 1]),
        ("half", &bytes[..bytes.len() / 2]),
        ("a byte more", &[&bytes[..], b"x"].concat()),
        ("empty", &[]),
        ("text", b"step: 5, loss: 1.25, all is well"),
    ] {
        let path = dir.path().join("bad.safetensors");
        fs::write(&path, content).unwrap();
        let error = assert_refused(case, &mut run, &path, &["bad.safetensors"]);
        assert!(
            matches!(&error, Error::Files(FilesError::NotSafetensors { .. })),
            "{case}: {error:?}"
        );
    }
    let absent = dir.path().join("absent.safetensors");
    let error = assert_refused(
        "absent",
        &mut run,
        &absent,
        &["cannot read", "absent.safetensors"],
    );
    assert!(
        matches!(&error, Error::Files(FilesError::Read { .. })),
        "{error:?}"
    );

    for (case, meta, part) in [
        ("no JSON", "{".to_string(), "EOF"),
        (
            "no step",
            r#"{"recipe": null, "random": 1, "extra": 1}"#.into(),
            "step",
        ),
        (
            "another field",
            r#"{"step": 1, "recipe": null, "random": 1, "extra": 1, "b": 1}"#.into(),
            "`b`",
        ),
        (
            "no recipe of that name",
            r#"{"step": 1, "recipe": "fast", "random": 1, "extra": 1}"#.into(),
            "fast",
        ),
    ] {
        let path = dir.path().join("meta.safetensors");
        let metadata = HashMap::from([("fp8_training".to_string(), meta)]);
        write_safetensors_atomic(&path, &BTreeMap::new(), Some(&metadata)).unwrap();
        let error = assert_refused(case, &mut run, &path, &["the training metadata", part]);
        assert!(
            matches!(&error, Error::Files(FilesError::Json { .. })),
            "{case}: {error:?}"
        );
    }
    // After all these the run still resumes.
    run.resume(&file(&dir)).unwrap();
    assert_everything("resumed after all", &run, &saved);
}

#[test]
fn two_states_under_one_name_are_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::new(1, Some(delayed(4).into()), Style::Plain);
    let vb = VarBuilder::from_varmap(&run.vars, DType::F32, &device());
    // A variable with the name under which a layer's state is saved.
    vb.get(1, "fp8/quant_scale").unwrap();
    let error =
        save_training(file(&dir), &run.mlp, &run.vars, &run.optimizer, &run.meta()).unwrap_err();
    assert_text("one name", &error, &["`fp8/quant_scale`"]);
    assert!(
        matches!(&error, Error::Files(FilesError::NameClash { .. })),
        "{error:?}"
    );
    assert!(!file(&dir).exists(), "nothing is written");
}
