//! The hub as a local server.

use super::*;
use fp8_files::audit::{Codes, Fault};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// A server of the files of `owner/name`, which answers ranges, and counts the bytes of weights that it sends.
struct Server {
    endpoint: String,
    sent: Arc<AtomicU64>,
}

impl Server {
    fn of(files: Vec<(String, Vec<u8>)>) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let sent = Arc::new(AtomicU64::new(0));
        let (files, counter) = (Arc::new(files), sent.clone());
        // It ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (files, counter) = (files.clone(), counter.clone());
                std::thread::spawn(move || answer(stream, &files, &counter));
            }
        });
        Ok(Self { endpoint, sent })
    }

    fn folder(&self, cache: &Path) -> Result<RemoteFolder, HubError> {
        let options = HubOptions::default().with_cache_dir(cache);
        let cache = Cache::new(cache.to_path_buf());
        let builder = ApiBuilder::from_cache(cache.clone()).with_progress(false);
        let api = builder.with_endpoint(self.endpoint.clone()).build();
        let api = api.map_err(hub::failed("owner/name", "anything"))?;
        RemoteFolder::with_api("owner/name", &options, &api, &cache)
    }
}

/// Answers the requests of one connection.
fn answer(stream: TcpStream, files: &[(String, Vec<u8>)], sent: &AtomicU64) -> Option<()> {
    let mut writer = stream.try_clone().ok()?;
    let mut lines = BufReader::new(stream).lines();
    loop {
        let request = lines.next()?.ok()?;
        let mut range = None;
        for line in lines.by_ref() {
            let line = line.ok()?;
            if line.is_empty() {
                break;
            }
            let line = line.to_ascii_lowercase();
            if let Some(text) = line.strip_prefix("range: bytes=") {
                let (begin, end) = text.split_once('-')?;
                let end = match end {
                    "" => usize::MAX,
                    end => end.parse::<usize>().ok()?.checked_add(1)?,
                };
                range = Some((begin.parse::<usize>().ok()?, end));
            }
        }
        let path = request.split(' ').nth(1)?;
        let body = match path.rsplit_once("/resolve/abc/") {
            Some((_, name)) => files
                .iter()
                .find(|(known, _)| known == name)
                .map(|(_, bytes)| bytes.clone()),
            None => {
                let names = files
                    .iter()
                    .map(|(name, _)| format!(r#"{{"rfilename":"{name}"}}"#));
                let names = names.collect::<Vec<_>>().join(",");
                Some(format!(r#"{{"siblings":[{names}],"sha":"abc"}}"#).into_bytes())
            }
        };
        let Some(body) = body else {
            write!(
                writer,
                "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
            )
            .ok()?;
            continue;
        };
        let length = body.len();
        let headers = "X-Repo-Commit: abc\r\nETag: \"etag\"\r\n";
        let part = match range {
            Some((begin, end)) => {
                let part = body.get(begin..end.min(length))?;
                let last = begin + part.len().max(1) - 1;
                write!(
                    writer,
                    "HTTP/1.1 206 Partial Content\r\n{headers}Content-Range: bytes {begin}-{last}/{length}\r\n\
                     Content-Length: {}\r\n\r\n",
                    part.len()
                )
                .ok()?;
                part
            }
            None => {
                write!(
                    writer,
                    "HTTP/1.1 200 OK\r\n{headers}Content-Length: {length}\r\n\r\n"
                )
                .ok()?;
                &body
            }
        };
        if path.ends_with(".safetensors") {
            sent.fetch_add(part.len() as u64, Ordering::Relaxed);
        }
        writer.write_all(part).ok()?;
    }
}

/// The files of a golden model.
fn golden(family: &str) -> io::Result<Vec<(String, Vec<u8>)>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/families")
        .join(family);
    let names = ["config.json", "model.safetensors"];
    let file = |name: &str| Ok((name.to_string(), std::fs::read(dir.join(name))?));
    names.into_iter().map(file).collect()
}

#[test]
fn a_model_on_the_hub_is_checked_from_its_headers_and_scales() -> Outcome {
    let files = golden("ct_static_tensor")?;
    let whole = files[1].1.len() as u64;
    let (server, cache) = (Server::of(files)?, tempfile::tempdir()?);
    let folder = server.folder(cache.path())?;
    let checks = AuditOptions::default().with_codes(Codes::None);
    let report = audit::audit(&folder, &checks);
    assert!(report.is_clean(), "{:?}", report.findings);
    assert_eq!((report.layers, report.bytes_read), (14, 14 * 8));
    let sent = server.sent.load(Ordering::Relaxed);
    assert!(sent < whole, "{sent} of {whole} bytes");
    let report = audit::audit(&folder, &AuditOptions::default());
    assert!(report.is_clean(), "{:?}", report.findings);
    Ok(())
}

#[test]
fn its_faults_are_named_with_the_files_of_the_hub() -> Outcome {
    let mut files = golden("hf_block_f32")?;
    let config = String::from_utf8(files[0].1.clone())?.replace("128", "64");
    files[0].1 = config.into_bytes();
    let length = files[1].1.len();
    files[1].1.truncate(length - 10);
    let (server, cache) = (Server::of(files)?, tempfile::tempdir()?);
    let report = audit::audit(&server.folder(cache.path())?, &AuditOptions::default());
    let faults: Vec<Fault> = report.groups().into_keys().collect();
    assert!(faults.contains(&Fault::FileTruncated), "{faults:?}");
    assert!(faults.contains(&Fault::ScaleShape), "{faults:?}");
    Ok(())
}

#[test]
fn a_missing_shard_and_a_server_without_ranges_are_findings() -> Outcome {
    let index = r#"{"weight_map": {"a": "model-1.safetensors"}}"#;
    let files = vec![(
        "model.safetensors.index.json".to_string(),
        index.as_bytes().to_vec(),
    )];
    let (server, cache) = (Server::of(files)?, tempfile::tempdir()?);
    let report = audit::audit(&server.folder(cache.path())?, &AuditOptions::default());
    assert_eq!(report.findings[0].fault, Fault::FileMissing);
    assert_eq!(report.findings[0].subject, "model-1.safetensors");
    let missing = server.folder(cache.path())?;
    let error = missing.open("model-1.safetensors").map(drop);
    let is_missing = matches!(&error, Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound);
    assert!(is_missing, "{error:?}");
    Ok(())
}
