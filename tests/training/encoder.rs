//! Encoders that learn labels, and which texts belong to queries.

use crate::support::{Outcome, settings};
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::fp8_files::adapter::{AdapterConfig, AdapterFile, Targets};
use fp8::load::Checkpoint;
use fp8::models::{Bert, Model, ModelOptions, Tokenizer, open};
use fp8::rewrite::{self, Classifier, Merged, QuantizeOptions, Scheme, Source, WriteOptions};
use fp8::training::{
    Classify, Contrast, Dataset, DatasetOptions, Learner, Objective, Part, Rows, TrainableModel,
    Trained, Trainer, initialize_adapter,
};
use fp8_test_support::encoder;
use std::path::Path;

pub type Goal = Box<dyn Objective<Model, Batch = Rows>>;
pub type Run = Trainer<Model, Goal>;

const LABELS: [&str; 2] = ["cold", "warm"];

pub fn labels() -> Vec<String> {
    LABELS.map(String::from).to_vec()
}

pub fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    encoder::write(dir.path());
    dir
}

pub fn dataset(dir: &Path, file: std::path::PathBuf) -> Dataset {
    let tokenizer = Tokenizer::open(dir).expect("a tokenizer");
    let options = DatasetOptions::new(24);
    Dataset::open(&[file], &tokenizer, &options).expect("data")
}

pub fn classify(dir: &Path) -> Classify {
    let data = dataset(dir, encoder::labelled(dir));
    Classify::new(data, 6).expect("an objective")
}

pub fn contrast(dir: &Path, negative: bool) -> Contrast {
    let data = dataset(dir, encoder::queries(dir, negative));
    Contrast::new(data, 6).expect("an objective")
}

pub fn run(base: TrainableModel, goal: Goal, recipe: &str, parts: usize) -> Run {
    let config = settings(recipe, parts);
    Trainer::new("run", base.model, base.vars, goal, config).expect("a trainer")
}

fn classifier(dir: &Path) -> TrainableModel {
    TrainableModel::open_classifier(dir, &labels(), 5, DType::F32, &Device::Cpu).expect("a model")
}

fn full(dir: &Path, recipe: &str, parts: usize) -> Run {
    run(classifier(dir), Box::new(classify(dir)), recipe, parts)
}

pub fn queries(dir: &Path, recipe: &str, negative: bool) -> Run {
    let base = TrainableModel::open(dir, DType::F32, &Device::Cpu).expect("a model");
    run(base, Box::new(contrast(dir, negative)), recipe, 1)
}

/// Adapters and a classifier beside the model in `base`.
pub fn adapters(dir: &Path, base: &Path) -> Run {
    let mut model = open(base, &ModelOptions::new()).expect("a model");
    let Model::Bert(bert) = &mut model else {
        panic!("an encoder");
    };
    bert.set_labels(labels()).expect("a classifier");
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let config = AdapterConfig::new(4)
        .with_alpha(8.)
        .with_dropout(0.1)
        .with_saved(vec!["classifier".into()])
        .with_labels(labels())
        .with_targets(Targets::names([
            "query",
            "intermediate.dense",
            "pooler.dense",
        ]));
    model.add_adapter("new", &config, vb).expect("adapters");
    initialize_adapter(&vars, 3).expect("values");
    let goal: Goal = Box::new(classify(dir).with_dropout_seed(9));
    Trainer::new("run", model, vars, goal, settings("f32", 1)).expect("a trainer")
}

pub fn steps(run: &mut Run, last: u64) -> Vec<f64> {
    let mut losses = vec![];
    while run.step() < last {
        run.train_step().expect("a step");
        losses.extend(run.read_steps().expect("results").iter().map(|r| r.loss));
    }
    losses
}

pub fn bert(model: &Model) -> &Bert {
    model.bert().expect("an encoder")
}

pub fn texts() -> (Tensor, Tensor) {
    let ids = Tensor::new(&[[0u32, 40, 41, 1], [0, 50, 1, 1]], &Device::Cpu).expect("ids");
    let mask = Tensor::new(&[[1u32, 1, 1, 1], [1, 1, 1, 0]], &Device::Cpu).expect("a mask");
    (ids, mask)
}

pub fn logits(model: &Model) -> Vec<Vec<f32>> {
    let (ids, mask) = texts();
    let logits = bert(model).classify(&ids, &mask).expect("logits");
    logits.to_vec2().expect("f32")
}

fn assert_near(a: &[Vec<f32>], b: &[Vec<f32>], bound: f32) {
    let lengths = |x: &[Vec<f32>]| x.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(lengths(a), lengths(b));
    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
        assert!((a - b).abs() <= bound, "{a} against {b}");
    }
}

#[test]
fn labels_are_learned() -> Outcome {
    let dir = folder();
    for recipe in ["f32", "delayed", "rowwise"] {
        let mut run = full(dir.path(), recipe, 1);
        let before = run.validate()?.ok_or("held-out texts")?;
        // Two classes and a small new classifier: about as likely as not.
        assert!((before - 2f64.ln()).abs() < 0.1, "{recipe}: {before}");
        steps(&mut run, 12);
        let after = run.validate()?.ok_or("held-out texts")?;
        assert!(after < 0.8 * before, "{recipe}: {before} to {after}");
        assert!(run.accuracy().is_some_and(|share| share > 0.5), "{recipe}");
    }
    let mut run = adapters(dir.path(), dir.path());
    let losses = steps(&mut run, 12);
    assert!(losses[11] < losses[0], "{losses:?}");
    Ok(())
}

