//! What the program refuses on the way of the guide's page on fine-tuning, and what it says to do.

use crate::support::{failure, fp8, refusal, text};
use crate::walk::{FEW, folder, train};
use serde_json::json;
use std::path::Path;

#[test]
fn what_cannot_be_meant_is_refused_and_says_what_to_do() {
    let dir = folder();
    let (model, data, out) = (
        dir.join("model"),
        dir.join("model/text.txt"),
        dir.join("out"),
    );
    let begin = ["train", &model, "--data", &data, "--out", &out];
    let cases: [(&[&str], &str); 17] = [
        (&["--layer", "lm_hed=f32"], "`lm_hed` names no layer"),
        (&["--lora", "33"], "--lora is 33, and a layer has only 16"),
        (
            &["--temperature", "0.1"],
            "--temperature is 0.1, but the data has no queries",
        ),
        (
            &["--steps", "4", "--warmup", "100"],
            "--warmup is 100, but the run has 4 steps",
        ),
        (
            &["--steps", "4", "--finish", "4"],
            "--finish is 4, but the run has 4 steps",
        ),
        (
            &["--recipe", "f32", "--finish", "4"],
            "--finish takes a recipe, and --recipe is f32",
        ),
        (
            &["--recipe", "f32", "--weight-rounding", "stochastic"],
            "--weight-rounding takes a recipe, and --recipe is f32",
        ),
        (&["--lr", "0"], "--lr is 0: expected a number above 0"),
        (&["--lr", "-1"], "--lr is -1: expected a number above 0"),
        (
            &["--steps", "0"],
            "--steps is 0: expected a whole number of at least 1",
        ),
        (&["--steps", "-2"], "--steps is -2: expected"),
        (
            &["--lora", "2", "--dropout", "1.5"],
            "--dropout is 1.5: expected a share",
        ),
        (&["--recipe", "delay"], "did you mean delayed?"),
        (
            &["--resume", "run", "--lr", "1"],
            "leave out --data, --out, --lr",
        ),
        (&["--no-such"], "Try `fp8 train --help`"),
        (&["--batch", "0"], "--batch is 0"),
        (
            &["--weight-decay", "-1"],
            "--weight-decay is -1: expected a number of at least 0",
        ),
    ];
    for (more, part) in cases {
        let line = failure(&[&begin[..], more].concat());
        assert!(line.contains(part), "{more:?}: {line}");
        let garbled = ["?,", "`with_", "LoraConfig", "184467"];
        assert!(!garbled.iter().any(|part| line.contains(part)), "{line}");
        assert!(!Path::new(&out).exists(), "{more:?}");
    }
}

