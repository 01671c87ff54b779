//! A run that was stopped goes on to the bit.

use crate::support::*;
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::CastRounding;
use fp8::fp8_files::adapter::{AdapterConfig, Targets};
use fp8::models::{ModelOptions, open};
use fp8::training::{
    self, Ended, Events, Learner, Metrics, Progress, Silent, StepRecord, Stop, Trainer,
    TurnOptions, initialize_adapter, train,
};
use fp8::{Fp8LinearConfig, RecipeName};
use std::cell::RefCell;
use std::path::Path;

const STEPS: u64 = 7;

fn adapters(dir: &Path, micro_batches: usize) -> Run {
    let mut model = open(dir, &ModelOptions::new()).expect("a model");
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let config = AdapterConfig::new(4)
        .with_alpha(8.)
        .with_dropout(0.2)
        .with_targets(Targets::names(["q_proj", "down_proj"]));
    model.add_adapter("default", &config, vb).expect("adapters");
    initialize_adapter(&vars, 3).expect("values");
    let objective = objective(dir).with_dropout_seed(5);
    let config = settings("f32", micro_batches);
    Trainer::new("run", model, vars, objective, config).expect("a trainer")
}

type Make<'a> = &'a dyn Fn() -> Run;

/// Trains without a pause, and with one after every step, each in a new trainer.
fn assert_resumes(dir: &Path, what: &str, make: Make<'_>) -> Outcome {
    let mut whole = make();
    let expected = losses(&steps(&mut whole, STEPS)?);
    assert_eq!(expected.len() as u64, STEPS, "{what}");
    let validation = whole.validate()?.map(f64::to_bits);

    let path = dir.join("checkpoint.safetensors");
    let _ = std::fs::remove_file(&path);
    let mut got = vec![];
    let mut last = None;
    for step in 1..=STEPS {
        let mut run = make().with_checkpoint(&path);
        assert_eq!(run.resume()?, step > 1, "{what}");
        got.extend(losses(&steps(&mut run, step)?));
        run.save()?;
        last = run.validate()?.map(f64::to_bits);
    }
    assert_eq!(got, expected, "{what}");
    assert_eq!(last, validation, "{what}");
    Ok(())
}

#[test]
fn every_step_after_a_pause_is_the_same_to_the_bit() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    for recipe in ["f32", "delayed", "rowwise", "mxfp8"] {
        for parts in [1, 2] {
            let what = format!("{recipe} in {parts} parts");
            assert_resumes(dir, &what, &|| full(dir, settings(recipe, parts)))?;
        }
    }
    let random = Fp8LinearConfig::from_recipe_name(RecipeName::Rowwise)
        .with_weight_rounding(CastRounding::Stochastic);
    let random = || settings("f32", 2).with_recipe(Some(random.clone().into()));
    assert_resumes(dir, "random weights", &|| full(dir, random()))?;
    assert_resumes(dir, "adapters", &|| adapters(dir, 1))?;
    assert_resumes(dir, "adapters in parts", &|| adapters(dir, 2))
}

/// Parts of a batch with unequal numbers of targets count by these numbers.
#[test]
fn parts_of_a_batch_give_its_gradient() -> Outcome {
    let dir = folder();
    let [one, four] = [1, 4].map(|parts| {
        let mut run = full(dir.path(), settings("f32", parts));
        steps(&mut run, 3).expect("steps")
    });
    assert_eq!([one.len(), four.len()], [3; 2]);
    for (a, b) in one.iter().zip(&four) {
        assert!((a.loss - b.loss).abs() < 1e-5, "{} {}", a.loss, b.loss);
        assert!((a.grad_norm.unwrap() / b.grad_norm.unwrap() - 1.).abs() < 1e-4);
        assert_eq!(a.tokens, b.tokens);
    }
    Ok(())
}

/// Stops at the third step.
struct Stopping(Stop);

impl Events for Stopping {
    fn stepped(&mut self, progress: &Progress<'_>) {
        if progress.step == 3 {
            self.0.request();
        }
    }
}