#[test]
fn queries_find_their_texts() -> Outcome {
    let dir = folder();
    for (recipe, negative) in [("f32", false), ("delayed", true)] {
        let mut run = queries(dir.path(), recipe, negative);
        let before = run.validate()?.ok_or("held-out queries")?;
        steps(&mut run, 12);
        let after = run.validate()?.ok_or("held-out queries")?;
        assert!(after < 0.9 * before, "{recipe}: {before} to {after}");
        assert!(run.accuracy().is_some_and(|share| share > 0.));
    }
    Ok(())
}

/// The loss from the embeddings of single texts, in f64.
#[test]
fn the_loss_of_queries_is_its_definition() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let base = TrainableModel::open(dir, DType::F32, &Device::Cpu)?;
    let tokenizer = Tokenizer::open(dir)?;
    let embed = |text: &str| -> Vec<f64> {
        let ids = tokenizer.encode(text, true).expect("tokens");
        let ids = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).expect("ids");
        let mask = ids.ones_like().expect("a mask");
        let all = bert(&base.model).embed(&ids, &mask).expect("an embedding");
        let all = all.squeeze(0).expect("one").to_vec1::<f32>().expect("f32");
        all.into_iter().map(f64::from).collect()
    };
    for negative in [false, true] {
        let file = encoder::queries(dir, negative);
        let lines = std::fs::read_to_string(&file)?;
        let lines: Vec<serde_json::Value> = (lines.lines().take(4))
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        let own = encoder::lines(dir, "four.jsonl", lines.clone());
        let options = DatasetOptions::new(24)
            .with_validation(fp8::training::Validation::Files(vec![own.clone()]));
        let data = Dataset::open(&[own], &tokenizer, &options)?;
        let goal = Contrast::new(data, 4)?.with_temperature(0.1)?;
        let rows = goal.validation_batch(0)?;
        let measured = goal.measure(&base.model, &rows)?;

        let of = |key: &str| -> Vec<Vec<f64>> {
            let texts = lines.iter().filter_map(|line| line[key].as_str());
            texts.map(&embed).collect()
        };
        let texts = [of("positive"), of("negative")].concat();
        let (mut loss, mut hits) = (0., 0);
        for (number, query) in of("query").iter().enumerate() {
            let cosine = |text: &Vec<f64>| query.iter().zip(text).map(|(a, b)| a * b).sum::<f64>();
            let scores: Vec<f64> = texts.iter().map(|text| cosine(text) / 0.1).collect();
            let sum: f64 = scores.iter().map(|score| score.exp()).sum();
            loss += (sum.ln() - scores[number]) / 4.;
            hits += usize::from(scores.iter().all(|score| *score <= scores[number]));
        }
        let got = f64::from(measured.loss.to_scalar::<f32>()?);
        assert!((got - loss).abs() < 1e-4, "{got} against {loss}");
        assert_eq!(measured.hits, Some(hits));
        assert_eq!(goal.targets(&rows), 4);
    }
    Ok(())
}

/// Padding has no part in a text's logits, and parts of a batch give its gradient.
#[test]
fn padding_and_parts_change_nothing() -> Outcome {
    let dir = folder();
    let base = classifier(dir.path());
    let together = logits(&base.model);
    let alone = Tensor::new(&[[0u32, 50, 1]], &Device::Cpu)?;
    let alone = bert(&base.model).classify(&alone, &alone.ones_like()?)?;
    assert_near(&together[1..], &alone.to_vec2()?, 1e-5);

    let [one, three] = [1, 3].map(|parts| steps(&mut full(dir.path(), "f32", parts), 3));
    assert_eq!([one.len(), three.len()], [3; 2]);
    for (a, b) in one.iter().zip(&three) {
        assert!((a - b).abs() < 1e-5, "{a} against {b}");
    }
    // Groups of rows stay together.
    let goal = contrast(dir.path(), true);
    let rows = [0, 1, 2, 3].map(|part| {
        let part = goal.micro_batch(2, Part::new(part, 4)).expect("a batch");
        goal.targets(&part)
    });
    assert_eq!(rows, [1, 2, 1, 2]);
    Ok(())
}

#[test]
fn every_step_after_a_pause_is_the_same_to_the_bit() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let makes: [&dyn Fn() -> Run; 4] = [
        &|| full(dir, "f32", 1),
        &|| full(dir, "delayed", 2),
        &|| queries(dir, "rowwise", true),
        &|| adapters(dir, dir),
    ];
    for (number, make) in makes.into_iter().enumerate() {
        let mut whole = make();
        let expected = steps(&mut whole, 5);
        let path = dir.join(format!("{number}.safetensors"));
        let mut got = vec![];
        for step in 1..=5 {
            let mut run = make().with_checkpoint(&path);
            assert_eq!(run.resume()?, step > 1);
            got.extend(steps(&mut run, step));
            run.save()?;
        }
        assert_eq!(got, expected, "case {number}");
    }
    Ok(())
}

