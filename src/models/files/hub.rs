//! Models from the Hugging Face Hub, through the cache that its other programs use too. Needs the feature `hub`.

pub use crate::models::error::HubError;

use crate::read::read_text;
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The usual pooling of a sentence encoder, and the list of its parts.
const POOLING: &str = "1_Pooling/config.json";
const MODULES: &str = "modules.json";

/// Files of which one at least comes with every model that has a tokenizer.
const TOKENIZERS: [&str; 5] = [
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
];

/// A limit above the size of any index of weights.
const MAX_INDEX: u64 = 64 << 20;

/// Where to look for a model.
///
/// ```
/// use fp8::models::hub::HubOptions;
/// let options = HubOptions::default().with_revision("v1").with_progress(true);
/// assert_eq!(options.revision.as_deref(), Some("v1"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HubOptions {
    /// A branch, a tag or a commit; `main` by default.
    pub revision: Option<String>,
    /// The cache; by default `$HF_HOME/hub`, or `.cache/huggingface/hub` in the home directory.
    pub cache_dir: Option<PathBuf>,
    /// Whether to show progress bars on stderr.
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

    /// Sets whether to show progress bars.
    pub fn with_progress(mut self, progress: bool) -> Self {
        self.progress = progress;
        self
    }
}

/// Downloads what is needed to run the model `OWNER/NAME` (safetensors files, configuration, tokenizer) and returns its directory.
/// Files in the cache are not downloaded again; if all are there, the network is not used. A model that is complete except for a tokenizer,
/// as other programs leave it that read only weights, is looked up on the hub, and taken as it is, with a warning, if that fails.
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
    download_by(model, options, || ask(model, options))
}

/// [`download`], where `ask` asks the hub.
fn download_by(
    model: &str,
    options: &HubOptions,
    ask: impl FnOnce() -> Result<PathBuf, HubError>,
) -> Result<PathBuf, HubError> {
    let Some(dir) = cached(model, options)? else {
        return ask();
    };
    if TOKENIZERS.iter().any(|name| dir.join(name).is_file()) {
        return Ok(dir);
    }
    Ok(ask().unwrap_or_else(|error| {
        crate::warn(&format!(
            "{error}: {} is used without a tokenizer",
            dir.display()
        ));
        dir
    }))
}

/// Asks the hub for the list of files and gets those that are not in the cache.
fn ask(model: &str, options: &HubOptions) -> Result<PathBuf, HubError> {
    let cache = cache(options)?;
    let builder = ApiBuilder::from_cache(cache.clone()).with_progress(options.progress);
    let api = builder.build().map_err(failed(model, "anything"))?;
    let asked = repo(model, options)?;
    let info = api.repo(asked.clone()).info();
    let info = info.map_err(failed(model, "the list of its files"))?;
    let names: Vec<String> = info
        .siblings
        .into_iter()
        .map(|file| file.rfilename)
        .collect();
    // A branch may move in the meantime; a commit does not.
    let commit = repo(model, &options.clone().with_revision(&info.sha))?;
    let files = api.repo(commit.clone());
    let (asked, commit) = (cache.repo(asked), cache.repo(commit));
    fetch(model, &names, &info.sha, &asked, &commit, |name| {
        files.get(name)
    })
}

/// Downloads the needed ones of the files `names` of a commit. Only once all are there does the cache record that `asked`, possibly a
/// branch, is that commit: an interrupted download is never taken for a complete one.
fn fetch(
    model: &str,
    names: &[String],
    sha: &str,
    asked: &CacheRepo,
    commit: &CacheRepo,
    mut get: impl FnMut(&str) -> Result<PathBuf, ApiError>,
) -> Result<PathBuf, HubError> {
    let wanted = wanted(names);
    if !wanted.iter().any(|name| is_weights(name)) {
        let model = model.to_string();
        return Err(HubError::NoWeights { model });
    }
    let point = |repo: &CacheRepo| {
        let pointed = repo.create_ref(sha).map_err(ApiError::from);
        pointed.map_err(failed(model, "the commit of its files"))
    };
    // From now on the cache finds files of this commit that other programs downloaded.
    point(commit)?;
    let mut dir = PathBuf::new();
    for name in wanted {
        let path = get(name).map_err(failed(model, name))?;
        // Weights come last and lie in the directory itself.
        dir = path.parent().unwrap_or(Path::new("")).to_path_buf();
    }
    point(asked)?;
    Ok(dir)
}

pub(super) fn failed(model: &str, file: &str) -> impl FnOnce(ApiError) -> HubError + use<> {
    let (model, file) = (model.to_string(), file.to_string());
    move |source| HubError::Download {
        model,
        file,
        source: Box::new(source),
    }
}

