//! The pooling of sentence-transformers, and the other modules that it may have after an encoder.

use crate::models::error::Result;
use crate::models::files::{Entries, read_json};
use serde_json::Value;
use std::path::{Component, Path, PathBuf};

/// How the features of a text's tokens are reduced to one vector.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// The mean over tokens.
    #[default]
    Mean,
    /// The features of the first token, `[CLS]`.
    FirstToken,
}

impl Pooling {
    /// Reads sentence-transformers' configuration of the pooling in the directory of a model, `1_Pooling/config.json` unless `modules.json` names
    /// another folder; the mean if there is none and `modules.json` lists no pooling.
    ///
    /// # Errors
    /// If a file cannot be read or asks for another pooling, and [`Error::Config`](crate::models::Error::Config) if `modules.json` has a module besides
    /// the encoder, its pooling and the normalization, such as a dense layer: embeddings without it would be others. Also if it lists a pooling whose
    /// configuration is missing.
    pub fn of_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let modules = Modules::of_dir(dir.as_ref())?;
        let path = modules.folder.join("config.json");
        let config = match read_json(&path)? {
            Some(config) => config,
            // Guessing would give embeddings that nobody trained.
            None if modules.pools => {
                let expected = "the pooling that modules.json lists";
                return Err(Entries::new(&path, &Value::Null).error("the file", expected));
            }
            None => return Ok(Self::Mean),
        };
        let entries = Entries::new(&path, &config);
        let modes = config.as_object().into_iter().flatten();
        let on = modes.filter(|(key, value)| key.starts_with("pooling_mode_") && **value == true);
        let on: Vec<&str> = on.map(|(key, _)| key.as_str()).collect();
        match on.as_slice() {
            ["pooling_mode_mean_tokens"] => Ok(Self::Mean),
            ["pooling_mode_cls_token"] => Ok(Self::FirstToken),
            [] => Err(entries.error(
                "pooling_mode_mean_tokens",
                "true, or pooling_mode_cls_token",
            )),
            [first, ..] => Err(entries.error(
                first,
                "pooling_mode_mean_tokens or pooling_mode_cls_token alone",
            )),
        }
    }

    /// Whether `fp8 embed` gives the vectors of the model in this directory length 1: unless it has a `modules.json` that does not list
    /// `Normalize`. sentence-transformers gives those of a folder without the file the length of the pooling.
    ///
    /// # Errors
    /// As [`Pooling::of_dir`].
    pub fn normalizes(dir: impl AsRef<Path>) -> Result<bool> {
        Ok(Modules::of_dir(dir.as_ref())?.normalizes)
    }
}

/// What `modules.json` lists, or what holds without the file.
struct Modules {
    /// The folder of the pooling.
    folder: PathBuf,
    /// Whether there is a pooling.
    pools: bool,
    normalizes: bool,
}

impl Modules {
    fn of_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("modules.json");
        let mut found = Self {
            folder: dir.join("1_Pooling"),
            pools: false,
            normalizes: true,
        };
        let Some(modules) = read_json(&path)? else {
            return Ok(found);
        };
        found.normalizes = false;
        for module in modules.as_array().into_iter().flatten() {
            let entries = Entries::new(&path, module);
            // A class of Python with its package.
            let class = entries.text("type", None)?;
            match class.rsplit('.').next().unwrap_or(class) {
                "Transformer" => {}
                "Normalize" => found.normalizes = true,
                "Pooling" => {
                    let folder = entries.text("path", "1_Pooling")?;
                    let is_inside = |part| matches!(part, Component::Normal(_));
                    if !Path::new(folder).components().all(is_inside) {
                        return Err(entries.error("path", "a folder beside the file"));
                    }
                    (found.folder, found.pools) = (dir.join(folder), true);
                }
                _ => {
                    let known = "Transformer, Pooling or Normalize, as embeddings are made here";
                    return Err(entries.error("type", known));
                }
            }
        }
        Ok(found)
    }
}
