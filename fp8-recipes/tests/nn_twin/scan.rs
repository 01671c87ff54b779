//! Which functions of candle-nn lose gradients: a reading of its source.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, process::Command};

/// What takes values out of the graph.
const CUTS: [&str; 10] = [
    "_no_bwd(",
    ".detach()",
    "slice_set(",
    "scatter_set(",
    "storage_and_layout(",
    "BackpropOp::none",
    ".to_vec1",
    ".to_vec2",
    ".to_vec3",
    ".to_scalar",
];

/// The source folder of the candle-nn that this workspace builds with.
pub fn candle_nn() -> PathBuf {
    let run = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        output.status.success().then_some(text)
    };
    let version = run("rustc", &["-vV"]).unwrap();
    let mut lines = version.lines();
    let host = lines.find_map(|line| line.strip_prefix("host: ")).unwrap();
    let cargo = std::env::var("CARGO").unwrap_or("cargo".into());
    // Packages of other platforms need not be there.
    let arguments = [
        "metadata",
        "--format-version",
        "1",
        "--filter-platform",
        host,
    ];
    let offline = [&arguments[..], &["--offline"]].concat();
    let metadata = run(&cargo, &offline).or_else(|| run(&cargo, &arguments));
    let metadata: serde_json::Value =
        serde_json::from_str(&metadata.expect("cargo metadata")).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let package = packages.iter().find(|p| p["name"] == "candle-nn").unwrap();
    let manifest = Path::new(package["manifest_path"].as_str().unwrap());
    manifest.with_file_name("src")
}

/// A function and where it stands.
struct Function {
    /// `module::function` or `module::Type`.
    item: String,
    name: String,
    body: String,
    /// Not a method.
    free: bool,
}

/// The functions and types of candle-nn in which a gradient may be lost, themselves or through what they call.
pub fn cutting(source: &Path) -> BTreeSet<String> {
    let mut functions = vec![];
    collect(source, source, &mut functions);
    assert!(functions.len() > 300, "{} functions", functions.len());
    let mut cut: Vec<bool> = functions
        .iter()
        .map(|f| CUTS.iter().any(|text| f.body.contains(text)))
        .collect();
    loop {
        // Methods have names such as `new`: of these only `append`, that of the caches, is followed.
        let names: BTreeSet<&str> = functions
            .iter()
            .zip(&cut)
            .filter(|(f, cut)| **cut && (f.free || f.name == "append"))
            .map(|(f, _)| f.name.as_str())
            .collect();
        let calls = |body: &str| {
            names.iter().any(|name| {
                body.match_indices(name).any(|(at, _)| {
                    let before = body[..at].chars().next_back().unwrap_or(' ');
                    let after = &body[at + name.len()..];
                    !before.is_alphanumeric()
                        && before != '_'
                        && (after.starts_with('(') || after.starts_with("::<"))
                })
            })
        };
        let more: Vec<usize> = (0..functions.len())
            .filter(|&i| !cut[i] && calls(&functions[i].body))
            .collect();
        if more.is_empty() {
            break;
        }
        more.into_iter().for_each(|i| cut[i] = true);
    }
    let cut = functions.iter().zip(cut);
    let cut = cut.filter(|(f, cut)| *cut && !f.item.is_empty());
    cut.map(|(f, _)| f.item.clone()).collect()
}

fn collect(root: &Path, folder: &Path, into: &mut Vec<Function>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(root, &path, into);
        } else {
            let module = path.strip_prefix(root).unwrap().with_extension("");
            let module: Vec<_> = module.iter().map(|part| part.to_str().unwrap()).collect();
            let module = module.join("::");
            let module = module.trim_end_matches("::mod");
            functions(module, &fs::read_to_string(&path).unwrap(), into);
        }
    }
}

/// The functions of a file, those in an `impl` under the type's name. Private ones and custom operations are reached through
/// public ones, but their bodies count.
fn functions(module: &str, text: &str, into: &mut Vec<Function>) {
    let lines: Vec<&str> = text
        .lines()
        .map(|line| line.split("//").next().unwrap())
        .collect();
    let mut owner = None;
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at];
        if line.starts_with("mod tests") {
            while at < lines.len() && lines[at] != "}" {
                at += 1;
            }
            continue;
        }
        if let Some(rest) = line.strip_prefix("impl") {
            let target = match line.split_once(" for ") {
                Some((_, target)) => target,
                None => rest.trim_start_matches(|c: char| c != ' ').trim_start(),
            };
            let name = target.split(['<', ' ', '{']).next().unwrap();
            owner = Some((name.to_string(), line.contains("CustomOp")));
        } else if line.starts_with('}') {
            owner = None;
        }
        let indent = line.len() - line.trim_start().len();
        let words = line.trim_start();
        let is_fn = ["fn ", "pub fn ", "pub(crate) fn ", "pub(super) fn "];
        let Some(rest) = is_fn.iter().find_map(|start| words.strip_prefix(start)) else {
            at += 1;
            continue;
        };
        let name: String = rest
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect();
        // The body ends where a brace stands under the function's first letter.
        let end = (at + 1..lines.len())
            .find(|&i| lines[i].starts_with(&format!("{}}}", " ".repeat(indent))))
            .unwrap_or(at);
        let body = lines[at + 1..=end.max(at)].join("\n");
        at = end.max(at) + 1;
        if let Some((_, true)) = owner {
            continue;
        }
        let public = words.starts_with("pub fn") || owner.is_some();
        let item = match &owner {
            Some((owner, _)) => format!("{module}::{owner}"),
            None if public => format!("{module}::{name}"),
            None => String::new(),
        };
        into.push(Function {
            item,
            name,
            body,
            free: owner.is_none(),
        });
    }
}
