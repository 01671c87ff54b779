//! `fp8 train`: results, and what is left after a kill.

use crate::support::{Dir, failure, output};
use fp8_test_support::language_model;
use serde_json::Value;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn folder() -> Dir {
    let dir = Dir::new();
    std::fs::create_dir(dir.join("model")).unwrap();
    language_model::write(Path::new(&dir.join("model")));
    dir
}

/// The arguments of a run into `out`.
fn arguments(dir: &Dir, out: &str, more: &[&str]) -> Vec<String> {
    let text = dir.join("model/text.txt");
    let own = [
        "train",
        &dir.join("model"),
        "--data",
        &text,
        "--out",
        &dir.join(out),
    ];
    let sizes = [
        "--batch",
        "4",
        "--context",
        "16",
        "--lr",
        "3e-3",
        "--checkpoint-every",
        "2",
    ];
    let all = own.iter().chain(&sizes).chain(more);
    all.map(|word| word.to_string()).collect()
}

fn train(dir: &Dir, out: &str, more: &[&str]) -> String {
    let args = arguments(dir, out, more);
    output(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

fn json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Losses by step, training and validation, as they are written.
fn losses(dir: &Dir, out: &str) -> Vec<(u64, String, String)> {
    let text = std::fs::read_to_string(dir.join(&format!("{out}/metrics.jsonl"))).unwrap();
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let number = |key: &str| line[key].to_string();
        (
            line["step"].as_u64().unwrap(),
            number("train_loss"),
            number("val_loss"),
        )
    };
    text.lines().map(line).collect()
}

#[test]
fn all_weights_are_trained_and_written() {
    let dir = folder();
    let said = train(&dir, "run", &["--steps", "6", "--stats", "3"]);
    assert!(said.contains("14 layers in FP8 by delayed"), "{said}");
    let summary = json(&dir.join("run/summary.json"));
    assert_eq!(summary["steps"], 6);
    let first = losses(&dir, "run")[0].2.parse::<f64>().unwrap();
    assert!(summary["final_val_loss"].as_f64().unwrap() < first);
    assert_eq!(summary["converted_layers"], 14);
    // The files ask for no FP8, so they are judged without it too.
    let written = summary["written_val_loss"].as_f64().unwrap();
    assert_ne!(Some(written), summary["final_val_loss"].as_f64());
    assert!(
        said.contains(&format!(
            "as written, without the recipe: validation {written:.4}"
        )),
        "{said}"
    );
    let card = std::fs::read_to_string(dir.join("run/model/README.md")).unwrap();
    let row = card
        .lines()
        .find(|line| line.starts_with("| Validation loss |"));
    let row = row.unwrap_or_else(|| panic!("{card}"));
    assert!(row.contains(&format!("{written:.5}")), "{row}, {written}");
    for file in [
        "loss.svg",
        "stats.jsonl",
        "model/model.safetensors",
        "model/tokenizer.json",
    ] {
        let length = std::fs::metadata(dir.join(&format!("run/{file}")))
            .unwrap()
            .len();
        assert!(length > 0, "{file}");
    }
    // What was written is the model that was validated.
    let text = dir.join("model/text.txt");
    let before = output(&["eval", &dir.join("model"), "--data", &text, "--json"]);
    let after = output(&["eval", &dir.join("run/model"), "--data", &text, "--json"]);
    let perplexity = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap();
        value["perplexity"].as_f64().unwrap()
    };
    assert!(perplexity(&after) < perplexity(&before), "{before} {after}");
}

/// The operands of high precision are stored with the run and change its losses, but not what is measured before and after it.
#[test]
fn operands_are_a_setting_of_the_run() {
    let dir = folder();
    let stored = |out: &str| json(&dir.join(&format!("{out}/run.json")))["operands"].clone();
    for operands in ["f32", "bf16"] {
        train(&dir, operands, &["--steps", "2", "--operands", operands]);
        assert_eq!(stored(operands), operands);
    }
    let [plain, rounded] = ["f32", "bf16"].map(|out| losses(&dir, out));
    assert_eq!(plain[0].0, 0);
    assert_eq!(plain[0], rounded[0]);
    assert_ne!(plain[1], rounded[1]);
    // Nor what is measured of the written model after it.
    train(
        &dir,
        "both",
        &["--steps", "2", "--recipe", "f32", "--operands", "bf16"],
    );
    let summary = json(&dir.join("both/summary.json"));
    let [rounded, written] =
        ["final_val_loss", "written_val_loss"].map(|key| summary[key].as_f64());
    assert!(written.is_some() && written != rounded, "{summary}");
    // By default bf16 where FP8 is trained and bf16 is faster.
    let fast = match fp8::fp8_candle::ops::multiplies_bf16() {
        true => "bf16",
        false => "f32",
    };
    for (recipe, expected) in [("delayed", fast), ("f32", "f32")] {
        let out = format!("by-{recipe}");
        train(&dir, &out, &["--steps", "1", "--recipe", recipe]);
        assert_eq!(stored(&out), expected, "{recipe}");
    }
}

