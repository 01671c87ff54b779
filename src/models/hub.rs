//! Models from the Hugging Face Hub, by way of the cache that its other programs use too. Needs the feature `hub`.

use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The index of a model of several files.
const INDEX: &str = "model.safetensors.index.json";

/// Where a model is looked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HubOptions {
    /// A branch, a tag or a commit; `main` unless told.
    pub revision: Option<String>,
    /// The cache; unless told `$HF_HOME/hub`, or `.cache/huggingface/hub` in the home directory.
    pub cache_dir: Option<PathBuf>,
    /// Draw bars of progress on stderr.
    pub progress: bool,
}

impl HubOptions {
    /// Sets the branch, tag or commit.
    pub fn with_revision(mut self, revision: impl Into<String>) -> Self {
        self.revision = Some(revision.into());
        self
    }

    /// Sets the directory of the cache.
    pub fn with_cache_dir(mut self, cache_dir: impl Into<PathBuf>) -> Self {
        self.cache_dir = Some(cache_dir.into());
        self
    }

    /// Sets whether bars of progress are drawn.
    pub fn with_progress(mut self, progress: bool) -> Self {
        self.progress = progress;
        self
    }
}

/// An error of getting a model from the hub.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The name of a model or a revision cannot be one.
    #[error("{name:?} is no {what}")]
    Name {
        /// `model of the hub, expected OWNER/NAME`, or `revision`.
        what: &'static str,
        /// The name.
        name: String,
    },

    /// There is no directory for the cache.
    #[error("there is neither HF_HOME nor a home directory for the cache")]
    NoCache,

    /// The model has no safetensors files.
    #[error("{model} has no safetensors files")]
    NoWeights {
        /// The model.
        model: String,
    },

    /// A file names others in a way that is not followed.
    #[error("{path}: {reason}", path = .path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// The hub, or the way to it.
    #[error("{model}: cannot get {file}: {source}")]
    Download {
        /// The model.
        model: String,
        /// The file.
        file: String,
        /// What hf-hub says.
        source: Box<ApiError>,
    },
}

/// The directory of a model `OWNER/NAME` with all that it takes to run it: safetensors files, configuration, tokenizer. Files
/// that the cache has are not asked for again; nothing is asked of the network where it has all of them.
///
/// # Errors
/// [`HubError`].
///
/// ```no_run
/// use fp8::models::hub::{self, HubOptions};
///
/// let dir = hub::download("HuggingFaceTB/SmolLM2-135M", &HubOptions::default())?;
/// # Ok::<(), hub::HubError>(())
/// ```
pub fn download(model: &str, options: &HubOptions) -> Result<PathBuf, HubError> {
    if let Some(dir) = cached(model, options)? {
        return Ok(dir);
    }
    let failed = |file: &str| {
        let file = file.to_string();
        move |source| HubError::Download {
            model: model.to_string(),
            file,
            source: Box::new(source),
        }
    };
    let builder = ApiBuilder::from_cache(cache(options)?).with_progress(options.progress);
    let api = builder.build().map_err(failed("anything"))?;
    let repo = api.repo(repo(model, options)?);
    let info = repo.info().map_err(failed("the list of its files"))?;
    let names: Vec<String> = info
        .siblings
        .into_iter()
        .map(|file| file.rfilename)
        .collect();
    let wanted = wanted(&names);
    if !wanted.iter().any(|name| name.ends_with(".safetensors")) {
        let model = model.to_string();
        return Err(HubError::NoWeights { model });
    }
    let mut dir = PathBuf::new();
    for name in wanted {
        let path = repo.get(name).map_err(failed(name))?;
        dir = path.parent().unwrap_or(Path::new("")).to_path_buf();
    }
    Ok(dir)
}

/// The directory of a model that the cache has whole: `config.json` and all weights. Never asks the network.
///
/// # Errors
/// [`HubError::Name`], [`HubError::NoCache`], and [`HubError::Index`] for a list of weights that is broken.
pub fn cached(model: &str, options: &HubOptions) -> Result<Option<PathBuf>, HubError> {
    let repo = cache(options)?.repo(repo(model, options)?);
    let Some(config) = repo.get("config.json") else {
        return Ok(None);
    };
    let whole = match repo.get(INDEX) {
        Some(index) => shards(&index)?.iter().all(|name| repo.get(name).is_some()),
        None => repo.get("model.safetensors").is_some(),
    };
    let dir = config.parent().map(Path::to_path_buf);
    Ok(dir.filter(|_| whole))
}

fn cache(options: &HubOptions) -> Result<Cache, HubError> {
    if let Some(dir) = &options.cache_dir {
        return Ok(Cache::new(dir.clone()));
    }
    // hf-hub panics without either.
    let known = std::env::var_os("HF_HOME").is_some() || std::env::home_dir().is_some();
    match known {
        true => Ok(Cache::from_env()),
        false => Err(HubError::NoCache),
    }
}

