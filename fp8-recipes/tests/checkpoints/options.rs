//! Going on from a checkpoint with another recipe, another optimizer, other prepared layers.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use fp8_recipes::checkpoint::{
    Restored, ResumeOptions, ResumeReport, TrainingMeta, fp8_state, resume_training,
    resume_training_with, save_training,
};
use fp8_recipes::nn::{self, Linear};
use fp8_recipes::optim::{AdamW, AdamWConfig, NoOptimizer, OptimError, ResumableOptimizer};
use fp8_recipes::{
    Autocast, DelayedScaling, Error, LayerFilter, Recipe, fp8_autocast, prepare_fp8, with_fp8,
};
use fp8_test_support::{bits, named, steps};
use serde_json::Value;
use std::path::PathBuf;

type Outcome = Result<(), Box<dyn std::error::Error>>;

struct Run {
    vars: VarMap,
    fc: Linear,
    optimizer: AdamW,
    recipe: Option<Recipe>,
    step: u64,
}

fn recipe(name: &str) -> Option<Recipe> {
    Some(name.parse().unwrap())
}

fn short(len: usize) -> Option<Recipe> {
    Some(DelayedScaling::default().with_amax_history_len(len).into())
}

impl Run {
    /// Prepared if it has a recipe.
    fn new(seed: u32, recipe: Option<Recipe>) -> Self {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let fc = nn::linear(16, 8, vb.pp("fc")).unwrap();
        for (i, (_, var)) in named(&vars).iter().enumerate() {
            let start = steps(seed + i as u32, var.elem_count());
            let start = Tensor::from_vec(start, var.shape(), &Device::Cpu).unwrap();
            var.set(&start).unwrap();
        }
        if recipe.is_some() {
            prepare_fp8(&fc, &Default::default()).unwrap();
        }
        let config = AdamWConfig {
            lr: 0.01 * f64::from(seed),
            ..AdamWConfig::default()
        };
        Self {
            optimizer: AdamW::from_varmap(&vars, config).unwrap(),
            vars,
            fc,
            recipe,
            step: 0,
        }
    }

    fn grads(&self, batch: u64) -> GradStore {
        let x = Tensor::from_vec(steps(100 + batch as u32, 64), (4, 16), &Device::Cpu).unwrap();
        let y = match &self.recipe {
            None => self.fc.forward(&x),
            Some(recipe) => with_fp8(recipe.clone(), || self.fc.forward(&x)),
        };
        y.unwrap()
            .sqr()
            .unwrap()
            .mean_all()
            .unwrap()
            .backward()
            .unwrap()
    }

    fn train(&mut self) {
        let grads = self.grads(self.step);
        assert!(!self.optimizer.apply(&grads).unwrap().skipped().unwrap());
        self.step += 1;
    }

    fn meta(&self) -> TrainingMeta {
        TrainingMeta {
            step: self.step,
            recipe: self.recipe.clone(),
            random: Value::Null,
            extra: Value::Null,
        }
    }

    fn save(&self, dir: &tempfile::TempDir) -> PathBuf {
        let path = dir.path().join("run.safetensors");
        save_training(&path, &self.fc, &self.vars, &self.optimizer, &self.meta()).unwrap();
        path
    }

    fn resume(&mut self, path: &PathBuf, options: ResumeOptions) -> Result<ResumeReport, Error> {
        let report = resume_training_with(
            path,
            &self.fc,
            &self.vars,
            &mut self.optimizer,
            self.recipe.as_ref(),
            &options,
        )?;
        self.step = report.meta.step;
        Ok(report)
    }

