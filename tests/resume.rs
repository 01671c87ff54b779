//! Training checkpoints: a resumed run goes on bit for bit, and a checkpoint that does not fit changes nothing.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::recipes::atomic::write_safetensors_atomic;
use fp8::recipes::checkpoint::{
    TrainingMeta, fp8_state, resume_training, save_training, training_meta,
};
use fp8::recipes::config::{InitialScale, LayerFilter, Recipe};
use fp8::recipes::load::Checkpoint;
use fp8::recipes::optim::{AdamW, AdamWConfig, LrSchedule, OptimError};
use fp8::recipes::{Autocast, Error, fp8_autocast, nn, prepare_fp8};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

#[path = "common/recipes.rs"]
mod common;
use common::{Mlp, assert_text, bits, delayed, device, fill, prepare, tensor};

const STEPS: u64 = 12;
const SAVED_AT: u64 = 5;

/// How a run differs from the plainest one.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Style {
    Plain,
    /// Every step is followed by an evaluation.
    Validation,
    /// Two micro-batches per step under one guard.
    OneGuard,
    /// Two micro-batches per step under a guard each.
    GuardEach,
    /// The first layer's weight is a variable that the optimizer does not have.
    Frozen,
    /// A gradient that is not finite makes the optimizer skip the step before the checkpoint.
    Skipped,
    /// The learning rate falls to 0 before the checkpoint, so weights stay as they are.
    Standstill,
}

/// All that a training program holds.
struct Run {
    vars: VarMap,
    mlp: Mlp,
    optimizer: AdamW,
    recipe: Option<Recipe>,
    style: Style,
    step: u64,
}

impl Run {
    fn new(seed: u64, recipe: Option<Recipe>, style: Style) -> Self {
        let vars = VarMap::new();
        let mut mlp = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
        fill(&vars, seed);
        if recipe.is_some() {
            assert_eq!(prepare(&mut mlp).converted(), 2);
        }
        let config = AdamWConfig {
            weight_decay: 0.1,
            max_grad_norm: Some(1.),
            ..Default::default()
        };
        let mut named: Vec<_> = vars
            .data()
            .lock()
            .unwrap()
            .iter()
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect();
        if style == Style::Frozen {
            named.retain(|(name, _)| name != "up.weight");
        }
        let optimizer = AdamW::from_named(named, config).unwrap();
        Self {
            vars,
            mlp,
            optimizer,
            recipe,
            style,
            step: 0,
        }
    }

    fn guard(&self, training: bool) -> Option<fp8::recipes::AutocastGuard> {
        let recipe = self.recipe.clone()?;
        Some(fp8_autocast(Autocast::new(recipe).training(training)).unwrap())
    }

    fn loss(&self, batch: u64) -> Tensor {
        // Amaxes that rise and fall, so that histories matter.
        let size = 1. + (batch % 5) as f64;
        let x = (tensor(1000 + batch, &[8, Mlp::IN]) * size).unwrap();
        let y = tensor(2000 + batch, &[8, Mlp::OUT]);
        (self.mlp.forward(&x).unwrap() - y)
            .unwrap()
            .sqr()
            .unwrap()
            .mean_all()
            .unwrap()
    }