#[test]
fn adapters_are_trained_beside_an_fp8_model() {
    let dir = folder();
    let fp8 = dir.join("fp8");
    output(&["quantize", &dir.join("model"), "--out", &fp8]);
    let text = dir.join("model/text.txt");
    let out = dir.join("run");
    let args = [
        "train",
        &fp8,
        "--data",
        &text,
        "--out",
        &out,
        "--steps",
        "6",
        "--batch",
        "4",
        "--context",
        "16",
        "--lora",
        "4",
        "--lr",
        "1e-2",
        "--target",
        "q_proj, up_proj",
    ];
    let said = output(&args);
    assert!(said.contains("trains 0.001 million parameters"), "{said}");
    let config = json(&dir.join("run/adapter/adapter_config.json"));
    assert_eq!(
        (config["r"].as_f64(), config["lora_alpha"].as_f64()),
        (Some(4.), Some(8.))
    );
    let perplexity = |more: &[&str]| {
        let args = [&["eval", &fp8, "--data", &text, "--json"], more].concat();
        let value: Value = serde_json::from_str(&output(&args)).unwrap();
        value["perplexity"].as_f64().unwrap()
    };
    let adapter = dir.join("run/adapter");
    assert!(perplexity(&["--adapter", &adapter]) < perplexity(&[]));
}

/// How often runs are killed, in all: `FP8_KILLS`.
fn kills_wanted() -> usize {
    match std::env::var("FP8_KILLS") {
        Ok(number) => number.parse().expect("FP8_KILLS is a number"),
        Err(_) => 7,
    }
}

/// Runs the program for at most so long and kills it then. Whether it has ended before.
fn ends_within(time: Duration, args: &[String]) -> bool {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fp8"));
    command.args(args);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let begin = Instant::now();
    let mut child = command.spawn().unwrap();
    while begin.elapsed() < time {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status}: {args:?}");
            return true;
        }
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    false
}

/// Runs that were killed at any moment, again and again, go on as if they had not been.
#[test]
fn a_killed_run_repeats_every_loss() {
    let dir = folder();
    let steps = ["--steps", "12", "--recipe", "delayed"];
    let begin = Instant::now();
    train(&dir, "whole", &steps);
    let mut whole = begin.elapsed();
    let expected = losses(&dir, "whole");
    let model = |run: &str| std::fs::read(dir.join(&format!("{run}/model/model.safetensors")));

    // Moments differ from run to run of the test as they do between machines.
    let random = RandomState::new();
    let (mut kills, mut run) = (0, 0);
    while kills < kills_wanted() {
        let name = format!("killed-{run}");
        let resume = ["train", "--resume", &dir.join(&name)].map(String::from);
        let mut args = arguments(&dir, &name, &steps);
        let mut own = 0;
        loop {
            let share = random.hash_one((run, own)) as f64 / u64::MAX as f64;
            let begin = Instant::now();
            if ends_within(whole.mul_f64(share), &args) {
                if own == 0 {
                    // The first run may have been slow for once, and then most kills would come too late.
                    whole = whole.min(begin.elapsed());
                }
                break;
            }
            own += 1;
            if Path::new(&dir.join(&format!("{name}/run.json"))).exists() {
                args = resume.to_vec();
            }
        }
        assert_eq!(losses(&dir, &name), expected, "{name}, after {own} kills");
        let equal = model(&name).unwrap() == model("whole").unwrap();
        assert!(equal, "{name}: the model differs after {own} kills");
        kills += own;
        run += 1;
    }
    println!("{kills} kills in {run} runs");
}

#[test]
fn what_cannot_be_trained_is_said_before_a_folder_is_made() {
    let dir = folder();
    let refused = |more: &[&str]| {
        let args = arguments(&dir, "run", more);
        let error = failure(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(!Path::new(&dir.join("run")).exists(), "{error}");
        error
    };
    assert!(
        refused(&["--recipe", "f32", "--layer", "q_proj=delayed"])
            .contains("--layer takes a recipe")
    );
    assert!(refused(&["--recipe", "f32", "--stats", "2"]).contains("--stats takes a recipe"));
    assert!(refused(&["--recipe", "delayed", "--lora", "2"]).contains("--lora"));
    assert!(refused(&["--target", "q_proj"]).contains("--lora"));
    let (model, out) = (dir.join("model"), dir.join("run"));
    let text = dir.join("model/text.txt");
    let error = failure(&[
        "train",
        &model,
        "--data",
        &text,
        "--out",
        &out,
        "--context",
        "65",
    ]);
    assert!(error.contains("the model has 64 positions"), "{error}");
    assert!(refused(&["--recipe", "fp7"]).contains("fp7"));
    assert!(refused(&["--layer", "q_proj"]).contains("PATTERN=RECIPE"));
    assert!(
        refused(&["--micro-batches", "8"]).contains("--micro-batches is 8, but a step has 4 rows")
    );
    assert!(refused(&["--lora", "2", "--target", "nothing"]).contains("nothing"));
    assert!(refused(&["--lora", "2", "--target", "q_proj,"]).contains("before and after"));
    assert!(refused(&["--validation", "no/such/file"]).contains("no/such/file"));
    let error = failure(&["train", "--resume", &dir.join("model")]);
    assert!(error.contains("holds no run to resume"), "{error}");
    train(&dir, "run", &["--steps", "1"]);
    let args = arguments(&dir, "run", &["--steps", "1"]);
    let error = failure(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(error.contains("holds an earlier run"), "{error}");
}
