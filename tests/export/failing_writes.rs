//! When saving fails, the old files stay as they were.

use crate::net::*;
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::atomic::FileError;
use fp8::checkpoint::{TrainingMeta, save_training};
use fp8::nn::{self, Linear, NamedTensor};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{Autocast, Error, FilesError, fp8_autocast, save_calibrated};
use fp8_test_support::child::{child_under_a_file_size_limit, from_parent};
use fp8_test_support::{assert_text, delayed, device, fill, prepare, skipped, tensor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Everything in a directory, byte for byte.
fn snapshot(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |name: String| (name.clone(), fs::read(dir.join(name)).unwrap());
    names_in(dir).into_iter().map(read).collect()
}

#[track_caller]
fn assert_unchanged(case: &str, dir: &Path, before: &BTreeMap<String, Vec<u8>>) {
    assert_eq!(
        names_in(dir),
        before.keys().cloned().collect::<Vec<_>>(),
        "{case}: files"
    );
    assert!(
        snapshot(dir) == *before,
        "{case}: the old files are not what they were"
    );
}

#[test]
fn a_configuration_that_cannot_be_merged_leaves_everything_as_it_was() {
    let (_vars, net) = calibrated(delayed(16));
    for content in ["[1, 2]", "\"text\"", "{\"open\": ", "", "null"] {
        let dir = dir();
        save_calibrated(&net, dir.path()).unwrap();
        fs::write(dir.path().join("config.json"), content).unwrap();
        let before = snapshot(dir.path());
        let error = save_calibrated(&net, dir.path()).unwrap_err();
        assert!(
            matches!(&error, Error::Files(FilesError::Json { .. })),
            "{content}: {error:?}"
        );
        assert_text(content, error, &["config.json", "not valid"]);
        assert_unchanged(content, dir.path(), &before);
    }
    let dir = dir();
    fs::create_dir(dir.path().join("config.json")).unwrap();
    let error = save_calibrated(&net, dir.path()).unwrap_err();
    assert_text("a directory", error, &["config.json"]);
    assert_eq!(names_in(dir.path()), ["config.json"]);
}

#[test]
fn a_file_where_a_directory_is_needed_is_named() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    fs::write(dir.path().join("taken"), "").unwrap();
    let error = save_calibrated(&net, dir.path().join("taken/below/m.safetensors")).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Files(FilesError::Write(FileError::Io { .. }))
        ),
        "{error:?}"
    );
    assert_text("taken", error, &["taken", "make the directory"]);
    assert_eq!(names_in(dir.path()), ["taken"], "nothing was made");
    // The configuration cannot be a directory either.
    let error = save_calibrated(&net, "/dev/full").unwrap_err();
    assert_text("a device", error, &["/dev/full", "not a directory"]);
}

/// The layer that fails stands in the middle of the file.
#[test]
fn an_error_in_the_middle_of_the_file_keeps_the_old_one() {
    let (vars, net) = calibrated(delayed(16));
    let dir = dir();
    save_calibrated(&net, dir.path()).unwrap();
    let before = snapshot(dir.path());
    drop(vars);
    let Ok(strange) = Tensor::from_raw_buffer(&[0; 16], DType::F6E2M3, &[16], &device()) else {
        skipped("this candle makes no F6E2M3 tensors");
        return;
    };
    let model = (net, NamedTensor::new("strange", strange));
    let error = save_calibrated(&model, dir.path()).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Files(FilesError::Write(FileError::Tensor { .. }))
        ),
        "{error:?}"
    );
    assert_text("strange", error, &["`strange`", "model.safetensors"]);
    assert_unchanged("strange", dir.path(), &before);
}