    /// One optimizer step; the bits of its losses, training then validation.
    fn train(&mut self) -> Vec<u32> {
        let schedule = LrSchedule::cosine(2e-2, 3, STEPS);
        let still = self.style == Style::Standstill && (3..8).contains(&self.step);
        self.optimizer
            .set_lr(if still { 0. } else { schedule.lr(self.step) })
            .unwrap();
        let losses: Vec<Tensor> = match self.style {
            Style::OneGuard => {
                let _guard = self.guard(true);
                [2 * self.step, 2 * self.step + 1]
                    .map(|batch| self.loss(batch))
                    .into()
            }
            Style::GuardEach => [2 * self.step, 2 * self.step + 1]
                .map(|batch| {
                    let _guard = self.guard(true);
                    self.loss(batch)
                })
                .into(),
            _ => {
                let _guard = self.guard(true);
                vec![self.loss(self.step)]
            }
        };
        let total = losses
            .iter()
            .cloned()
            .reduce(|a, b| (a + b).unwrap())
            .unwrap();
        let skip = self.style == Style::Skipped && self.step + 1 == SAVED_AT;
        let total = if skip {
            (total * f64::INFINITY).unwrap()
        } else {
            total
        };
        let report = self.optimizer.apply(&total.backward().unwrap()).unwrap();
        assert_eq!(report.skipped().unwrap(), skip, "step {}", self.step);
        self.step += 1;
        let mut all: Vec<u32> = losses.iter().flat_map(bits).collect();
        if self.style == Style::Validation {
            let _guard = self.guard(false);
            all.extend((0..2).flat_map(|i| bits(&self.loss(500 + i))));
        }
        all
    }

    fn meta(&self) -> TrainingMeta {
        TrainingMeta {
            step: self.step,
            recipe: self.recipe.clone(),
            random: json!({"seed": u64::MAX, "drawn": self.step}),
            extra: json!({"width": [Mlp::IN, Mlp::HIDDEN]}),
        }
    }

    fn save(&self, path: &Path) {
        save_training(path, &self.mlp, &self.vars, &self.optimizer, &self.meta()).unwrap();
    }

    fn resume(&mut self, path: &Path) -> Result<TrainingMeta, Error> {
        let recipe = self.recipe.clone();
        let meta = resume_training(
            path,
            &self.mlp,
            &self.vars,
            &mut self.optimizer,
            recipe.as_ref(),
        )?;
        self.step = meta.step;
        Ok(meta)
    }

    /// The bits of everything that a checkpoint may change.
    fn everything(&self) -> BTreeMap<String, Vec<u32>> {
        let mut all = BTreeMap::new();
        for (name, var) in self.vars.data().lock().unwrap().iter() {
            all.insert(name.clone(), bits(var.as_tensor()));
        }
        for (name, row) in fp8_state(&self.mlp).unwrap() {
            let mut bits: Vec<u32> = row.amax_history.iter().map(|x| x.to_bits()).collect();
            bits.push(row.quant_scale.to_bits());
            bits.push(row.dequant_scale.to_bits());
            bits.push(row.calibrated_amax.map_or(0, f32::to_bits));
            bits.push(row.format.map_or(0, |format| format as u32 + 1));
            bits.extend([row.non_finite, row.draws, row.id]);
            all.insert(name, bits);
        }
        for (name, tensor) in self.optimizer.state().unwrap() {
            all.insert(format!("optimizer/{name}"), bits(&tensor));
        }
        all
    }
}

fn file(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("checkpoint.safetensors")
}

fn all_recipes() -> Vec<(String, Option<Recipe>)> {
    let mut all = vec![("f32".to_string(), None)];
    all.extend(
        common::recipes()
            .into_iter()
            .map(|(name, r)| (name.to_string(), Some(r))),
    );
    let power = delayed(2)
        .with_amax_compute(fp8::core::AmaxCompute::MostRecent)
        .with_scale_rounding(fp8::core::ScaleRounding::PowerOfTwo);
    all.push(("delayed, most recent".into(), Some(power.into())));
    all
}

/// The same variables, FP8 state and optimizer state, or a panic that names the first tensor that differs.
#[track_caller]
fn assert_everything(case: &str, got: &Run, expected: &Run) {
    let (got, expected) = (got.everything(), expected.everything());
    let names = |all: &BTreeMap<String, Vec<u32>>| all.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&got), names(&expected), "{case}: names");
    for (name, bits) in &expected {
        assert!(got[name] == *bits, "{case}: {name}");
    }
}

// ---- bit for bit -----------------------------------------------------------------------------

