//! A small language model in a folder, with a tokenizer and a text.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::RecipeName;
use fp8::models::{Llama, LlamaConfig, Tokenizer};
use fp8::optim::LrSchedule;
use fp8::training::{
    Dataset, DatasetOptions, Learner, NextToken, StepRecord, TrainableModel, Trainer, TrainerConfig,
};
use fp8_test_support::language_model;
pub use fp8_test_support::language_model::{VOCAB, text};
use std::path::Path;

pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

pub fn config(vocab: usize) -> LlamaConfig {
    LlamaConfig::parse("config.json", &language_model::config(vocab)).expect("a configuration")
}

/// Deterministic values in place of the random ones of new variables.
fn fill(vars: &VarMap) {
    let vars = vars.data().lock().expect("a lock");
    let mut names: Vec<_> = vars.iter().collect();
    names.sort_by_key(|(name, _)| *name);
    for (number, (name, var)) in names.into_iter().enumerate() {
        let values = language_model::values(name, number, var.elem_count());
        let values = Tensor::from_vec(values, var.shape(), &Device::Cpu).expect("a tensor");
        var.set(&values).expect("set");
    }
}

pub fn model(vocab: usize) -> (Llama, VarMap) {
    model_of(&config(vocab))
}

pub fn model_of(config: &LlamaConfig) -> (Llama, VarMap) {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let model = Llama::new(config, vb).expect("a model");
    fill(&vars);
    (model, vars)
}

/// The folder of a model.
pub fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    language_model::write(dir.path());
    dir
}

pub fn objective(dir: &Path) -> NextToken {
    let tokenizer = Tokenizer::open(dir).expect("a tokenizer");
    let data = Dataset::open(&[text(dir)], &tokenizer, &DatasetOptions::new(16)).expect("data");
    NextToken::new(data, 4).expect("an objective")
}

/// The settings of a run under a recipe, or `f32`.
pub fn settings(recipe: &str, micro_batches: usize) -> TrainerConfig {
    let recipe = match recipe {
        "f32" => None,
        name => Some(name.parse::<RecipeName>().expect("a recipe").into()),
    };
    TrainerConfig::new(LrSchedule::cosine(3e-3, 2, 12))
        .with_recipe(recipe)
        .with_micro_batches(micro_batches)
}

pub type Run = Trainer<fp8::models::Model, NextToken>;

pub fn full(dir: &Path, config: TrainerConfig) -> Run {
    let base = TrainableModel::open(dir, DType::F32, &Device::Cpu).expect("a model");
    Trainer::new("run", base.model, base.vars, objective(dir), config).expect("a trainer")
}

/// Makes steps until `last`.
pub fn steps(run: &mut Run, last: u64) -> fp8::training::Result<Vec<StepRecord>> {
    let mut records = vec![];
    while run.step() < last {
        run.train_step()?;
        records.extend(run.read_steps()?);
    }
    Ok(records)
}

pub fn losses(records: &[StepRecord]) -> Vec<u64> {
    records.iter().map(|record| record.loss.to_bits()).collect()
}