    /// The bits of variables, moments and FP8 state.
    fn everything(&self) -> Vec<(String, Vec<u32>)> {
        let bits = |tensor: &Tensor| -> Vec<u32> {
            let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
            let values = values.to_vec1::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect()
        };
        let vars = named(&self.vars).into_iter();
        let mut all: Vec<_> = vars
            .map(|(name, var)| (name, bits(var.as_tensor())))
            .collect();
        let moments = self.optimizer.state().unwrap();
        all.extend(moments.iter().map(|(name, t)| (name.clone(), bits(t))));
        for (name, row) in fp8_state(&self.fc).unwrap() {
            all.push((
                name,
                [
                    vec![row.quant_scale.to_bits(), row.id],
                    row.draws.values().copied().collect(),
                ]
                .concat(),
            ));
        }
        all.sort();
        all
    }
}

fn changed() -> ResumeOptions {
    ResumeOptions::new().allow_recipe_change(true)
}

#[test]
fn without_an_option_nothing_may_differ() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, None);
    saved.train();
    let path = saved.save(&dir);
    let mut here = Run::new(2, short(4));
    here.train();
    let before = here.everything();
    let others = [
        ResumeOptions::new(),
        ResumeOptions::new().fresh_optimizer(true),
        ResumeOptions::new().fresh_fp8_state(true),
    ];
    for options in others {
        let error = here.resume(&path, options).unwrap_err();
        let said = error.to_string();
        assert!(
            matches!(&error, Error::TrainingCheckpoint(fp8_recipes::TrainingCheckpointError::Mismatch { what, .. }) if what == "the recipe"),
            "{error:?}"
        );
        assert!(said.contains("none (high precision)"), "{said}");
        assert_eq!(here.everything(), before, "{options:?}");
    }
    Ok(())
}