#[test]
fn a_stopped_loop_saves_and_goes_on() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let options = TurnOptions::new(6)
        .with_checkpoint_every(None)
        .with_validate_every(Some(2));
    let run = |name: &str, events: &mut dyn Events, stop: &Stop, metrics: &mut Metrics| {
        let path = dir.join(format!("{name}.safetensors"));
        let mut run = full(dir, settings("delayed", 1)).with_checkpoint(path);
        run.resume().expect("resumed");
        train(
            std::slice::from_mut(&mut run),
            &options,
            metrics,
            events,
            stop,
        )
    };
    let mut whole = Metrics::in_memory();
    let ended = run("whole", &mut Silent, &Stop::default(), &mut whole)?;
    assert_eq!(ended, Ended::Finished);

    let mut parts = Metrics::open(dir, |_| true)?;
    let stop = Stop::default();
    let ended = run("parts", &mut Stopping(stop.clone()), &stop, &mut parts)?;
    assert_eq!(ended, Ended::Stopped);
    assert_eq!(parts.train_curve("run").len(), 3);
    drop(parts);
    let mut parts = Metrics::open(dir, |line| line.step() <= 3)?;
    run("parts", &mut Silent, &Stop::default(), &mut parts)?;
    assert_eq!(parts.train_curve("run"), whole.train_curve("run"));
    assert_eq!(parts.validation_curve("run"), whole.validation_curve("run"));
    assert_eq!(parts.validation_curve("run").len(), 2);
    Ok(())
}

/// A learner that only notes its steps.
struct Noting<'a> {
    name: &'static str,
    step: u64,
    unread: Vec<StepRecord>,
    log: &'a RefCell<Vec<String>>,
}

impl Learner for Noting<'_> {
    type Error = training::Error;

    fn name(&self) -> &str {
        self.name
    }

    fn step(&self) -> u64 {
        self.step
    }

    fn train_step(&mut self) -> training::Result<()> {
        self.step += 1;
        self.unread.push(StepRecord::new(self.step, 1.));
        let (name, step) = (self.name, self.step);
        self.log.borrow_mut().push(format!("{name}{step}"));
        Ok(())
    }

    fn read_steps(&mut self) -> training::Result<Vec<StepRecord>> {
        Ok(std::mem::take(&mut self.unread))
    }

    fn validate(&mut self) -> training::Result<Option<f64>> {
        Ok(None)
    }

    fn save(&mut self) -> training::Result<()> {
        Ok(())
    }
}

/// After a kill between two checkpoints.
#[test]
fn learners_that_are_behind_catch_up_before_they_take_turns() -> Outcome {
    for (steps, expected) in [
        ([2, 5], ["a3", "a4", "a5", "a6", "b6"]),
        ([5, 2], ["b3", "b4", "b5", "a6", "b6"]),
    ] {
        let log = RefCell::default();
        let mut learners = [("a", steps[0]), ("b", steps[1])].map(|(name, step)| Noting {
            name,
            step,
            unread: vec![],
            log: &log,
        });
        let mut metrics = Metrics::in_memory();
        let ended = train(
            &mut learners,
            &TurnOptions::new(6),
            &mut metrics,
            &mut Silent,
            &Stop::default(),
        )?;
        assert_eq!(ended, Ended::Finished);
        assert_eq!(*log.borrow(), expected);
        for (name, step) in ["a", "b"].into_iter().zip(steps) {
            let curve: Vec<_> = (step + 1..=6).map(|step| (step, 1.)).collect();
            assert_eq!(metrics.train_curve(name), curve, "{name}");
        }
    }
    Ok(())
}

/// Experts that get no token in a batch have no gradient; the correction of a router's choice never has one.
#[test]
fn a_mixture_trains_with_idle_experts() -> Outcome {
    let dir = folder();
    let path = dir.path();
    let mut config = fp8_test_support::language_model::config(VOCAB);
    config["model_type"] = "qwen3_moe".into();
    for (key, value) in [
        ("num_experts", 16),
        ("num_experts_per_tok", 1),
        ("moe_intermediate_size", 16),
        ("head_dim", 8),
    ] {
        config[key] = value.into();
    }
    config["norm_topk_prob"] = true.into();
    let json = config.to_string();
    let config = fp8::models::LlamaConfig::parse("config.json", &config)?;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    fp8::models::Llama::new(&config, vb)?;
    vars.save(path.join("model.safetensors"))?;
    std::fs::write(path.join("config.json"), json)?;
    let mut run = full(path, settings("f32", 1));
    let records = steps(&mut run, 3)?;
    assert_eq!(records.len(), 3);
    assert!(
        records
            .iter()
            .all(|record| record.grad_norm.is_some_and(f64::is_finite))
    );
    Ok(())
}
