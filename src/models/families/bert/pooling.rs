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
        let (folder, is_listed) = folder(dir.as_ref())?;
        let path = folder.join("config.json");
        let config = match read_json(&path)? {
            Some(config) => config,
            // Guessing would give embeddings that nobody trained.
            None if is_listed => {
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
}

/// The folder of the pooling, and whether `modules.json` lists it.
fn folder(dir: &Path) -> Result<(PathBuf, bool)> {
    let path = dir.join("modules.json");
    let (mut folder, mut is_listed) = ("1_Pooling", false);
    let Some(modules) = read_json(&path)? else {
        return Ok((dir.join(folder), is_listed));
    };
    for module in modules.as_array().into_iter().flatten() {
        let entries = Entries::new(&path, module);
        // A class of Python with its package.
        let class = entries.text("type", None)?;
        match class.rsplit('.').next().unwrap_or(class) {
            "Transformer" | "Normalize" => {}
            "Pooling" => (folder, is_listed) = (entries.text("path", folder)?, true),
            _ => {
                let known = "Transformer, Pooling or Normalize, as embeddings are made here";
                return Err(entries.error("type", known));
            }
        }
        let is_inside = |part| matches!(part, Component::Normal(_));
        if !Path::new(folder).components().all(is_inside) {
            return Err(entries.error("path", "a folder beside the file"));
        }
    }
    Ok((dir.join(folder), is_listed))
}