/// Saves a larger model over the files in `dir` and expects the system to refuse.
fn save_and_fail(case: &str, dir: &Path) {
    let before = snapshot(dir);
    let mut big = Linear::new(tensor(2, &[512, 512]), None).with_path("big");
    prepare(&mut big);
    {
        let _guard = fp8_autocast(Autocast::default().calibrating(true)).unwrap();
        big.forward(&tensor(3, &[2, 512])).unwrap();
    }
    let error = save_calibrated(&big, dir).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Files(FilesError::Write(FileError::Io { .. }))
        ),
        "{case}: {error:?}"
    );
    println!(
        "{case}: {}",
        assert_text(case, error, &["model.safetensors", "cannot"])
    );
    assert_unchanged(case, dir, &before);

    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let model = nn::linear(256, 256, vb.pp("fc")).unwrap();
    let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
    let meta = TrainingMeta {
        step: 1,
        recipe: None,
        random: Value::Null,
        extra: Value::Null,
    };
    let path = dir.join("model.safetensors");
    let error = save_training(&path, &model, &vars, &optimizer, &meta).unwrap_err();
    assert_text(case, error, &["model.safetensors", "cannot"]);
    assert_unchanged(case, dir, &before);
}

const LIMITED: &str = "FP8_TEST_LIMITED_DIRECTORY";

#[test]
#[ignore = "run by a_write_cut_off_by_the_system_keeps_the_old_file in a child process"]
fn under_a_file_size_limit() {
    save_and_fail("file size limit", Path::new(&from_parent(LIMITED)));
}

#[test]
fn a_write_cut_off_by_the_system_keeps_the_old_file() {
    if !cfg!(unix) {
        skipped("needs a Unix shell to set a file size limit");
        return;
    }
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    save_calibrated(&net, dir.path()).unwrap();
    let before = snapshot(dir.path());
    let output = child_under_a_file_size_limit("failing_writes::under_a_file_size_limit")
        .env(LIMITED, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
    assert!(
        text.contains("file size limit: "),
        "the child saved under the limit: {text}"
    );
    assert_unchanged("seen from outside", dir.path(), &before);
}

/// A small file system in memory, mounted where this process may do so.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let dir = dir();
        let mounted = mount(&["-t", "tmpfs", "-o", "size=128k", "tmpfs"], dir.path());
        mounted.then_some(Self(dir))
    }

    fn path(&self) -> PathBuf {
        self.0.path().to_path_buf()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output();
    }
}

fn mount(args: &[&str], dir: &Path) -> bool {
    let output = Command::new("mount").args(args).arg(dir).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn a_full_disk_and_a_read_only_one_keep_the_old_file() {
    let Some(disk) = SmallDisk::mount() else {
        skipped("this process may not mount a small file system");
        return;
    };
    let (_vars, net) = calibrated(delayed(16));
    save_calibrated(&net, disk.path()).unwrap();
    save_and_fail("full disk", &disk.path());
    assert!(mount(&["-o", "remount,ro"], &disk.path()), "remount");
    save_and_fail("read-only", &disk.path());
}

#[test]
fn an_unwritable_directory_keeps_the_old_file() {
    use std::os::unix::fs::PermissionsExt;
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    save_calibrated(&net, dir.path()).unwrap();
    let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
    set(0o555);
    if fs::write(dir.path().join("probe"), "").is_ok() {
        skipped("this process may write everywhere (root)");
    } else {
        save_and_fail("unwritable", dir.path());
    }
    set(0o755);
}

#[test]
fn saving_again_replaces_the_files() {
    let (vars, net) = calibrated(delayed(16));
    let dir = dir();
    save_calibrated(&net, dir.path()).unwrap();
    let before = snapshot(dir.path());
    save_calibrated(&net, dir.path()).unwrap();
    assert_unchanged("the same model", dir.path(), &before);
    fill(&vars, 8);
    calibrate(&net, delayed(16));
    save_calibrated(&net, dir.path()).unwrap();
    assert_eq!(names_in(dir.path()), ["config.json", "model.safetensors"]);
    assert!(snapshot(dir.path()) != before, "another model");
}
