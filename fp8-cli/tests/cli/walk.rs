//! The way of the guide's page on fine-tuning: what the program says on it.

use crate::support::{Dir, edit, failure, fp8, json_output, output, speaking, text};
use fp8_test_support::language_model;
use serde_json::{Value, json};
#[cfg(unix)]
use std::io::{BufRead, BufReader};
use std::path::Path;
#[cfg(unix)]
use std::process::{Child, Command, Stdio};

pub fn folder() -> Dir {
    let dir = Dir::new();
    std::fs::create_dir(dir.join("model")).unwrap();
    language_model::write(Path::new(&dir.join("model")));
    dir
}

/// What a run says on stdout and stderr.
pub fn train(dir: &Dir, out: &str, more: &[&str]) -> (String, String) {
    let (model, data, out) = (dir.join("model"), dir.join("model/text.txt"), dir.join(out));
    let all = [&["train", &model, "--data", &data, "--out", &out], more].concat();
    let output = fp8(&all);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{all:?}: {errors}");
    (text(&output.stdout), errors)
}

pub const FEW: [&str; 6] = ["--steps", "2", "--batch", "4", "--context", "16"];

/// The number after `label` in a text.
fn number(text: &str, label: &str) -> f64 {
    let rest = text
        .split(label)
        .nth(1)
        .unwrap_or_else(|| panic!("{label}: {text}"));
    let number: String = rest
        .chars()
        .take_while(|c| c.is_ascii_digit() || *c == '.')
        .collect();
    number.trim_end_matches('.').parse().unwrap()
}

/// The figures are those of the same tokens: equal up to the rounding of sums.
#[test]
fn json_lines_are_measured_as_they_are_trained() {
    let dir = folder();
    let chats = dir.join("chats.jsonl");
    let lines = [
        json!({ "prompt": "a small", "completion": " text, again" }),
        json!({ "prompt": "again and", "completion": " again." }),
        json!({ "prompt": "small, ", "completion": "small. text" }),
    ];
    std::fs::write(&chats, lines.each_ref().map(ToString::to_string).join("\n")).unwrap();
    let (said, _) = train(
        &dir,
        "run",
        &[
            &FEW[..4],
            &["--context", "64", "--validation", &chats, "--eval", &chats],
        ]
        .concat(),
    );
    let before = number(&said, "before training: validation ");
    let eval = |model: &str| json_output(&["eval", model, "--data", &chats, "--json"]);
    let report = eval(&dir.join("model"));
    // The completions and their end tokens.
    let learned: usize = lines
        .iter()
        .map(|line| line["completion"].as_str().unwrap().len() + 1)
        .sum();
    assert_eq!(report["tokens"], learned);
    let loss = report["nll_per_token"].as_f64().unwrap();
    assert!((loss - before).abs() < 1e-4, "{loss} against {before}");
    // What the card says is the same again.
    let card = std::fs::read_to_string(dir.join("run/model/README.md")).unwrap();
    let row = card
        .lines()
        .find(|line| line.contains("Perplexity on chats.jsonl"))
        .unwrap();
    let figures: Vec<f64> = row
        .split('|')
        .filter_map(|cell| cell.trim().parse().ok())
        .collect();
    let after = eval(&dir.join("run/model"))["perplexity"].as_f64().unwrap();
    for (figure, own) in figures.iter().zip([loss.exp(), after]) {
        assert!((figure - own).abs() < 1e-3 * own, "{row}: {own}");
    }
    assert_eq!(figures.len(), 2, "{row}");
    let line = failure(&[
        "eval",
        &dir.join("model"),
        "--data",
        &chats,
        "--tokens",
        "8",
    ]);
    assert!(line.contains("--tokens is for plain text"), "{line}");
}

/// The words, not the letters of the JSON, calibrate a model.
#[test]
fn json_lines_calibrate_as_their_texts_do() {
    let dir = Dir::new();
    let model = speaking("ct_channel_token_bf16", &dir.join("model"));
    let (lines, plain) = (dir.join("a.jsonl"), dir.join("a.txt"));
    let words = "w3 w4 w5 w6 w70";
    std::fs::write(&lines, json!({ "text": words }).to_string()).unwrap();
    std::fs::write(&plain, words).unwrap();
    let calibrated = |data: &str, out: &str| {
        let out = dir.join(out);
        let scheme = ["--scheme", "static-tensor", "--calibrate", data];
        output(&[&["quantize", &model, "--out", &out][..], &scheme].concat());
        out
    };
    let (one, two) = (calibrated(&lines, "one"), calibrated(&plain, "two"));
    let weights = |dir: &str| std::fs::read(format!("{dir}/model.safetensors")).unwrap();
    assert!(weights(&one) == weights(&two), "other scales of inputs");
}

