//! A model on the Hugging Face Hub whose weights are not downloaded: parts of its files are read from the server. Needs the feature `hub`.

use super::hub::{self, HubError, HubOptions};
use fp8_files::Error;
use fp8_files::audit::{self, AuditOptions, Folder, ReadAt, Report};
use hf_hub::Cache;
use hf_hub::api::sync::{Api, ApiBuilder};
use std::collections::VecDeque;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Configurations and indices: the files that are downloaded, into the cache of the hub.
const CONFIGS: [&str; 3] = ["config.json", "params.json", "hf_quant_config.json"];
const INDEX: &str = ".safetensors.index.json";

/// The shortest range that is asked for. Scales of one dtype lie next to each other, so the next one is often in it.
const AHEAD: usize = 1 << 18;
/// Ranges that are kept.
const KEPT: usize = 8;
/// Attempts for each range.
const ATTEMPTS: usize = 3;

/// Checks the model `OWNER/NAME` of the hub as [`audit::audit`] does. A model that is complete in the cache is read there. Otherwise configurations
/// are downloaded, and of the weights only what `checks` reads: headers and scales, and codes if it says so.
///
/// # Errors
/// [`HubError`] for an invalid name, and if the list of files or a configuration cannot be downloaded. Weights that cannot be read are findings.
///
/// ```no_run
/// use fp8::audit::{AuditOptions, Codes};
/// use fp8::models::{hub::HubOptions, remote};
///
/// let checks = AuditOptions::default().with_codes(Codes::None);
/// let report = remote::audit("Qwen/Qwen3-8B-FP8", &HubOptions::default(), &checks)?;
/// assert!(report.is_clean());
/// # Ok::<(), fp8::models::hub::HubError>(())
/// ```
pub fn audit(model: &str, options: &HubOptions, checks: &AuditOptions) -> Result<Report, HubError> {
    if let Some(dir) = hub::cached(model, options)? {
        return Ok(audit::audit_dir(dir, checks));
    }
    let folder = RemoteFolder::open(model, options)?;
    Ok(audit::audit(&folder, checks))
}

/// The files of a model on the hub.
#[derive(Debug)]
pub struct RemoteFolder {
    model: String,
    /// Configurations in the cache.
    directory: PathBuf,
    /// Names of all files, with their addresses.
    files: Vec<(String, String)>,
    agent: ureq::Agent,
    token: Option<String>,
}

impl RemoteFolder {
    /// Asks for the list of the model's files and downloads its configurations.
    ///
    /// # Errors
    /// [`HubError`].
    pub fn open(model: &str, options: &HubOptions) -> Result<Self, HubError> {
        let cache = hub::cache(options)?;
        let builder = ApiBuilder::from_cache(cache.clone()).with_progress(options.progress);
        let api = builder.build().map_err(hub::failed(model, "anything"))?;
        Self::with_api(model, options, &api, &cache)
    }

    fn with_api(
        model: &str,
        options: &HubOptions,
        api: &Api,
        cache: &Cache,
    ) -> Result<Self, HubError> {
        let info = api.repo(hub::repo(model, options)?).info();
        let info = info.map_err(hub::failed(model, "the list of its files"))?;
        // A branch may move in the meantime; a commit does not.
        let commit = hub::repo(model, &options.clone().with_revision(&info.sha))?;
        let files = api.repo(commit.clone());
        let mut directory = cache.repo(commit).pointer_path(&info.sha);
        let names = info.siblings.into_iter().map(|file| file.rfilename);
        let names: Vec<String> = names.filter(|name| hub::is_plain(name)).collect();
        for name in &names {
            if CONFIGS.contains(&name.as_str()) || name.ends_with(INDEX) {
                let path = files.get(name).map_err(hub::failed(model, name))?;
                directory = path.parent().unwrap_or(Path::new("")).to_path_buf();
            }
        }
        let with_url = |name: String| {
            let url = files.url(&name);
            (name, url)
        };
        Ok(Self {
            model: model.to_string(),
            directory,
            files: names.into_iter().map(with_url).collect(),
            agent: ureq::Agent::new_with_defaults(),
            token: cache.token(),
        })
    }
}

impl Folder for RemoteFolder {
    fn directory(&self) -> &Path {
        &self.directory
    }