#[test]
fn what_is_no_model_says_what_was_meant() {
    let dir = folder();
    let lora = [&FEW[..], &["--lora", "2", "--no-card"]].concat();
    train(&dir, "run", &lora);
    train(&dir, "full", &[&FEW[..], &["--no-card"]].concat());
    let [model, run, full, adapter] =
        ["model", "run", "full", "run/adapter"].map(|name| dir.join(name));
    let data = dir.join("model/text.txt");
    let eval = |more: &[&str]| failure(&[&["eval", "--data", &data][..], more].concat());
    let line = eval(&[&model, "--adapter", &run]);
    assert!(
        line.contains("did you mean its adapter") && line.contains("run/adapter"),
        "{line}"
    );
    let line = failure(&["merge", &model, &run, "--out", &dir.join("out")]);
    assert!(line.contains("did you mean its adapter"), "{line}");
    assert!(
        eval(&[&run]).contains("folder of a run"),
        "{}",
        eval(&[&run])
    );
    assert!(eval(&[&full]).contains("full/model"), "{}", eval(&[&full]));
    assert!(
        eval(&[&adapter]).contains("is an adapter, not a model"),
        "{}",
        eval(&[&adapter])
    );
    let line = failure(&[
        "train",
        "owner/name",
        "--data",
        &data,
        "--out",
        &dir.join("out"),
    ]);
    assert!(
        line.contains("hf download owner/name --local-dir name"),
        "{line}"
    );
    let line = failure(&[
        "train",
        "hf://owner/name@main",
        "--data",
        &data,
        "--out",
        &model,
    ]);
    assert!(
        line.contains("hf download owner/name --revision main --local-dir name"),
        "{line}"
    );
    // A flag of several files takes a model behind them too.
    let line = failure(&["train", "--out", &dir.join("out"), "--data", &data, &model]);
    assert!(
        line.contains(&format!(
            "--data takes all paths that follow it, {model} too"
        )),
        "{line}"
    );
    let file = dir.join("model.gguf");
    std::fs::write(&file, "GGUF").unwrap();
    let (code, line) = refusal(&["check", &file]);
    assert!(
        code == 2 && line.contains("is a GGUF file, which holds no FP8"),
        "{line}"
    );
    let (code, line) = refusal(&["check", &run]);
    assert!(code == 2 && line.contains("folder of a run"), "{line}");
    // A run of an adapter has no model to train on from.
    let out = dir.join("next");
    let train = |model: &str, out: &str| failure(&["train", model, "--data", &data, "--out", out]);
    let line = train(&dir.join("run/model"), &out);
    assert!(
        line.contains("is the run of an adapter: merge it") && !line.contains("hf download"),
        "{line}"
    );
    let line = train(&adapter, &out);
    assert!(line.contains("To train on from it"), "{line}");
    // A model's folder is no place for a run.
    let line = train(&model, &dir.join("full/model"));
    assert!(line.contains("holds a model (config.json)"), "{line}");
    assert!(!Path::new(&dir.join("full/model/run.json")).exists());
    // An adapter that does not fit says whose it is.
    let config = dir.join("run/adapter/adapter_config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("q_proj", "nothing")).unwrap();
    let out = dir.join("merged");
    for line in [
        eval(&[&model, "--adapter", &adapter]),
        failure(&["merge", &model, &adapter, "--out", &out]),
    ] {
        assert!(line.contains(&format!("was made for {model}")), "{line}");
    }
    let line = failure(&["train", &model, "--data", &data, "--out", &run]);
    for part in ["holds an earlier run", "--resume", "--overwrite"] {
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn data_that_changed_or_is_too_small_is_named() {
    let dir = folder();
    let short = dir.join("short.jsonl");
    std::fs::write(&short, json!({ "text": "a text" }).to_string()).unwrap();
    let (model, out) = (dir.join("model"), dir.join("run"));
    let begin = ["train", &model, "--data", &short, "--out", &out];
    let run = fp8(&[&begin[..], &FEW].concat());
    let errors = text(&run.stderr);
    assert!(run.status.success(), "{errors}");
    assert!(
        errors.contains("--batch is 4, and the data has 1 row"),
        "{errors}"
    );
    assert!(
        errors.contains("no data is left for validation"),
        "{errors}"
    );
    assert!(text(&run.stdout).contains("step     2  train "), "{run:?}");
    std::fs::write(&short, json!({ "text": "another" }).to_string()).unwrap();
    let line = failure(&["train", "--resume", &out]);
    assert!(
        line.contains("data files") && line.contains("have changed since the run began"),
        "{line}"
    );
    // A prompt that fills the row.
    let cut = dir.join("cut.jsonl");
    let long = json!({ "prompt": "a long prompt, too long", "completion": "no" });
    std::fs::write(&cut, long.to_string()).unwrap();
    let train = |more: &[&str]| {
        let always = [
            "train",
            &model,
            "--data",
            &cut,
            "--out",
            &out,
            "--overwrite",
        ];
        failure(&[&always, more].concat())
    };
    let line = train(&["--context", "8"]);
    assert!(line.contains("--context"), "{line}");
    std::fs::write(&cut, "[\n{\"text\": \"a\"}\n]").unwrap();
    let line = train(&[]);
    assert!(line.contains("jq -c '.[]'"), "{line}");
    let question = json!({ "role": "user", "content": "a" });
    let answer = json!({ "role": "assistant", "content": "b" });
    std::fs::write(&cut, json!({ "messages": [question, answer] }).to_string()).unwrap();
    let line = train(&[]);
    for part in [
        "no chat template",
        "tokenizer_config.json",
        "`prompt` and `completion`",
    ] {
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn data_of_which_something_is_not_learned_is_named() {
    let dir = folder();
    let (model, out) = (dir.join("model"), dir.join("run"));
    let (labelled, table) = (dir.join("labelled.jsonl"), dir.join("table.CSV"));
    let line = json!({ "text": "a text to learn", "label": "good" });
    std::fs::write(&labelled, line.to_string()).unwrap();
    std::fs::write(&table, "text,label\na text,good\n").unwrap();
    let begin = ["train", &model, "--data", &labelled, &table, "--out", &out];
    let run = fp8(&[&begin[..], &FEW].concat());
    let (said, errors) = (text(&run.stdout), text(&run.stderr));
    assert!(run.status.success(), "{errors}");
    assert!(
        said.contains("1 label ignored, as a language model learns texts alone"),
        "{said}"
    );
    assert!(
        errors.contains(&format!("{table} is read as plain text")),
        "{errors}"
    );
}

#[test]
fn a_path_is_no_name_on_the_hub() {
    let dir = folder();
    let (model, out) = (dir.join("model"), dir.join("out"));
    for name in ["./model", "../model", "model", "/tmp/model"] {
        let line = failure(&["quantize", &model, "--out", &out, "--base-model", name]);
        assert!(line.contains("expected OWNER/NAME"), "{line}");
    }
    // A name goes into the adapter's configuration, where a path would be of this machine only.
    let more = ["--lora", "2", "--base-model", "owner/name"];
    train(&dir, "run", &[&FEW[..], &more].concat());
    let config = std::fs::read_to_string(dir.join("run/adapter/adapter_config.json")).unwrap();
    assert!(config.contains("\"owner/name\""), "{config}");
}

#[test]
fn a_run_that_has_made_the_model_worse_says_so() {
    let dir = folder();
    let worse = [&FEW[..], &["--lr", "3", "--no-card"]].concat();
    let (_, errors) = train(&dir, "worse", &worse);
    assert!(
        errors.contains("warning: training has raised the validation loss from"),
        "{errors}"
    );
    let (_, errors) = train(&dir, "run", &[&FEW[..], &["--no-card"]].concat());
    assert!(!errors.contains("raised the validation loss"), "{errors}");
}
