//! Reads four model files of candle-transformers from cargo's registry and writes them, with `use` lines replaced and one
//! derive line above each struct that holds layers, to `OUT_DIR`. Nothing else is changed, and nothing is copied into the
//! repository.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fmt::Write, fs};

struct Model {
    name: &'static str,
    /// Below `src/models`.
    file: &'static str,
    /// Types that hold layers, and types of their fields.
    types: &'static [&'static str],
}

const MODELS: [Model; 4] = [
    Model {
        name: "llama",
        file: "llama.rs",
        types: &["CausalSelfAttention", "Mlp", "Block", "Llama"],
    },
    Model {
        name: "bert",
        file: "bert.rs",
        types: &[
            "HiddenAct",
            "HiddenActLayer",
            "Dropout",
            "BertEmbeddings",
            "BertSelfAttention",
            "BertSelfOutput",
            "BertAttention",
            "BertIntermediate",
            "BertOutput",
            "BertLayer",
            "BertEncoder",
            "BertModel",
            "BertPredictionHeadTransform",
            "BertLMPredictionHead",
            "BertOnlyMLMHead",
            "BertForMaskedLM",
        ],
    },
    Model {
        name: "vit",
        file: "vit.rs",
        types: &[
            "PatchEmbeddings",
            "Embeddings",
            "SelfAttention",
            "SelfOutput",
            "Attention",
            "Intermediate",
            "Output",
            "Layer",
            "Encoder",
            "Model",
        ],
    },
    Model {
        name: "whisper",
        file: "whisper/model.rs",
        // Not `Whisper`: its `Config` lies in another file.
        types: &[
            "MultiHeadAttention",
            "ResidualAttentionBlock",
            "AudioEncoder",
            "TextDecoder",
        ],
    },
];

/// Start of a `use` line of a stock file, and what stands in its place.
const USES: [(&str, &str); 2] = [
    ("use super::with_tracing::", "use fp8::with_tracing::"),
    (
        "use crate::models::with_tracing::",
        "use fp8::with_tracing::",
    ),
];
/// Goes before the first line that takes something from candle-nn.
const TWIN: &str = "use fp8::nn as candle_nn;";
const DERIVE: &str = "#[derive(fp8::Fp8Module)]";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let source = candle_transformers();
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    let mut modules = String::new();
    let mut list = String::new();
    for model in MODELS {
        let stock = source.join("src/models").join(model.file);
        println!("cargo::rerun-if-changed={}", stock.display());
        let text = fs::read_to_string(&stock)
            .unwrap_or_else(|error| panic!("{}: {error}", stock.display()));
        let ours = out.join(format!("{}.rs", model.name));
        fs::write(&ours, carried(&text, &model)).unwrap();
        let (name, ours) = (model.name, ours.to_str().unwrap());
        let stock = stock.to_str().unwrap();
        // The file of a folder takes its configuration from the module above it.
        match model.file.contains('/') {
            false => writeln!(modules, "#[path = {ours:?}]\npub mod {name};").unwrap(),
            true => writeln!(
                modules,
                "pub mod {name} {{\n\
                     pub use candle_transformers::models::{name}::Config;\n\
                     #[path = {ours:?}]\n\
                     pub mod model;\n\
                 }}"
            )
            .unwrap(),
        }
        writeln!(
            list,
            "Carried {{ name: {name:?}, stock: include_str!({stock:?}), ours: include_str!({ours:?}) }},"
        )
        .unwrap();
    }
    fs::write(out.join("modules.rs"), modules).unwrap();
    fs::write(out.join("list.rs"), format!("[{list}]")).unwrap();
}

/// The folder of the package that this workspace builds with.
fn candle_transformers() -> PathBuf {
    let target = env::var("TARGET").unwrap();
    let metadata = |more: &[&str]| {
        Command::new(env::var_os("CARGO").unwrap())
            .args(["metadata", "--format-version", "1"])
            // Packages of other platforms need not be there.
            .args(["--filter-platform", &target])
            .args(more)
            .output()
            .unwrap()
    };
    // A build downloads only what it needs, and this asks for all of the workspace.
    let mut output = metadata(&["--offline"]);
    if !output.status.success() {
        output = metadata(&[]);
    }
    assert!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut packages = metadata["packages"].as_array().unwrap().iter();
    let package = packages
        .find(|package| package["name"] == "candle-transformers")
        .expect("this package depends on candle-transformers");
    let manifest = Path::new(package["manifest_path"].as_str().unwrap());
    manifest.parent().unwrap().to_path_buf()
}

fn carried(stock: &str, model: &Model) -> String {
    let mut out = String::new();
    let mut twin = false;
    let mut found = vec![];
    for line in stock.lines() {
        if line.starts_with("use candle_nn::") && !twin {
            twin = true;
            writeln!(out, "{TWIN}").unwrap();
        }
        if let Some(name) = declared(line).filter(|name| model.types.contains(name)) {
            found.push(name);
            writeln!(out, "{DERIVE}").unwrap();
        }
        let replaced = USES
            .iter()
            .find_map(|(from, to)| Some(format!("{to}{}", line.strip_prefix(from)?)));
        writeln!(out, "{}", replaced.as_deref().unwrap_or(line)).unwrap();
    }
    let missing: Vec<_> = model
        .types
        .iter()
        .filter(|name| !found.contains(name))
        .collect();
    assert!(
        twin && missing.is_empty(),
        "{} has changed: candle_nn is used: {twin}, types that are gone: {missing:?}",
        model.file
    );
    out
}

/// The type that a line declares.
fn declared(line: &str) -> Option<&str> {
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let rest = line
        .strip_prefix("struct ")
        .or(line.strip_prefix("enum "))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()
}
