//! Every test target of the workspace is in the lists of `.ci`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The names of the test targets in `tests/` of every package.
fn targets(root: &Path) -> std::io::Result<Vec<String>> {
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
                found.push(name.to_string_lossy().into_owned());
            }
        }
    }
    Ok(found)
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
    for name in &targets {
        let lists = listed.get(name.as_str()).copied().unwrap_or(0);
        assert_eq!(lists, 1, "`{name}` is in {lists} lists of .ci/levels");
    }
    for name in listed.keys() {
        assert!(
            targets.iter().any(|target| target == name),
            "no test target `{name}`"
        );
    }
    Ok(())
}
