//! Kills a process after every single step of an exchange, then checks what readers find and what the next save does.

use super::*;
use fp8_test_support::child::{child, from_parent};
use std::collections::BTreeMap;
use tempfile::{TempDir, tempdir};

const CHILD: &str = "FP8_TEST_TOGETHER_DIRECTORY";
const STEP: &str = "FP8_TEST_TOGETHER_STEP";

fn part<'a>(name: &str, content: &'a str) -> Part<'a> {
    Part::new(name, move |out| {
        out.write_all(content.as_bytes())
            .map_err(FileError::io(Path::new("test"), "write"))
    })
}

fn save(directory: &Path, state: &str, step: &mut dyn FnMut()) {
    let parts = vec![part("model", state), part("config", state)];
    replace_watched(directory, parts, step).unwrap();
}

/// Names and contents of the files that a program can read; hidden directories are left out.
fn seen(directory: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(directory).unwrap();
    let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    entries
        .map(name)
        .filter_map(|name| Some((name.clone(), fs::read_to_string(directory.join(name)).ok()?)))
        .collect()
}

fn state(directory: &Path) -> Option<String> {
    let seen = seen(directory);
    let (model, config) = (seen.get("model"), seen.get("config"));
    assert_eq!(model, config, "a model and a configuration of two states");
    model.cloned()
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Runs in a process that ends in the middle of a save.
#[test]
#[ignore = "run by die_at in a child process"]
fn child_that_dies_while_it_saves() {
    let directory = from_parent(CHILD);
    let mut left: usize = from_parent(STEP).parse().unwrap();
    save(Path::new(&directory), "new", &mut || {
        if left == 0 {
            // Like a kill: nothing is cleaned up.
            std::process::abort();
        }
        left -= 1;
    });
}

/// Saves "new" in a child process that dies after `step` steps. Returns whether the save finished before.
fn die_at(directory: &Path, step: usize) -> bool {
    let output = child("atomic::together::tests::child_that_dies_while_it_saves")
        .env(CHILD, directory)
        .env(STEP, step.to_string())
        .output()
        .unwrap();
    let finished = output.status.success();
    // It has run, and died of the abort and not of a panic.
    let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
    assert_eq!(finished, ran, "{output:?}");
    assert_ne!(output.status.code(), Some(101), "{output:?}");
    finished
}

#[derive(Debug, Clone, Copy)]
enum Before {
    Nothing,
    Pair,
    /// Only the configuration, as beside a model that was never exported.
    One,
    /// Links to files elsewhere, as in the cache of a model hub.
    Links,
}

fn prepare(before: Before) -> (TempDir, TempDir) {
    let (dir, elsewhere) = (tempdir().unwrap(), tempdir().unwrap());
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    match before {
        Before::Nothing => {}
        Before::Pair => save(dir.path(), "old", &mut || {}),
        Before::One => fs::write(dir.path().join("config"), "old").unwrap(),
        Before::Links => {
            for name in ["model", "config"] {
                let path = elsewhere.path().join(name);
                fs::write(&path, "old").unwrap();
                symlink(&path, &dir.path().join(name)).unwrap();
            }
        }
    }
    (dir, elsewhere)
}

#[cfg(unix)]
#[test]
fn a_kill_after_any_step_leaves_the_old_files_or_the_new_ones() {
    for before in [Before::Nothing, Before::Pair, Before::One, Before::Links] {
        let mut step = 0;
        loop {
            let (dir, elsewhere) = prepare(before);
            let old = seen(dir.path());
            let ended = die_at(dir.path(), step);
            let now = seen(dir.path());
            let new = now.get("model").is_some_and(|model| model == "new");
            let case = format!("{before:?}, step {step}");
            if new {
                assert_eq!(state(dir.path()).as_deref(), Some("new"), "{case}");
            } else {
                assert_eq!(now, old, "{case}");
            }
            assert_eq!(now["notes.txt"], "mine", "{case}");
            // The next process cleans up first, which changes nothing that readers see.
            finish_earlier(dir.path()).unwrap();
            assert_eq!(seen(dir.path()), now, "{case}: afterwards");
            let shown: Vec<String> = now.keys().cloned().collect();
            assert_eq!(names(dir.path()), shown, "{case}: nothing is left");
            if matches!(before, Before::Links) {
                for name in ["model", "config"] {
                    let content = fs::read_to_string(elsewhere.path().join(name)).unwrap();
                    assert_eq!(content, "old", "{case}: not written through a link");
                }
            }
            save(dir.path(), "newer", &mut || {});
            assert_eq!(state(dir.path()).as_deref(), Some("newer"), "{case}");
            assert_eq!(
                names(dir.path()),
                ["config", "model", "notes.txt"],
                "{case}"
            );
            if ended {
                assert!(new && step >= 7, "{case}: there are steps to die at");
                break;
            }
            step += 1;
        }
    }
}

#[test]
fn an_error_in_the_second_file_keeps_both() {
    let (dir, _) = prepare(Before::Pair);
    let fail = Part::new("config", |_| {
        Err(FileError::io(Path::new("config"), "write")(
            io::Error::other("no more"),
        ))
    });
    let error = replace_together(dir.path(), vec![part("model", "new"), fail]).unwrap_err();
    assert!(error.to_string().contains("no more"), "{error}");
    assert_eq!(state(dir.path()).as_deref(), Some("old"));
    assert_eq!(names(dir.path()), ["config", "model", "notes.txt"]);
}

#[cfg(unix)]
#[test]
fn permissions_stay() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, _) = prepare(Before::Pair);
    let path = dir.path().join("model");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    save(dir.path(), "new", &mut || {});
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    assert_eq!(fs::read_to_string(&path).unwrap(), "new");
}
