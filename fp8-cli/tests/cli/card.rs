//! Model cards.

use crate::support::{Dir, failure, output};
use fp8_test_support::language_model;
use std::path::Path;

fn folder() -> (Dir, String) {
    let dir = Dir::new();
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    language_model::write(Path::new(&model));
    (dir, model)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(format!("{path}/README.md")).unwrap()
}

#[test]
fn a_card_keeps_that_of_the_source_and_says_what_was_measured() {
    let (dir, model) = folder();
    let own = "---\nlicense: apache-2.0\nlanguage:\n- en\ntags: [small]\nbase_model: a/older\n---\n# The model\n";
    std::fs::write(format!("{model}/README.md"), own).unwrap();
    let (fp8, text) = (dir.join("fp8"), format!("{model}/text.txt"));
    let args = [
        "quantize",
        &model,
        "--out",
        &fp8,
        "--eval",
        &text,
        "--base-model",
        "owner/small",
    ];
    let command = format!("fp8 {}", args.join(" "));
    let said = output(&args);
    assert!(said.contains("  README.md\n"), "{said}");
    let card = read(&fp8);
    let head = "---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- small\n- fp8\nbase_model: owner/small\nbase_model_relation: quantized\n\
                library_name: transformers\n---\n\n# fp8\n";
    assert!(card.starts_with(head), "{card}");
    assert!(
        card.ends_with("card of `owner/small`: names, figures and code below are that model's.\n\n### The model\n"),
        "{card}"
    );
    // One title, and one block of code: the command that has run.
    assert_eq!(
        card.lines().filter(|line| line.starts_with("# ")).count(),
        1,
        "{card}"
    );
    let made = format!("## How it was made\n\nThis command wrote it:\n\n```bash\n{command}\n```\n");
    assert!(
        card.contains(&made) && card.matches("```").count() == 2,
        "{card}"
    );
    assert!(
        card.contains("\nThis is `owner/small`, quantized.\n"),
        "{card}"
    );
    for part in [
        "| Scheme | channel-token, spelt as compressed-tensors |",
        "| Layers in FP8 | 14 |",
        "- `lm_head`\n",
        "--base-model owner/small\n```",
    ] {
        assert!(card.contains(part), "{part}: {card}");
    }
    // Figures of both, which `fp8 eval` gives too.
    let row = |what: &str| -> Vec<f64> {
        let line = card.lines().find(|line| line.starts_with(what)).unwrap();
        line.split('|')
            .filter_map(|cell| cell.trim().parse().ok())
            .collect()
    };
    let [before, after] = row("| Perplexity on text.txt")[..] else {
        panic!("{card}");
    };
    for (model, figure) in [(&model, before), (&fp8, after)] {
        let found = output(&["eval", model, "--data", &text]);
        let found: f64 = found.split([' ', ',']).nth(1).unwrap().parse().unwrap();
        assert!(
            (found - figure).abs() < 1e-3 * found,
            "{found} against {figure}"
        );
    }
    let [cosine] = row("| Mean cosine")[..] else {
        panic!("{card}");
    };
    assert!((0.99..1.).contains(&cosine), "{cosine}");
}

#[test]
fn a_card_can_be_left_out_and_its_options_are_checked_first() {
    let (dir, model) = folder();
    let out = dir.join("out");
    output(&["quantize", &model, "--out", &out, "--no-card"]);
    assert!(!Path::new(&format!("{out}/README.md")).exists());
    let (other, empty) = (dir.join("other"), dir.join("empty.txt"));
    std::fs::write(&empty, "").unwrap();
    for (args, part) in [
        (["--base-model", "no name"], "expected OWNER/NAME"),
        (["--eval", "no/such/text"], "no/such/text"),
        (["--eval", &empty], "at least 2 tokens to compare"),
    ] {
        let error = failure(&[&["quantize", &model, "--out", &other], &args[..]].concat());
        assert!(error.contains(part), "{error}");
        assert!(!Path::new(&other).exists());
    }
}

#[test]
fn trained_folders_and_adapters_have_cards() {
    let (dir, model) = folder();
    let text = format!("{model}/text.txt");
    let train = |out: &str, more: &[&str]| {
        let own = [
            "train", &model, "--data", &text, "--out", out, "--steps", "2",
        ];
        let sizes = [
            "--batch",
            "4",
            "--context",
            "16",
            "--base-model",
            "owner/small",
        ];
        output(&[&own[..], &sizes, more].concat())
    };
    let (full, lora) = (dir.join("full"), dir.join("lora"));
    train(&full, &["--eval", &text]);
    let card = read(&format!("{full}/model"));
    assert!(card.contains("base_model_relation: finetune\n"), "{card}");
    for part in [
        "# full\n",
        "| Recipe | delayed |",
        "| Steps | 2 |",
        "| Validation perplexity |",
        "| Perplexity on text.txt |",
    ] {
        assert!(card.contains(part), "{part}: {card}");
    }
    train(&lora, &["--lora", "2"]);
    let card = read(&format!("{lora}/adapter"));
    for part in [
        "base_model_relation: adapter\nlibrary_name: peft\ntags:\n- lora\n",
        "fp8 train ",
        "--lora 2",
    ] {
        assert!(card.contains(part), "{part}: {card}");
    }
    let merged = dir.join("merged");
    output(&[
        "merge",
        &model,
        &format!("{lora}/adapter"),
        "--out",
        &merged,
    ]);
    let card = read(&merged);
    assert!(!card.contains("base_model:"), "a path is no name: {card}");
    assert!(
        card.contains("| Base | `model` |") && !card.contains("- fp8"),
        "{card}"
    );
}