/// Losses after the checkpoint of an uninterrupted run, of one that saves and goes on, and of one that resumes.
#[track_caller]
fn assert_resumes(name: &str, recipe: Option<Recipe>, style: Style) {
    let case = format!("{name}, {style:?}");
    let dir = tempfile::tempdir().unwrap();
    let mut uninterrupted = Run::new(1, recipe.clone(), style);
    let mut saving = Run::new(1, recipe.clone(), style);
    let expected: Vec<_> = (0..STEPS).map(|_| uninterrupted.train()).collect();
    for step in 0..SAVED_AT {
        assert_eq!(
            saving.train(),
            expected[step as usize],
            "{case}: step {step} before saving"
        );
    }
    saving.save(&file(&dir));
    let mut resumed = Run::new(99, recipe, style);
    // A fresh run that has gone its own way for a while.
    resumed.train();
    let meta = resumed.resume(&file(&dir)).unwrap();
    assert_eq!(meta, saving.meta(), "{case}: meta");
    assert_everything(&format!("{case}: state after resuming"), &resumed, &saving);
    for step in SAVED_AT..STEPS {
        let expected = &expected[step as usize];
        assert_eq!(
            saving.train(),
            *expected,
            "{case}: step {step} after saving"
        );
        assert_eq!(
            resumed.train(),
            *expected,
            "{case}: step {step} after resuming"
        );
    }
    for run in [&mut uninterrupted, &mut saving, &mut resumed] {
        fp8::recipes::end_step().unwrap();
        run.save(&file(&dir));
    }
    assert_everything(
        &format!("{case}: saving left a trace"),
        &saving,
        &uninterrupted,
    );
    assert_everything(&format!("{case}: last state"), &resumed, &uninterrupted);
    let losses: Vec<f32> = expected
        .iter()
        .map(|bits| f32::from_bits(bits[0]))
        .collect();
    assert!(
        losses.iter().all(|loss| loss.is_finite()),
        "{case}: {losses:?}"
    );
}

#[test]
fn every_recipe_resumes_bit_for_bit() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe, Style::Plain);
    }
}

#[test]
fn also_with_validation_in_between() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe, Style::Validation);
    }
}

#[test]
fn also_with_gradient_accumulation() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe.clone(), Style::OneGuard);
        assert_resumes(&name, recipe, Style::GuardEach);
    }
}

#[test]
fn also_with_a_frozen_weight() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe, Style::Frozen);
    }
}

#[test]
fn also_after_a_step_that_changed_no_weight() {
    for (name, recipe) in all_recipes() {
        assert_resumes(&name, recipe.clone(), Style::Skipped);
        assert_resumes(&name, recipe, Style::Standstill);
    }
}

#[test]
fn a_checkpoint_of_the_very_beginning_resumes_too() {
    for initial in [InitialScale::One, InitialScale::FirstBatch] {
        let recipe: Recipe = delayed(4).with_initial(initial).into();
        let dir = tempfile::tempdir().unwrap();
        let mut first = Run::new(1, Some(recipe.clone()), Style::Plain);
        first.save(&file(&dir));
        let mut resumed = Run::new(2, Some(recipe), Style::Plain);
        resumed.resume(&file(&dir)).unwrap();
        for step in 0..4 {
            assert_eq!(resumed.train(), first.train(), "{initial:?}, step {step}");
        }
    }
}

#[test]
fn saving_does_not_wait_for_the_next_guard() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(1, Some(delayed(4).into()), Style::Plain);
    run.train();
    let before = common::slot(&run.mlp.up, "grad_output").quant_scale;
    run.save(&file(&dir));
    let after = common::slot(&run.mlp.up, "grad_output").quant_scale;
    assert_eq!(before, 1., "the gradients' update was pending");
    assert_ne!(after, 1., "saving ends the step");
    let stored = Checkpoint::open(&[file(&dir)]).unwrap();
    let stored = stored.tensor("fp8/quant_scale", &device()).unwrap();
    // Rows are sorted by name: down.grad_output, .input, .weight, then up.grad_output.
    assert_eq!(common::flat(&stored)[3], after);
}

