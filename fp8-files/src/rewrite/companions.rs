//! The files beside a model's weights: the configuration, which is edited, and files that are copied.

use crate::atomic::FileError;
use crate::contents::Contents;
use crate::error::{Error, Result};
use crate::read::{MAX_CONFIG, open_regular, read_text_if_present};
use crate::spelling::Spelling;
use candle_core::DType;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

/// Keys under which a configuration describes a quantization; `quantization` is MLX's.
const QUANTIZATION: [&str; 3] = ["quantization_config", "compression_config", "quantization"];

/// Keys of a model's dtype.
const DTYPE: [&str; 2] = ["dtype", "torch_dtype"];

/// What else changes in a configuration besides its quantization.
#[derive(Debug, Clone, Copy)]
pub(super) struct Changes {
    /// The head is no longer the embedding.
    pub(super) untied: bool,
    /// All weights are in this dtype now.
    pub(super) dtype: Option<DType>,
    /// The dtype to write if the configuration has none.
    pub(super) default_dtype: DType,
}

fn edit(entries: &mut Map<String, Value>, changes: Changes) {
    for key in QUANTIZATION {
        entries.remove(key);
    }
    if changes.untied && entries.contains_key("tie_word_embeddings") {
        entries.insert("tie_word_embeddings".into(), json!(false));
    }
    if let Some(dtype) = changes.dtype {
        for key in DTYPE {
            if let Some(value) = entries.get_mut(key) {
                *value = dtype_name(dtype).into();
            }
        }
    }
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::F64 => "float64",
        _ => "float32",
    }
}

/// All configuration files of a model, by name. The first has the entries of the source with another quantization, or none.
pub(super) fn configs(
    source: Option<&Value>,
    spelling: Option<Spelling>,
    contents: &Contents,
    changes: Changes,
) -> Vec<(&'static str, Value)> {
    let mut config = match source {
        Some(Value::Object(entries)) => entries.clone(),
        _ => Map::new(),
    };
    edit(&mut config, changes);
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        edit(text, changes);
    }
    if !DTYPE.iter().any(|key| config.contains_key(*key)) {
        let dtype = changes.dtype.unwrap_or(changes.default_dtype);
        config.insert("dtype".into(), dtype_name(dtype).into());
    }
    if let Some(spelling) = spelling {
        let quantization = spelling.quantization(contents);
        config.insert("quantization_config".into(), quantization);
    }
    let second = spelling.and_then(|spelling| spelling.second_config(contents));
    let first = ("config.json", config.into());
    [Some(first), second].into_iter().flatten().collect()
}

/// Whether a file belongs to the model, however its weights are stored.
fn is_companion(name: &str) -> bool {
    const BEGINNINGS: [&str; 18] = [
        "tokenizer",
        "tiktoken",
        "special_tokens",
        "added_tokens",
        "vocab",
        "merges",
        "generation_config",
        "chat_template",
        "preprocessor_config",
        "processor_config",
        "sentencepiece",
        "spiece",
        "modules.json",
        "sentence_bert_config",
        "config_sentence_transformers",
        "video_preprocessor_config",
        "tekken",
        "LICENSE",
    ];
    // The code of models that come with it.
    BEGINNINGS.iter().any(|b| name.starts_with(b)) || name.ends_with(".py")
}

/// Whether a folder does: a module of sentence-transformers, or transformers' chat templates besides the first.
fn is_companion_folder(name: &str, modules: &BTreeSet<String>) -> bool {
    modules.contains(name) || name.ends_with("_Pooling") || name == "additional_chat_templates"
}

/// Copies tokenizers, similar files and the folders of modules. Returns the names of the copies.
pub(super) fn copy(from: &Path, to: &Path) -> Result<Vec<String>> {
    let read = Error::read(from);
    let mut copied = vec![];
    let from = match from.as_os_str().is_empty() {
        true => Path::new("."),
        false => from,
    };
    let modules = modules(from)?;
    for entry in fs::read_dir(from).map_err(&read)? {
        let entry = entry.map_err(&read)?;
        let Some(name) = entry.file_name().to_str().map(String::from) else {
            continue;
        };
        let path = entry.path();
        if path.is_file() && is_companion(&name) {
            copy_file(&path, &to.join(&name))?;
            copied.push(name);
        } else if path.is_dir() && is_companion_folder(&name, &modules) {
            copied.extend(copy_module(&path, &to.join(&name), &name)?);
        }
    }
    Ok(copied)
}

/// The names in `modules.json`: folders of what sentence-transformers compute after the encoder, such as the pooling of a text's vectors.
/// Paths that leave the model's folder match no entry.
fn modules(from: &Path) -> Result<BTreeSet<String>> {
    let Some(text) = read_text_if_present(from.join("modules.json"), MAX_CONFIG)? else {
        return Ok(BTreeSet::new());
    };
    // A file that is wrong is copied as it is, and is an error where embeddings are made.
    let json: Value = serde_json::from_str(&text).unwrap_or_default();
    let modules = json.as_array().into_iter().flatten();
    let names = modules.filter_map(|module| module.get("path")?.as_str());
    // Some files end a folder with a slash.
    Ok(names
        .map(|name| name.trim_end_matches('/').into())
        .collect())
}

/// Copies the files in the folder of a module. Returns their names, with that of the folder.
fn copy_module(from: &Path, to: &Path, folder: &str) -> Result<Vec<String>> {
    let read = Error::read(from);
    let mut copied = vec![];
    fs::create_dir(to).map_err(FileError::io(to, "make the directory"))?;
    for entry in fs::read_dir(from).map_err(&read)? {
        let entry = entry.map_err(&read)?;
        let Some(name) = entry.file_name().to_str().map(String::from) else {
            continue;
        };
        if entry.path().is_file() && !name.starts_with('.') {
            copy_file(&entry.path(), &to.join(&name))?;
            copied.push(format!("{folder}/{name}"));
        }
    }
    Ok(copied)
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let mut source = open_regular(from)?;
    let written = File::create_new(to).and_then(|mut file| {
        std::io::copy(&mut source, &mut file)?;
        file.sync_all()
    });
    Ok(written.map_err(FileError::io(to, "copy it"))?)
}