#[test]
fn a_row_has_no_more_tokens_than_the_model_has_positions() {
    let dir = folder();
    let (said, _) = train(&dir, "run", &["--steps", "1", "--batch", "2"]);
    assert!(
        said.contains("--context is 64, as the model has no more positions"),
        "{said}"
    );
    let stored: Value =
        serde_json::from_slice(&std::fs::read(dir.join("run/run.json")).unwrap()).unwrap();
    assert_eq!(stored["context"], 64);
    let (model, data, out) = (
        dir.join("model"),
        dir.join("model/text.txt"),
        dir.join("no"),
    );
    let args = [
        "train",
        &model,
        "--data",
        &data,
        "--out",
        &out,
        "--context",
        "65",
    ];
    let line = failure(&args);
    assert!(line.contains("pass --context 64 or less"), "{line}");
}

#[test]
fn a_run_says_what_it_does_in_a_few_lines() {
    let dir = folder();
    let (said, errors) = train(
        &dir,
        "run",
        &[&FEW[..], &["--layer", "*.down_proj=f32"]].concat(),
    );
    for part in [
        "12 layers in FP8 by delayed",
        "2 layers in high precision, `*.down_proj` is off: model.layers.0.mlp.down_proj",
        "step     2  train ",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(said.lines().count() <= 10, "{said}");
    assert!(!said.contains("export") && !said.contains("::"), "{said}");
    assert!(!errors.contains("warning"), "{errors}");
    // The base's loss is that of the base, whatever recipe trains it.
    let (high, _) = train(&dir, "high", &[&FEW[..], &["--recipe", "f32"]].concat());
    let before = "before training: validation ";
    assert_eq!(number(&said, before), number(&high, before));
    // The mean of the steps since the last line.
    let losses = std::fs::read_to_string(dir.join("run/metrics.jsonl")).unwrap();
    let lines = losses
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let train_loss = |line: &Value| line["train_loss"].as_f64().filter(|_| line["step"] == 2);
    let last = lines
        .filter_map(|line| train_loss(&line))
        .next_back()
        .unwrap();
    assert!(
        (number(&said, "step     2  train ") - last).abs() < 1e-4,
        "{said} {last}"
    );
    // Finished.
    let finished = dir.join("run");
    let modified = || {
        std::fs::metadata(dir.join("run/summary.json"))
            .unwrap()
            .modified()
            .unwrap()
    };
    let begin = modified();
    let said = output(&["train", "--resume", &finished]);
    assert!(said.contains("already finished: 2 of 2 steps"), "{said}");
    assert_eq!(modified(), begin);
    // Killed before the first checkpoint.
    std::fs::remove_file(dir.join("run/summary.json")).unwrap();
    std::fs::remove_dir_all(dir.join("run/checkpoint")).unwrap();
    let said = output(&["train", "--resume", &finished]);
    assert!(said.contains("beginning again at step 0"), "{said}");
    assert!(said.contains("before training: validation"), "{said}");
}

/// Weights in FP8 have larger steps than small updates.
#[test]
fn a_merge_says_what_is_left_of_the_updates() {
    let dir = folder();
    let base = dir.join("fp8");
    output(&["quantize", &dir.join("model"), "--out", &base]);
    let data = dir.join("model/text.txt");
    let train = ["train", &base, "--data", &data, "--out", &dir.join("run")];
    output(&[&train[..], &FEW, &["--lora", "2", "--no-card"]].concat());
    let merge = |base: &str, out: &str| {
        let (adapter, out) = (dir.join("run/adapter"), dir.join(out));
        let args = ["merge", base, &adapter, "--out", &out];
        let run = fp8(&[
            &args[..],
            &["--scheme", "channel-token", "--no-card", "--json"],
        ]
        .concat());
        let report: Value = serde_json::from_slice(&run.stdout).unwrap();
        (report, text(&run.stderr))
    };
    let (report, said) = merge(&base, "into-fp8");
    assert!(
        said.contains("warning: 4 layers with an update were FP8 before"),
        "{said}"
    );
    assert!(
        said.contains("high precision that the base was made from"),
        "{said}"
    );
    assert!(!said.contains("fp8 convert"), "{said}");
    assert_eq!(
        report["update_errors"].as_object().unwrap().len(),
        4,
        "{report}"
    );
    assert_eq!(
        report["requantized"].as_array().unwrap().len(),
        4,
        "{report}"
    );
    let (report, said) = merge(&dir.join("model"), "into-model");
    assert!(!said.contains("FP8 before"), "{said}");
    assert_eq!(report["update_errors"], json!({}));
    // Layers without an update keep their codes.
    let diff = json_output(&["diff", "--json", &base, &dir.join("into-fp8")]);
    let rows = diff["tensors"].as_array().unwrap();
    assert!(rows.len() > 4, "{diff}");
    for row in rows {
        let name = row["name"].as_str().unwrap();
        let updated = name.contains("q_proj") || name.contains("v_proj");
        assert!(updated || row["equal"] == true, "{row}");
    }
}

/// Ctrl-C and SIGTERM, and what a script sees of them.
#[cfg(unix)]
#[test]
fn a_stopped_run_says_so_at_once_and_does_not_succeed() {
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let dir = folder();
        let mut child = endless(&dir, 4);
        // The handler is set when there is a step.
        wait_for_a_step(&dir, &mut child);
        send(signal, &child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        let (said, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(
            errors.contains("stopping after this step; again to abort"),
            "{errors}"
        );
        assert!(
            said.contains("stopped; continue with `fp8 train --resume"),
            "{said}"
        );
        // The step at which it stopped was saved: a run of that many steps has none to make.
        let out = dir.join("run");
        let steps = std::fs::read_to_string(dir.join("run/metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(steps.lines().last().unwrap()).unwrap();
        let checkpoint = dir.join("run/checkpoint/delayed.safetensors");
        let saved = fp8::checkpoint::training_meta(checkpoint).unwrap().step;
        assert_eq!(last["step"], saved);
        // It continues where it stopped.
        edit(&format!("{out}/run.json"), |run| run["steps"] = json!(1));
        let error = failure(&["train", "--resume", &out]);
        assert!(error.contains("in the run to resume"), "{error}");
    }
}

#[cfg(unix)]
#[test]
fn a_second_request_ends_a_run_within_a_step_and_saves_nothing() {
    let dir = folder();
    // Steps that last much longer than two signals.
    let mut child = endless(&dir, 500);
    wait_for_a_step(&dir, &mut child);
    send("-TERM", &child);
    let errors = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut errors = errors.map(Result::unwrap);
    assert!(errors.any(|line| line.contains("again to abort")));
    send("-TERM", &child);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let saved = std::fs::read_dir(dir.join("run/checkpoint")).unwrap();
    assert_eq!(saved.count(), 0);
}

#[cfg(unix)]
fn send(signal: &str, child: &Child) {
    let mut kill = Command::new("kill");
    let sent = kill.args([signal, &child.id().to_string()]);
    assert!(sent.status().unwrap().success());
}

/// A run into `run` that does not end by itself, with so many rows in a step.
#[cfg(unix)]
fn endless(dir: &Dir, batch: usize) -> Child {
    let (model, data, out) = (
        dir.join("model"),
        dir.join("model/text.txt"),
        dir.join("run"),
    );
    Command::new(env!("CARGO_BIN_EXE_fp8"))
        .args(["train", &model, "--data", &data, "--out", &out])
        .args(["--steps", "100000", "--context", "16"])
        .args(["--batch", &batch.to_string()])
        // No checkpoint before it is stopped.
        .args(["--checkpoint-every", "100000", "--no-card"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[cfg(unix)]
fn wait_for_a_step(dir: &Dir, child: &mut Child) {
    let metrics = dir.join("run/metrics.jsonl");
    let began = || std::fs::read_to_string(&metrics).is_ok_and(|text| text.contains("train_loss"));
    while !began() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::yield_now();
    }
}