/// The directory of a model that is complete in the cache: `config.json`, all weights that an index names, and the pooling that
/// `modules.json` lists; or Mistral's own layout with `params.json`. None if it is incomplete, as after an interrupted [`download`].
/// Never uses the network.
///
/// ```
/// use fp8::models::hub::{self, HubOptions};
/// let cache = tempfile::tempdir()?;
/// let options = HubOptions::default().with_cache_dir(cache.path());
/// assert_eq!(hub::cached("HuggingFaceTB/SmolLM2-135M", &options)?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`HubError::Name`], [`HubError::NoCache`], and [`HubError::Index`] for a list of weights that is broken.
pub fn cached(model: &str, options: &HubOptions) -> Result<Option<PathBuf>, HubError> {
    let repo = cache(options)?.repo(repo(model, options)?);
    let (config, weights) = match repo.get("config.json") {
        Some(config) => (Some(config), "model.safetensors"),
        None => (repo.get("params.json"), "consolidated.safetensors"),
    };
    let Some(config) = config else {
        return Ok(None);
    };
    let has = |name: &str| repo.get(name).is_some();
    let has_weights = match repo.get(&format!("{weights}.index.json")) {
        Some(index) => shards(&index)?.iter().all(|name| has(name)),
        None => has(weights),
    };
    let has_pooling = match repo.get(MODULES) {
        Some(modules) => poolings(&modules).iter().all(|name| has(name)),
        None => true,
    };
    let dir = config.parent().map(Path::to_path_buf);
    Ok(dir.filter(|_| has_weights && has_pooling))
}

/// The configurations of poolings among the parts of a sentence encoder; the usual one for an unreadable file, so that the hub is asked.
fn poolings(modules: &Path) -> Vec<String> {
    let text = read_text(modules, MAX_INDEX).unwrap_or_default();
    let Ok(Value::Array(parts)) = serde_json::from_str(&text) else {
        return vec![POOLING.to_string()];
    };
    let paths = parts.iter().filter_map(|part| part["path"].as_str());
    let files = paths.map(|path| format!("{}/config.json", path.trim_end_matches('/')));
    files.filter(|name| is_pooling(name)).collect()
}

/// Whether a file is the configuration of a pooling, by the name of its folder.
fn is_pooling(name: &str) -> bool {
    let folder = name.strip_suffix("/config.json");
    folder.is_some_and(|folder| is_plain(folder) && folder.ends_with("_Pooling"))
}

pub(super) fn cache(options: &HubOptions) -> Result<Cache, HubError> {
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

/// Checks the names, which become paths.
pub(super) fn repo(model: &str, options: &HubOptions) -> Result<Repo, HubError> {
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

/// Whether a name stays within its directory.
pub(super) fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\', ':']) && !name.starts_with('.')
}

pub(super) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// The files needed to run a model, weights last.
fn wanted(names: &[String]) -> Vec<&str> {
    let has_model = names
        .iter()
        .any(|name| name.starts_with("model") && is_weights(name));
    let is_wanted = |name: &&str| {
        let weights = is_weights(name);
        // Mistral's own layout repeats the weights of the usual one.
        let twice = weights && has_model && !name.starts_with("model");
        let small = [".json", ".jinja"].iter().any(|end| name.ends_with(end));
        let text = matches!(*name, "tokenizer.model" | "vocab.txt" | "merges.txt");
        is_pooling(name) || (is_plain(name) && ((weights && !twice) || small || text))
    };
    let mut wanted: Vec<&str> = names.iter().map(String::as_str).filter(is_wanted).collect();
    wanted.sort_by_key(|name| is_weights(name));
    wanted
}

/// The files listed in an index.
fn shards(index: &Path) -> Result<BTreeSet<String>, HubError> {
    let wrong = |reason: String| HubError::Index {
        path: index.to_path_buf(),
        reason,
    };
    let text = read_text(index, MAX_INDEX).map_err(|error| wrong(error.to_string()))?;
    let json: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let map = json["weight_map"].as_object();
    let map = map.ok_or_else(|| wrong("there is no `weight_map`".to_string()))?;
    if map.is_empty() {
        return Err(wrong("its `weight_map` is empty".to_string()));
    }
    let name = |value: &Value| match value.as_str() {
        Some(name) if is_plain(name) => Ok(name.to_string()),
        _ => Err(wrong(format!(
            "{value} is not the name of a file beside it"
        ))),
    };
    map.values().map(name).collect()
}

#[cfg(test)]
mod tests;