/// Whoever saved it: variables and optimizer come back, the FP8 state is that of a model just prepared.
#[test]
fn another_recipe_begins_with_fresh_fp8_state() -> Outcome {
    let recipes = [
        None,
        recipe("tensorwise"),
        recipe("rowwise"),
        short(4),
        short(8),
    ];
    for from in &recipes {
        let dir = tempfile::tempdir()?;
        let mut saved = Run::new(1, from.clone());
        for _ in 0..3 {
            saved.train();
        }
        if let Some(recipe) = from {
            // A calibration does not survive either.
            let guard = fp8_autocast(Autocast::new(recipe.clone()).calibrating(true))?;
            saved.grads(50);
            guard.close()?;
        }
        let path = saved.save(&dir);
        for to in recipes.iter().filter(|to| *to != from) {
            let case = format!("{from:?} to {to:?}");
            let mut here = Run::new(2, to.clone());
            // It has gone its own way for a while.
            here.train();
            here.train();
            let report = here.resume(&path, changed())?;
            assert!(report.recipe_changed(), "{case}");
            assert_eq!(report.fp8_state, Restored::Fresh, "{case}");
            assert_eq!(report.optimizer, Restored::FromCheckpoint, "{case}");
            assert_eq!(report.variables, ["fc.bias", "fc.weight"], "{case}");
            assert_eq!(report.fp8_layers, usize::from(to.is_some()), "{case}");
            assert_eq!((here.step, &report.meta), (3, &saved.meta()), "{case}");
            assert!(
                here.fc
                    .fp8_state()
                    .is_none_or(|state| state.calibration().is_none())
            );

            // The reference: the same variables and moments in a model just prepared.
            let mut fresh = Run::new(3, to.clone());
            for ((_, var), (_, from)) in named(&fresh.vars).iter().zip(named(&saved.vars)) {
                var.set(from.as_tensor())?;
            }
            fresh
                .optimizer
                .load_optimizer_state(&saved.optimizer.optimizer_state()?)?;
            fresh.step = 3;
            assert_eq!(here.everything(), fresh.everything(), "{case}");
            for step in 0..4 {
                here.train();
                fresh.train();
                assert_eq!(here.everything(), fresh.everything(), "{case}, step {step}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_same_recipe_is_restored_in_full_even_if_it_may_change() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, short(4));
    for _ in 0..3 {
        saved.train();
    }
    let path = saved.save(&dir);
    let mut here = Run::new(2, short(4));
    let report = here.resume(&path, changed())?;
    assert_eq!(report.fp8_state, Restored::FromCheckpoint);
    assert!(!report.recipe_changed());
    for _ in 0..3 {
        saved.train();
        here.train();
        assert_eq!(here.everything(), saved.everything());
    }
    Ok(())
}

#[test]
fn other_prepared_layers_need_their_own_option() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, short(4));
    saved.train();
    let path = saved.save(&dir);
    let mut here = Run::new(2, None);
    here.recipe = short(4);
    prepare_fp8(&here.fc, &LayerFilter::new().skip_paths(["fc"]).into())?;
    let before = here.everything();
    for options in [ResumeOptions::new(), changed()] {
        let error = here.resume(&path, options).unwrap_err();
        assert!(error.to_string().contains("fc.grad_output"), "{error}");
        assert_eq!(here.everything(), before);
    }
    let report = here.resume(&path, ResumeOptions::new().fresh_fp8_state(true))?;
    assert_eq!((report.fp8_state, report.fp8_layers), (Restored::Fresh, 0));
    assert!(!report.recipe_changed());
    Ok(())
}

#[test]
fn another_optimizer_takes_over() -> Outcome {
    let dir = tempfile::tempdir()?;
    // From candle's AdamW in f32 ..
    let saved = Run::new(1, None);
    let mut optimizer = candle_nn::AdamW::new_lr(saved.vars.all_vars(), 0.1)?;
    optimizer.step(&saved.grads(0))?;
    let path = dir.path().join("run.safetensors");
    save_training(&path, &saved.fc, &saved.vars, &optimizer, &saved.meta())?;
    // .. to ours in FP8.
    let mut here = Run::new(2, short(4));
    let error = here.resume(&path, changed()).unwrap_err();
    assert!(matches!(error, Error::Optim(OptimError::StateKind { .. })));
    let report = here.resume(&path, changed().fresh_optimizer(true))?;
    assert_eq!(report.optimizer, Restored::Fresh);
    assert_eq!(here.optimizer.steps()?, 0);
    for ((name, var), (_, other)) in named(&here.vars).iter().zip(named(&saved.vars)) {
        assert_eq!(bits(var), bits(&other), "{name}");
    }
    // To evaluate, without any.
    let mut here = Run::new(2, None);
    let recipe = here.recipe.clone();
    let resume = |options: &ResumeOptions| {
        resume_training_with(
            &path,
            &here.fc,
            &here.vars,
            &mut NoOptimizer,
            recipe.as_ref(),
            options,
        )
    };
    let error = resume(&ResumeOptions::new()).unwrap_err();
    assert!(matches!(error, Error::Optim(OptimError::StateKind { .. })));
    resume(&ResumeOptions::new().fresh_optimizer(true))?;
    here.train();
    Ok(())
}

#[test]
fn hyperparameters_can_be_kept() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, short(4));
    saved.train();
    let path = saved.save(&dir);
    let mut here = Run::new(5, short(4));
    here.resume(&path, ResumeOptions::new().keep_hyperparameters(true))?;
    assert_eq!(here.everything(), saved.everything());
    assert_eq!(here.optimizer.lr(), 0.05);
    here.resume(&path, ResumeOptions::new())?;
    assert_eq!(here.optimizer.lr(), 0.01);
    Ok(())
}

#[test]
fn the_report_reads_well() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut saved = Run::new(1, None);
    saved.train();
    let path = saved.save(&dir);
    let report = Run::new(2, short(4)).resume(&path, changed())?;
    let expected = format!(
        "{}, step 1\n  recipe: delayed(amax_history_len=4), was none (high precision)\n  \
         variables (2): from the checkpoint\n  FP8 state (layers: 1): fresh\n  optimizer: from the checkpoint",
        path.display()
    );
    assert_eq!(report.to_string(), expected);
    // The plain call gives the metadata alone.
    let mut here = Run::new(2, None);
    let meta = resume_training(&path, &here.fc, &here.vars, &mut here.optimizer, None)?;
    assert_eq!(meta, saved.meta());
    Ok(())
}