/// Names become paths, so they are checked.
fn repo(model: &str, options: &HubOptions) -> Result<Repo, HubError> {
    let plain = |part: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(known)
    };
    let parts: Vec<&str> = model.split('/').collect();
    if parts.len() > 2 || !parts.iter().all(|part| plain(part)) {
        return Err(HubError::Name {
            what: "model of the hub, expected OWNER/NAME",
            name: model.to_string(),
        });
    }
    let revision = options.revision.as_deref().unwrap_or("main");
    if !revision.split('/').all(plain) {
        let (what, name) = ("revision", revision.to_string());
        return Err(HubError::Name { what, name });
    }
    let (model, revision) = (model.to_string(), revision.to_string());
    Ok(Repo::with_revision(model, RepoType::Model, revision))
}

/// A name of a file that stays in its directory.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\', ':']) && !name.starts_with('.')
}

/// The files that it takes to run a model.
fn wanted(names: &[String]) -> Vec<&str> {
    let has_model = names
        .iter()
        .any(|name| name.starts_with("model") && name.ends_with(".safetensors"));
    let is_wanted = |name: &&str| {
        let weights = name.ends_with(".safetensors");
        // Mistral's own form beside the usual one holds the same weights once more.
        let twice = weights && has_model && !name.starts_with("model");
        let small = [".json", ".jinja"].iter().any(|end| name.ends_with(end));
        let text = matches!(*name, "tokenizer.model" | "vocab.txt" | "merges.txt");
        is_plain(name) && ((weights && !twice) || small || text)
    };
    names.iter().map(String::as_str).filter(is_wanted).collect()
}

/// The files that an index names.
fn shards(index: &Path) -> Result<BTreeSet<String>, HubError> {
    let wrong = |reason: String| HubError::Index {
        path: index.to_path_buf(),
        reason,
    };
    let text = std::fs::read_to_string(index).map_err(|error| wrong(error.to_string()))?;
    let json: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let map = json["weight_map"].as_object();
    let map = map.ok_or_else(|| wrong("there is no `weight_map`".to_string()))?;
    let name = |value: &Value| match value.as_str() {
        Some(name) if is_plain(name) => Ok(name.to_string()),
        _ => Err(wrong(format!("{value} is no name of a file beside it"))),
    };
    map.values().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    type Outcome = Result<(), Box<dyn std::error::Error>>;

    /// A cache as other programs fill it, with these files of `owner/name`.
    fn cache_of(files: &[(&str, &str)]) -> std::io::Result<(tempfile::TempDir, HubOptions)> {
        let dir = tempfile::tempdir()?;
        let model = dir.path().join("models--owner--name");
        let snapshot = model.join("snapshots/abc");
        fs::create_dir_all(&snapshot)?;
        fs::create_dir_all(model.join("refs"))?;
        fs::write(model.join("refs/main"), "abc")?;
        for (name, text) in files {
            fs::write(snapshot.join(name), text)?;
        }
        let options = HubOptions::default().with_cache_dir(dir.path());
        Ok((dir, options))
    }

    #[test]
    fn a_whole_model_in_the_cache_is_found_without_a_network() -> Outcome {
        let (dir, options) = cache_of(&[("config.json", "{}"), ("model.safetensors", "")])?;
        let expected = dir.path().join("models--owner--name/snapshots/abc");
        assert_eq!(download("owner/name", &options)?, expected);
        assert_eq!(cached("owner/other", &options)?, None);
        let other = options.with_revision("v2");
        assert_eq!(cached("owner/name", &other)?, None);
        Ok(())
    }

    #[test]
    fn a_model_of_which_a_file_is_missing_is_not_whole() -> Outcome {
        let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
        let mut files = vec![
            ("config.json", "{}"),
            (INDEX, index),
            ("model-1.safetensors", ""),
        ];
        let (_dir, options) = cache_of(&files)?;
        assert_eq!(cached("owner/name", &options)?, None);
        files.push(("model-2.safetensors", ""));
        let (_dir, options) = cache_of(&files)?;
        assert!(cached("owner/name", &options)?.is_some());
        Ok(())
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() -> Outcome {
        let (_dir, options) = cache_of(&[])?;
        for name in ["", "..", "a/../b", "a/b/c", "/etc", "a b/c", "a/.hidden"] {
            let error = cached(name, &options).expect_err(name);
            assert!(matches!(error, HubError::Name { .. }), "{name}: {error}");
        }
        let revision = options.with_revision("../x");
        assert!(cached("a/b", &revision).is_err());
        let index = r#"{"weight_map": {"a": "../model.safetensors"}}"#;
        let (_dir, options) = cache_of(&[("config.json", "{}"), (INDEX, index)])?;
        let error = cached("owner/name", &options).expect_err("refused");
        assert!(
            error.to_string().contains("../model.safetensors"),
            "{error}"
        );
        Ok(())
    }

    #[test]
    fn only_what_it_takes_is_downloaded() {
        let names = [
            "README.md",
            "config.json",
            "model-00001-of-00001.safetensors",
            "consolidated.safetensors",
            "tokenizer.json",
            "chat_template.jinja",
            "pytorch_model.bin",
            "onnx/model.safetensors",
            "../evil.json",
            "tokenizer.model",
        ];
        let names = names.map(str::to_string);
        let expected = [
            "config.json",
            "model-00001-of-00001.safetensors",
            "tokenizer.json",
            "chat_template.jinja",
            "tokenizer.model",
        ];
        assert_eq!(wanted(&names), expected);
        let mistral = ["consolidated.safetensors", "params.json"].map(str::to_string);
        assert_eq!(wanted(&mistral), mistral);
    }
}
