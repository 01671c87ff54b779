//! What the pages say of the sources: the files that they name exist, and versions are those of the manifest.

use std::path::{Path, PathBuf};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page(name: &str) -> std::io::Result<String> {
    std::fs::read_to_string(workspace().join(name))
}

/// The text between single backticks, outside of blocks of code.
fn spans(page: &str) -> Vec<String> {
    let mut text = String::new();
    let mut is_code = false;
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            text += line;
            text.push('\n');
        }
    }
    let spans = text.split('`').skip(1).step_by(2);
    spans.map(String::from).collect()
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn expanded(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else {
        return vec![path.to_string()];
    };
    let Some((inner, after)) = rest.split_once('}') else {
        return vec![path.to_string()];
    };
    let all = inner.split(',');
    all.flat_map(|one| expanded(&format!("{before}{}{after}", one.trim())))
        .collect()
}

/// Where a path on these pages begins; others are names of files in a folder that the text is about, and words of code.
const BEGINS: [&str; 9] = [
    "fp8-",
    "src/",
    "tests/",
    "benches/",
    "examples/",
    "fuzz/",
    "tools/",
    "docs/",
    ".ci/",
];

/// Folders beside the workspace's own that paths may start from.
const FOLDERS: [&str; 3] = ["", "tests/structure", "tests/support"];

/// A file, a folder, or a module in whatever form.
fn exists(path: &str) -> bool {
    FOLDERS.iter().any(|folder| {
        let path = workspace().join(folder).join(path);
        path.exists() || path.with_extension("rs").exists()
    })
}

#[test]
fn files_on_the_maps_exist() -> std::io::Result<()> {
    for (name, least) in [("ARCHITECTURE.md", 150), ("CONTRIBUTING.md", 20)] {
        let mut paths = vec![];
        for span in spans(&page(name)?) {
            let inside = |c: char| c.is_ascii_alphanumeric() || "_-./{},* ".contains(c);
            let is_path = BEGINS.iter().any(|begin| span.starts_with(begin));
            // A blank is in commands, and between names in braces.
            let is_command = span.contains(' ') && !span.contains('{');
            let is_pattern = span.contains('*');
            if is_path && span.chars().all(inside) && !is_command && !is_pattern {
                paths.extend(expanded(&span));
            }
        }
        assert!(paths.len() >= least, "{name}: only {} paths", paths.len());
        let missing: Vec<_> = paths.iter().filter(|path| !exists(path)).collect();
        assert!(missing.is_empty(), "{name}: {missing:?}");
    }
    Ok(())
}

#[test]
fn braces_are_alternatives() {
    assert_eq!(expanded("a/b.rs"), ["a/b.rs"]);
    let all = expanded("a/{b,c}/{d, e}.rs");
    assert_eq!(all, ["a/b/d.rs", "a/b/e.rs", "a/c/d.rs", "a/c/e.rs"]);
    let text = "`a`\n```text\n`b`\n```\n`c` d `e\nf`";
    assert_eq!(spans(text), ["a", "c", "e\nf"]);
}

/// The first value in quotes of an entry of a manifest.
fn entry(manifest: &str, name: &str) -> String {
    let line = manifest
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))
        .unwrap_or_else(|| panic!("no entry {name}"));
    let value = line.split('"').nth(1);
    value.expect("a quoted value").to_string()
}

#[test]
fn versions_are_those_of_the_manifest() -> std::io::Result<()> {
    let manifest = page("Cargo.toml")?;
    let rust = format!("stable Rust {} or newer", entry(&manifest, "rust-version"));
    for name in ["README.md", "CONTRIBUTING.md", "docs/guide/start.md"] {
        assert!(page(name)?.contains(&rust), "{name}: {rust}");
    }
    let start = page("docs/guide/start.md")?;
    for name in ["candle-core", "candle-nn"] {
        let version = entry(&manifest, name);
        assert_eq!(entry(&start, name), version, "{name}");
        let number = version.trim_start_matches('=');
        let swap = format!("`candle_nn` {number} does");
        assert!(page("docs/migration.md")?.contains(&swap), "{swap}");
    }
    Ok(())
}