#[test]
fn a_trained_classifier_is_a_folder_of_its_own() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let base = classifier(dir);
    let source = base.source;
    let goal: Goal = Box::new(classify(dir));
    let mut run = Trainer::new("run", base.model, base.vars, goal, settings("f32", 1))?;
    steps(&mut run, 4);
    let expected = logits(run.model());
    let trained = Trained::new(&*source, run.vars())?;
    let written = Classifier::new(&trained, &labels());
    let out = dir.join("out");
    let write = WriteOptions::new();
    rewrite::dequantize(&written, &out, DType::F32, &write, &mut rewrite::quiet)?;
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(out.join("config.json"))?)?;
    assert_eq!(
        config["id2label"],
        serde_json::json!({ "0": "cold", "1": "warm" })
    );
    assert_eq!(config["label2id"]["warm"], 1);
    let file = Checkpoint::open_dir(&out)?;
    let names = Source::names(&file);
    assert!(
        names.contains(&"classifier.weight".to_string()),
        "{names:?}"
    );
    let others = names.iter().filter(|name| !name.starts_with("classifier."));
    assert!(
        others.clone().all(|name| name.starts_with("bert.")),
        "{names:?}"
    );
    assert!(out.join("1_Pooling/config.json").exists());
    let again = open(&out, &ModelOptions::new())?;
    assert_eq!(logits(&again), expected);
    assert_eq!(bert(&again).labels(), LABELS);

    // To train on: the classifier stays for the same classes, and is new for others.
    let same = classifier(&out);
    assert_eq!(logits(&same.model), expected);
    let other = ["a", "b", "c"].map(String::from);
    let other = TrainableModel::open_classifier(&out, &other, 1, DType::F32, &Device::Cpu)?;
    assert_eq!(logits(&other.model)[0].len(), 3);
    let features = TrainableModel::open(&out, DType::F32, &Device::Cpu)?.without_classifier()?;
    let goal: Goal = Box::new(contrast(dir, false));
    let mut run = Trainer::new(
        "run",
        features.model,
        features.vars,
        goal,
        settings("f32", 1),
    )?;
    steps(&mut run, 1);

    // In FP8 the classifier stays in high precision.
    let fp8 = dir.join("fp8");
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let report = rewrite::quantize(&written, &fp8, &options, &mut rewrite::quiet)?;
    assert!(report.ignored.contains(&"classifier".to_string()));
    assert!(report.quantized.contains(&"bert.pooler.dense".to_string()));
    let rounded = logits(&open(&fp8, &ModelOptions::new())?);
    assert_near(&rounded, &expected, 0.1);
    Ok(())
}

#[test]
fn an_adapter_brings_its_classifier() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let quantized = dir.join("fp8");
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let file = Checkpoint::open_dir(dir)?;
    rewrite::quantize(&file, &quantized, &options, &mut rewrite::quiet)?;
    for (base, bound) in [(dir, 1e-5), (quantized.as_path(), 0.05)] {
        let mut run = adapters(dir, base);
        steps(&mut run, 6);
        run.model().set_dropout_seed(None);
        let expected = logits(run.model());
        let adapter = base.join("adapter");
        run.model().save_adapter("new", &adapter)?;
        let file = AdapterFile::open(&adapter)?;
        assert_eq!(file.config().labels, LABELS);
        assert_eq!(file.config().task.as_deref(), Some("SEQ_CLS"));
        assert_eq!(file.saved()[0].path, "classifier");

        // A base without a classifier gets one, and loses nothing without the adapter.
        let mut model = open(base, &ModelOptions::new())?;
        let (ids, mask) = texts();
        let features = |model: &Model| -> Vec<f32> {
            let x = bert(model).forward(&ids, &mask).expect("features");
            x.flatten_all().expect("flat").to_vec1().expect("f32")
        };
        let before = features(&model);
        model.load_adapter("tuned", &adapter)?;
        assert_eq!(logits(&model), expected);
        assert_eq!(bert(&model).labels(), LABELS);
        assert!(features(&model) != before);
        model.set_adapter(None)?;
        assert_eq!(features(&model), before);
        assert_eq!(logits(&model), [[0.; 2]; 2]);
        model.set_adapter(Some("tuned"))?;
        model.merge_adapter("tuned")?;
        // A merged layer of an FP8 base no longer casts its inputs.
        assert_near(&logits(&model), &expected, bound);

        let source = Checkpoint::open_dir(base)?;
        let merged = Merged::new(&source, &file)?;
        let merged = Classifier::new(&merged, &labels());
        let out = base.join("merged");
        let write = WriteOptions::new();
        rewrite::dequantize(&merged, &out, DType::F32, &write, &mut rewrite::quiet)?;
        let again = open(&out, &ModelOptions::new())?;
        assert_eq!(bert(&again).labels(), LABELS);
        assert_near(&logits(&again), &expected, bound);
    }
    Ok(())
}
