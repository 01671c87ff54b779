//! What is written never replaces what is read.

use crate::support::{Dir, failure, output, refusal, write_ids};
use candle_core::{Device, Tensor};
use fp8_test_support::language_model;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A folder with a model, an adapter for it and the FP8 form of the model.
fn folder() -> Dir {
    let dir = Dir::new();
    std::fs::create_dir(dir.join("model")).unwrap();
    language_model::write(Path::new(&dir.join("model")));
    output(&["quantize", &dir.join("model"), "--out", &dir.join("fp8")]);
    let text = dir.join("model/text.txt");
    let out = dir.join("run");
    let train = ["train", &dir.join("fp8"), "--data", &text, "--out", &out];
    let few = ["--lora", "2", "--steps", "1", "--batch", "2", "--no-card"];
    output(&[&train[..], &few].concat());
    dir
}

/// All files below a folder with their lengths.
fn files(path: &Path) -> BTreeMap<PathBuf, u64> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        match entry.path().is_dir() {
            true => found.extend(files(&entry.path())),
            false => {
                found.insert(entry.path(), entry.metadata().unwrap().len());
            }
        }
    }
    found
}

#[test]
fn no_command_writes_over_or_into_what_it_reads() {
    let dir = folder();
    let [model, fp8, adapter] = ["model", "fp8", "run/adapter"].map(|name| dir.join(name));
    let text = format!("{model}/text.txt");
    let writers = [
        (vec!["quantize", &model], vec![&model]),
        (vec!["quantize", &model, "--eval", &text], vec![&model]),
        (vec!["convert", &fp8, "--to", "modelopt"], vec![&fp8]),
        (vec!["convert", &fp8, "--to", "gguf"], vec![&fp8]),
        (vec!["dequantize", &fp8], vec![&fp8]),
        (vec!["merge", &fp8, &adapter], vec![&fp8, &adapter]),
        (vec!["train", &fp8, "--data", &text], vec![&fp8]),
    ];
    let before = files(Path::new(&dir.join("")));
    for (args, read) in &writers {
        for read in read {
            let mut targets = vec![
                (*read).clone(),
                format!("{read}/new"),
                format!("{read}/../fp8/../"),
            ];
            // The name of a file gets no link.
            if cfg!(unix) && Path::new(read).is_dir() {
                let link = dir.join("link");
                let _ = std::fs::remove_file(&link);
                #[cfg(unix)]
                std::os::unix::fs::symlink(read, &link).unwrap();
                targets.push(format!("{link}/new"));
                targets.push(link);
            }
            for out in &targets {
                let all = [&args[..], &["--out", out, "--overwrite"]].concat();
                let (code, line) = refusal(&all);
                assert_eq!(code, 2, "{all:?}: {line}");
                assert!(
                    line.contains("--out: ") && line.contains("which is read"),
                    "{all:?}: {line}"
                );
            }
        }
    }
    let _ = std::fs::remove_file(dir.join("link"));
    assert_eq!(files(Path::new(&dir.join(""))), before);
}

#[test]
fn logits_keep_away_from_ids_model_and_adapter() {
    let dir = folder();
    let [fp8, adapter, ids] = ["fp8", "run/adapter", "ids.safetensors"].map(|name| dir.join(name));
    write_ids(&ids, Tensor::new(&[[3u32, 4]], &Device::Cpu).unwrap());
    let before = files(Path::new(&dir.join("")));
    for out in [
        ids.clone(),
        format!("{adapter}/../../ids.safetensors"),
        format!("{fp8}/model.safetensors"),
        format!("{fp8}/logits.safetensors"),
        format!("{adapter}/logits.safetensors"),
    ] {
        let args = [
            "logits",
            &fp8,
            "--adapter",
            &adapter,
            "--ids",
            &ids,
            "--out",
            &out,
        ];
        let (code, line) = refusal(&args);
        assert_eq!(code, 2, "{out}: {line}");
        assert!(
            line.contains("--out: ") && line.contains("which is read"),
            "{out}: {line}"
        );
    }
    assert_eq!(files(Path::new(&dir.join(""))), before);
}

#[test]
fn a_run_keeps_away_from_its_data() {
    let dir = folder();
    std::fs::create_dir(dir.join("texts")).unwrap();
    std::fs::copy(dir.join("model/text.txt"), dir.join("texts/a.txt")).unwrap();
    let texts = dir.join("texts");
    let line = failure(&[
        "train",
        &dir.join("model"),
        "--data",
        &texts,
        "--out",
        &format!("{texts}/run"),
    ]);
    assert!(
        line.contains("lies within") && line.contains(&texts),
        "{line}"
    );
    // Its own results would be removed with the earlier run.
    let line = failure(&[
        "train",
        &dir.join("model"),
        "--data",
        &dir.join("run/metrics.jsonl"),
        "--out",
        &dir.join("run"),
        "--overwrite",
    ]);
    assert!(
        line.contains("holds") && line.contains("run/metrics.jsonl"),
        "{line}"
    );
    assert!(Path::new(&dir.join("run/adapter")).is_dir());
}

#[test]
fn a_folder_does_not_get_the_name_of_a_gguf_file() {
    let dir = folder();
    let (fp8, adapter) = (dir.join("fp8"), dir.join("run/adapter"));
    let out = dir.join("x2.gguf");
    for args in [
        vec!["merge", &fp8, &adapter],
        vec!["quantize", &fp8],
        vec!["dequantize", &fp8],
        vec!["convert", &fp8, "--to", "autofp8"],
    ] {
        let line = failure(&[&args[..], &["--out", &out]].concat());
        assert!(
            line.contains("x2.gguf: this command writes a directory"),
            "{line}"
        );
        assert!(!Path::new(&out).exists());
    }
    // A GGUF file of any name is read as one.
    let plain = dir.join("plain-name");
    output(&[
        "convert",
        &dir.join("model"),
        "--to",
        "gguf",
        "--pre",
        "llama-bpe",
        "--type",
        "f32",
        "--out",
        &plain,
    ]);
    let text = dir.join("model/text.txt");
    let perplexity = |model: &str| output(&["eval", model, "--data", &text]);
    assert_eq!(perplexity(&plain), perplexity(&dir.join("model")));
}
