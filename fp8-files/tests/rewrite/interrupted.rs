//! A rewrite that stops leaves nothing behind, and keeps the files that were there before.

use crate::helpers::*;
use candle_core::{DType, Tensor};
use fp8_files::rewrite::{self, QuantizeOptions, Source, Spelling, WriteOptions};
use fp8_files::{Error, Result};
use fp8_test_support::child::{child_under_a_file_size_limit, from_parent};
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

#[test]
fn a_cancelled_rewrite_leaves_nothing() {
    let source = open_golden("autofp8_static");
    let options = WriteOptions::new().with_shard_bytes(100_000);
    let mut calls = 0;
    let dir = dir();
    let to = dir.path().join("deep/er/out");
    let mut count = |progress: rewrite::Progress<'_>| {
        assert!(progress.done <= progress.total);
        calls += 1;
        ControlFlow::Continue(())
    };
    rewrite::convert(&source, &to, Spelling::ModelOpt, &options, &mut count).unwrap();
    std::fs::remove_dir_all(dir.path().join("deep")).unwrap();
    assert!(calls > 20);
    for stop in [0, 1, calls / 2, calls - 1] {
        let mut at = 0;
        let mut cancel = |_: rewrite::Progress<'_>| {
            at += 1;
            match at > stop {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let result = rewrite::convert(&source, &to, Spelling::ModelOpt, &options, &mut cancel);
        assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
        assert!(names_in(dir.path()).is_empty(), "stopped at {stop}");
    }
}

/// A source that fails in the middle.
struct Failing<S>(S);

impl<S: Source> Source for Failing<S> {
    fn names(&self) -> Vec<String> {
        self.0.names()
    }
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.shape(name)
    }
    fn dtype(&self, name: &str) -> Option<DType> {
        self.0.dtype(name)
    }
    fn value(&self, name: &str, dtype: DType) -> Result<Tensor> {
        match name.contains("layers.1.mlp") {
            true => Err(Error::MissingTensor {
                tensor: name.into(),
                place: "a file that is gone".into(),
            }),
            false => self.0.value(name, dtype),
        }
    }
    fn config(&self) -> Option<&Value> {
        self.0.config()
    }
    fn directory(&self) -> Option<PathBuf> {
        self.0.directory()
    }
}

#[test]
fn an_error_in_the_middle_keeps_the_old_files() {
    let dir = dir();
    let (plain, to) = (dir.path().join("plain"), dir.path().join("out"));
    plain_model(&plain, (32, 64), false, DType::F32);
    let source = Failing(open(&plain));
    let mut options = QuantizeOptions::default();
    let error = rewrite::quantize(&source, &to, &options, &mut rewrite::quiet).unwrap_err();
    assert!(error.to_string().contains("gone"), "{error}");
    assert_eq!(names_in(dir.path()), ["plain"]);
    // The same with an older model at the target.
    rewrite::quantize(&source.0, &to, &options, &mut rewrite::quiet).unwrap();
    let before = all_facts(&open(&to));
    options.write.overwrite = true;
    rewrite::quantize(&source, &to, &options, &mut rewrite::quiet).unwrap_err();
    assert_eq!(names_in(dir.path()), ["out", "plain"]);
    assert!(all_facts(&open(&to)) == before);
}

#[test]
fn only_models_are_overwritten_and_only_on_request() {
    let dir = dir();
    let source = open_golden("autofp8_static");
    let convert = |to: &Path, overwrite: bool| {
        let options = WriteOptions::new().with_overwrite(overwrite);
        rewrite::convert(
            &source,
            to,
            Spelling::CompressedTensors,
            &options,
            &mut rewrite::quiet,
        )
    };
    let taken = |result: Result<_>| matches!(result, Err(Error::TargetExists { .. }));
    // An empty directory does not count.
    let to = dir.path().join("out");
    std::fs::create_dir(&to).unwrap();
    convert(&to, false).unwrap();
    assert!(taken(convert(&to, false)));
    std::fs::write(to.join("left.txt"), "over").unwrap();
    convert(&to, true).unwrap();
    assert!(!to.join("left.txt").exists());
    assert_eq!(names_in(dir.path()), ["out"]);
    let other = dir.path().join("letters");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("dear.txt"), "you").unwrap();
    assert!(taken(convert(&other, true)));
    assert!(taken(convert(&other.join("dear.txt"), true)));
    assert!(other.join("dear.txt").exists());
    // A checkpoint may be replaced by its own conversion.
    let own = open(&to);
    let options = WriteOptions::new().with_overwrite(true);
    rewrite::convert(&own, &to, Spelling::AutoFp8, &options, &mut rewrite::quiet).unwrap();
    assert!(all_facts(&open(&to)) == all_facts(&source));
}

const LIMITED: &str = "FP8_TEST_LIMITED_DIRECTORY";

#[test]
#[ignore = "run by a_full_disk_leaves_nothing in a child process"]
fn under_a_file_size_limit() {
    let dir = from_parent(LIMITED);
    let source = open_golden("autofp8_static");
    let to = Path::new(&dir).join("out");
    let options = WriteOptions::new();
    let result = rewrite::convert(
        &source,
        &to,
        Spelling::ModelOpt,
        &options,
        &mut rewrite::quiet,
    );
    println!("file size limit: {}", result.unwrap_err());
}

#[test]
fn a_full_disk_leaves_nothing() {
    if !cfg!(unix) {
        println!("skipped: needs a Unix shell to set a file size limit");
        return;
    }
    let dir = dir();
    let output = child_under_a_file_size_limit("interrupted::under_a_file_size_limit")
        .env(LIMITED, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("file size limit: "),
        "{text}"
    );
    assert!(text.contains("cannot"), "{text}");
    assert!(names_in(dir.path()).is_empty());
}