    fn names(&self) -> fp8_files::Result<Vec<String>> {
        Ok(self.files.iter().map(|(name, _)| name.clone()).collect())
    }

    fn open(&self, name: &str) -> fp8_files::Result<(Box<dyn ReadAt>, u64)> {
        let failed = |source: io::Error| Error::Read {
            path: self.place(name),
            source,
        };
        let mut files = self.files.iter();
        let Some((_, url)) = files.find(|(known, _)| known == name) else {
            return Err(failed(io::ErrorKind::NotFound.into()));
        };
        let ranges = Ranges {
            agent: self.agent.clone(),
            url: url.clone(),
            token: self.token.clone(),
        };
        let (start, length) = ranges.get(0, AHEAD).map_err(failed)?;
        let kept = VecDeque::from([(0, Arc::new(start))]);
        let file = RemoteFile {
            ranges,
            length,
            kept: Mutex::new(kept),
        };
        Ok((Box::new(file), length))
    }

    fn place(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("hf://{}/{name}", self.model))
    }

    fn is_remote(&self) -> bool {
        true
    }
}

/// Asks for ranges of one file.
#[derive(Debug)]
struct Ranges {
    agent: ureq::Agent,
    url: String,
    token: Option<String>,
}

impl Ranges {
    /// Up to `count` bytes from position `at`, and the length of the file.
    fn get(&self, at: u64, count: usize) -> io::Result<(Vec<u8>, u64)> {
        let mut attempt = 1;
        loop {
            match self.try_get(at, count) {
                Err(error) if attempt < ATTEMPTS && is_passing(&error) => attempt += 1,
                answered => return answered,
            }
        }
    }

    fn try_get(&self, at: u64, count: usize) -> io::Result<(Vec<u8>, u64)> {
        let end = at.saturating_add(count as u64).saturating_sub(1);
        let mut request = self
            .agent
            .get(&self.url)
            .header("Range", format!("bytes={at}-{end}"));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let mut response = request.call().map_err(ureq::Error::into_io)?;
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        if response.status() != 206 {
            let status = response.status();
            return Err(invalid(format!("the server answers a range with {status}")));
        }
        let range = response.headers().get("Content-Range");
        let range = range
            .and_then(|range| range.to_str().ok())
            .unwrap_or_default();
        let length = range
            .rsplit_once('/')
            .and_then(|(_, length)| length.parse().ok());
        let starts = range.starts_with(&format!("bytes {at}-"));
        let Some(length) = length.filter(|_| starts) else {
            return Err(invalid(format!(
                "the server answers with the range {range:?}"
            )));
        };
        let mut bytes = vec![];
        let body = response.body_mut().as_reader();
        body.take(count as u64).read_to_end(&mut bytes)?;
        Ok((bytes, length))
    }
}

/// Whether another attempt may succeed.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(
        error.kind(),
        TimedOut | ConnectionReset | ConnectionAborted | UnexpectedEof | BrokenPipe | Interrupted
    )
}

/// A file on the hub, with the ranges that were read last.
#[derive(Debug)]
struct RemoteFile {
    ranges: Ranges,
    length: u64,
    kept: Mutex<VecDeque<(u64, Arc<Vec<u8>>)>>,
}

impl RemoteFile {
    fn copy_kept(&self, bytes: &mut [u8], at: u64) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        for (start, range) in kept.iter() {
            let offset = at
                .checked_sub(*start)
                .and_then(|offset| usize::try_from(offset).ok());
            let found = offset.and_then(|offset| range.get(offset..)?.get(..bytes.len()));
            if let Some(found) = found {
                bytes.copy_from_slice(found);
                return true;
            }
        }
        false
    }
}

impl ReadAt for RemoteFile {
    fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        if self.copy_kept(bytes, at) {
            return Ok(());
        }
        if at.saturating_add(bytes.len() as u64) > self.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let left = usize::try_from(self.length - at).unwrap_or(usize::MAX);
        let count = bytes.len().max(AHEAD).min(left);
        let (range, _) = self.ranges.get(at, count)?;
        let found = range
            .get(..bytes.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(found);
        if bytes.len() < AHEAD {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push_back((at, Arc::new(range)));
            if kept.len() > KEPT {
                kept.pop_front();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
