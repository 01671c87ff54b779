//! Every test target of the workspace is in the lists of `.ci`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A test target: its name, its package's folder, and its file or folder.
struct Target {
    name: String,
    package: PathBuf,
    path: PathBuf,
}

/// The test targets in `tests/` of every package.
fn targets(root: &Path) -> std::io::Result<Vec<Target>> {
    let mut packages = vec![root.to_path_buf()];
    for folder in [root.to_path_buf(), root.join("tests")] {
        for entry in std::fs::read_dir(folder)? {
            packages.push(entry?.path());
        }
    }
    let mut found = vec![];
    for package in packages {
        let folder = package.join("tests");
        if !package.join("Cargo.toml").is_file() || !folder.is_dir() {
            continue;
        }
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let file = path.extension().is_some_and(|extension| extension == "rs");
            if file || path.join("main.rs").is_file() {
                let name = path.file_stem().expect("a name");
                found.push(Target {
                    name: name.to_string_lossy().into_owned(),
                    package: package.clone(),
                    path,
                });
            }
        }
    }
    Ok(found)
}

/// Whether the text occurs in a file, or in a file of a folder.
fn mentions(path: &Path, text: &str) -> std::io::Result<bool> {
    if path.is_file() {
        return Ok(std::fs::read_to_string(path)?.contains(text));
    }
    for entry in std::fs::read_dir(path)? {
        if mentions(&entry?.path(), text)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// `.ci/run` lints with the features `cuda` and `mpi` only those targets that depend on them.
#[test]
fn every_target_that_needs_a_feature_is_linted_with_it() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = std::fs::read_to_string(root.join(".ci/run"))?;
    let (_, list) = script.split_once("\nfeatured=(").expect("the list");
    let (list, _) = list.split_once(')').expect("its end");
    let listed: BTreeSet<&str> = list.split_whitespace().collect();
    let mut found = BTreeSet::new();
    let targets = targets(&root)?;
    for target in &targets {
        let name = &target.name;
        let required = |feature: &str| {
            let entry = format!("name = \"{name}\"\nrequired-features = [\"{feature}\"]");
            mentions(&target.package.join("Cargo.toml"), &entry)
        };
        // Not this file, which only speaks of it.
        let own = target.package.ends_with("structure");
        let reads = !own && mentions(&target.path, "feature = \"cuda\"")?;
        if reads || required("cuda")? || required("mpi")? {
            found.insert(name.as_str());
        }
    }
    assert_eq!(listed, found);
    Ok(())
}

#[cfg(unix)]
#[test]
fn every_target_is_in_a_list() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = Command::new(root.join(".ci/levels"))
        .arg("--lists")
        .output()?;
    let text = String::from_utf8(output.stdout).expect("names");
    let mut listed = BTreeMap::new();
    for name in text.lines() {
        *listed.entry(name).or_insert(0) += 1;
    }
    let targets = targets(&root)?;
    assert!(targets.len() > 40, "only {} targets", targets.len());
    for Target { name, .. } in &targets {
        let lists = listed.get(name.as_str()).copied().unwrap_or(0);
        assert_eq!(lists, 1, "`{name}` is in {lists} lists of .ci/levels");
    }
    for name in listed.keys() {
        assert!(
            targets.iter().any(|target| target.name == *name),
            "no test target `{name}`"
        );
    }
    Ok(())
}