#[test]
fn a_longer_history_in_the_checkpoint_than_here_is_no_obstacle() {
    let dir = tempfile::tempdir().unwrap();
    let recipe: Recipe = delayed(4).into();
    let mut first = Run::new(1, Some(recipe.clone()), Style::Plain);
    // Fresh state has 1024 entries until the first update; the checkpoint 4.
    first.train();
    first.save(&file(&dir));
    let mut resumed = Run::new(2, Some(recipe), Style::Plain);
    resumed.resume(&file(&dir)).unwrap();
    assert_eq!(common::slots(&resumed.mlp.up), common::slots(&first.mlp.up));
    assert_eq!(resumed.train(), first.train());
}

// ---- the file --------------------------------------------------------------------------------

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
    assert_eq!(meta["recipe"]["delayed"]["amax_history_len"], 4);
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

// ---- what does not fit -----------------------------------------------------------------------

/// Fails to resume, with these parts in the message, and changes nothing.
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

/// A checkpoint of a delayed run after two steps.
fn saved(dir: &tempfile::TempDir) -> Run {
    let mut run = Run::new(1, Some(delayed(4).into()), Style::Plain);
    run.train();
    run.train();
    run.save(&file(dir));
    run
}

#[test]
fn another_recipe_is_refused() {
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
            matches!(&error, Error::ResumeMismatch { .. }),
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

/// The saved file with some tensors changed.
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
fn another_model_is_refused_and_the_tensor_named() {
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
                matches!(&error, Error::ResumeMismatch { .. }),
                "{case}: {error:?}"
            ),
        }
    }
    // The unchanged copy does resume.
    let path = edited(&dir, |_| ());
    Run::new(2, Some(delayed(4).into()), Style::Plain)
        .resume(&path)
        .unwrap();
}

#[test]
fn a_model_built_otherwise_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    saved(&dir);
    let recipe: Recipe = delayed(4).into();
    // One layer more.
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
    // One layer less prepared.
    let mut run = Run::new(2, Some(recipe.clone()), Style::Plain);
    prepare_fp8(&run.mlp, &LayerFilter::new().skip_paths(["down"]).into()).unwrap();
    let parts = ["`down.grad_output`", "missing here"];
    assert_refused("one layer less prepared", &mut run, &file(&dir), &parts);
    // Nothing prepared.
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
fn files_that_are_no_checkpoints_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let saved = saved(&dir);
    let bytes = fs::read(file(&dir)).unwrap();
    let mut run = Run::new(2, Some(delayed(4).into()), Style::Plain);
    run.train();

    let path = dir.path().join("weights.safetensors");
    saved.vars.save(&path).unwrap();
    let parts = ["weights.safetensors", "not a training checkpoint"];
    let error = assert_refused("weights only", &mut run, &path, &parts);
    assert!(matches!(&error, Error::Json { .. }), "{error:?}");
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
            matches!(&error, Error::NotSafetensors { .. }),
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
    assert!(matches!(&error, Error::Read { .. }), "{error:?}");

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
        assert!(matches!(&error, Error::Json { .. }), "{case}: {error:?}");
    }
    // After all that it still resumes.
    run.resume(&file(&dir)).unwrap();
    assert_everything("resumed after all", &run, &saved);
}

#[test]
fn two_states_under_one_name_are_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::new(1, Some(delayed(4).into()), Style::Plain);
    let vb = VarBuilder::from_varmap(&run.vars, DType::F32, &device());
    // A variable where the state of a layer goes.
    vb.get(1, "fp8/quant_scale").unwrap();
    let error =
        save_training(file(&dir), &run.mlp, &run.vars, &run.optimizer, &run.meta()).unwrap_err();
    assert_text("one name", &error, &["`fp8/quant_scale`"]);
    assert!(matches!(&error, Error::NameClash { .. }), "{error:?}");
    assert!(!file(&dir).exists(), "nothing is written");
}
