//! Outputs that are closed or full, and arguments that are no text.

#![cfg(unix)]

use crate::support::{Dir, golden, speaking, text};
use fp8_test_support::{language_model, skipped};
use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_fp8"))
}

#[test]
fn a_full_disk_is_an_error() {
    let Ok(full) = OpenOptions::new().write(true).open("/dev/full") else {
        skipped("this system has no /dev/full");
        return;
    };
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    for args in [
        vec!["generate", &model, "--prompt", "w3 w4"],
        vec!["inspect", &model],
    ] {
        let mut command = program();
        command.args(&args).stdout(full.try_clone().unwrap());
        let output = command.stderr(Stdio::piped()).output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {errors}");
        assert!(errors.contains("writing to stdout"), "{args:?}: {errors}");
    }
}

/// Runs a program whose stdout nobody reads.
fn unread(args: &[&str]) -> Output {
    let mut command = program();
    command.args(args).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    child.wait_with_output().unwrap()
}

#[test]
fn a_run_goes_on_where_nobody_reads_its_lines() {
    let dir = Dir::new();
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    language_model::write(Path::new(&model));
    let (data, out) = (dir.join("model/text.txt"), dir.join("run"));
    let args = ["train", &model, "--data", &data, "--out", &out];
    let few = ["--steps", "2", "--batch", "2", "--context", "16"];
    let run = unread(&[&args[..], &few].concat());
    assert!(run.status.success(), "{}", text(&run.stderr));
    assert!(std::fs::exists(dir.join("run/summary.json")).unwrap());
    let again = unread(&["train", "--resume", &out]);
    assert!(again.status.success(), "{}", text(&again.stderr));
    let said = unread(&["inspect", &golden("ct_static_tensor")]);
    assert!(said.status.success(), "{}", text(&said.stderr));
}

#[test]
fn arguments_that_are_no_text_end_no_program() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let mut out = OsString::from(dir.join("out"));
    out.push(OsStr::from_bytes(b"\xff"));
    if std::fs::create_dir(&out).is_err() {
        skipped("names of this file system are UTF-8");
        return;
    }
    for more in [&[][..], &["--overwrite", "--json"]] {
        let mut command = program();
        command.args(["quantize", &model, "--out"]).arg(&out);
        let output = command.args(more).output().unwrap();
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let card = std::fs::read_to_string(Path::new(&out).join("README.md")).unwrap();
        assert!(card.contains("--out "), "{card}");
    }
    let output = program().arg(OsStr::from_bytes(b"\xff")).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}
