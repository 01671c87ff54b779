//! Ctrl-C, SIGTERM and kills.

#![cfg(unix)]

use crate::support::{Dir, output, speaking, text};
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

/// A model of this many matrices in high precision.
fn write_model(path: &str, layers: usize) {
    std::fs::create_dir(path).unwrap();
    let weight = |i: usize| {
        let w = Tensor::full(1. + i as f32, (512, 512), &Device::Cpu).unwrap();
        (format!("model.layers.{i}.fc.weight"), w)
    };
    let tensors: HashMap<String, Tensor> = (0..layers).map(weight).collect();
    candle_core::safetensors::save(&tensors, format!("{path}/model.safetensors")).unwrap();
}

fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    let status = Command::new("kill").args([name, &id]).status().unwrap();
    assert!(status.success(), "kill {name}: {status}");
}

/// Sends a signal (`-INT` is Ctrl-C) while the command has unfinished work beside `dir/out`; None if the command finished first.
fn interrupt(dir: &Dir, args: &[&str], name: &str) -> Option<Output> {
    let half_done = || dir.names().iter().any(|name| name.starts_with(".out."));
    let mut child = Command::new(env!("CARGO_BIN_EXE_fp8"))
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while !half_done() {
        if child.try_wait().unwrap().is_some() {
            return None;
        }
        std::thread::yield_now();
    }
    // The process is stopped until the signal has been sent. One that has ended stays a zombie until it is waited for.
    signal(&child, "-STOP");
    let caught = half_done();
    signal(&child, name);
    signal(&child, "-CONT");
    let output = child.wait_with_output().unwrap();
    (caught && !output.status.success()).then_some(output)
}

/// All files and directories below a directory, with their contents.
fn files(path: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(path.to_str().unwrap()));
            found.insert(path, vec![]);
        } else {
            let bytes = std::fs::read(&path).unwrap();
            found.insert(path, bytes);
        }
    }
    found
}

/// Interrupts a command by a signal, on larger and larger models until the signal comes before its end.
fn leaves_nothing(signal: &str, prepare: impl Fn(&Dir, usize) -> Vec<String>) {
    for layers in [48, 192, 768] {
        let dir = Dir::new();
        let args = prepare(&dir, layers);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let before = files(&dir.join(""));
        let Some(output) = interrupt(&dir, &args, signal) else {
            continue;
        };
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let message = text(&output.stderr);
        assert!(
            message.starts_with("error: ") && message.contains("cancelled"),
            "{message}"
        );
        assert!(output.stdout.is_empty(), "{args:?}");
        let after = files(&dir.join(""));
        assert_eq!(
            after.keys().collect::<Vec<_>>(),
            before.keys().collect::<Vec<_>>()
        );
        assert!(after == before, "{args:?} changed a file");
        return;
    }
    panic!("the command was done before the signal each time");
}

#[test]
fn quantize_leaves_nothing_behind() {
    leaves_nothing("-INT", |dir, layers| {
        let (plain, out) = (dir.join("plain"), dir.join("out"));
        write_model(&plain, layers);
        let args = ["quantize", &plain, "--scheme", "mxfp8", "--out", &out];
        args.map(str::to_string).to_vec()
    });
}

#[test]
fn dequantize_keeps_the_model_it_was_to_replace() {
    leaves_nothing("-TERM", |dir, layers| {
        let (plain, codes, out) = (dir.join("plain"), dir.join("codes"), dir.join("out"));
        write_model(&plain, layers);
        output(&["quantize", &plain, "--out", &codes]);
        // There is a model already, which must stay.
        output(&["quantize", &plain, "--ignore", "*.1?.fc", "--out", &out]);
        let args = [
            "dequantize",
            &codes,
            "--dtype",
            "f32",
            "--overwrite",
            "--out",
            &out,
        ];
        args.map(str::to_string).to_vec()
    });
}

/// The model is there by then; only its card is not.
#[test]
fn a_stopped_measurement_leaves_a_whole_model() {
    for words in [10_000, 100_000, 1_000_000] {
        let dir = Dir::new();
        let model = speaking("ct_static_tensor", &dir.join("model"));
        let (out, data) = (dir.join("out"), dir.join("text.txt"));
        std::fs::write(&data, "w3 w4 w5 w6 w70 ".repeat(words / 5)).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_fp8"))
            .args(["quantize", &model, "--out", &out, "--eval", &data])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        while child.try_wait().unwrap().is_none() && !std::fs::exists(&out).unwrap() {
            std::thread::yield_now();
        }
        signal(&child, "-INT");
        let ended = child.wait_with_output().unwrap();
        if ended.status.success() {
            continue;
        }
        let errors = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(130), "{errors}");
        let said = format!("stopped: {out} is complete, but has no README.md");
        assert!(errors.contains(&said), "{errors}");
        assert_eq!(dir.names(), ["model", "out", "text.txt"]);
        assert!(!std::fs::exists(format!("{out}/README.md")).unwrap());
        output(&["check", &out]);
        return;
    }
    panic!("the command was done before the signal each time");
}

/// A kill leaves a copy under a hidden name, which the next run removes.
#[test]
fn the_next_run_removes_the_remains_of_a_killed_one() {
    for layers in [48, 192, 768] {
        let dir = Dir::new();
        let (plain, out) = (dir.join("plain"), dir.join("out"));
        write_model(&plain, layers);
        let args = ["quantize", &plain, "--out", &out];
        if interrupt(&dir, &args, "-KILL").is_none() {
            continue;
        }
        let left = dir.names();
        assert!(
            left.iter().any(|name| name.starts_with(".out.")),
            "{left:?}"
        );
        output(&args);
        assert_eq!(dir.names(), ["out", "plain"]);
        return;
    }
    panic!("the command was done before the signal each time");
}
