//! Files and folders as documents.

use super::document::{Body, Document};
use super::error::{DataError, Place};
use super::lines;
use crate::read::read_text;
use std::path::{Path, PathBuf};

/// Bytes of the longest file. Its tokens take as much memory again.
const MAX_FILE: u64 = 16 << 30;

/// The documents of files and folders, in order.
pub(super) fn read(paths: &[PathBuf]) -> Result<Vec<Document>, DataError> {
    let mut files = vec![];
    for path in paths {
        match path.is_dir() {
            true => list(path, &mut files)?,
            false => files.push(path.clone()),
        }
    }
    let mut documents = vec![];
    for path in files {
        let text = read_text(&path, MAX_FILE)?;
        // Some editors put a byte order mark before the text.
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let lines = is_json_lines(&path);
        if text.trim().is_empty() {
            let expected = match lines {
                true => "a JSON object on each line",
                false => "text",
            };
            return Err(DataError::Empty { path, expected });
        }
        match lines {
            true => documents.extend(lines::read(&path, text)?),
            false => documents.push(Document {
                place: Place::file(&path),
                body: Body::File(text.into()),
            }),
        }
    }
    Ok(documents)
}

/// Whether a file of this name has a JSON object on each line: it ends in `.jsonl`, `.ndjson` or `.json`.
///
/// ```
/// use fp8::training::is_json_lines;
/// assert!(is_json_lines("chats.jsonl") && !is_json_lines("chats.txt"));
/// ```
pub fn is_json_lines(path: impl AsRef<Path>) -> bool {
    path.as_ref().extension().is_some_and(|extension| {
        let mut known = ["jsonl", "ndjson", "json"].iter();
        known.any(|known| extension.eq_ignore_ascii_case(known))
    })
}

/// Adds the files of a folder and of the folders in it, sorted by path; those whose names begin with a dot are skipped.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let error = |source| DataError::Folder {
        path: folder.to_path_buf(),
        source,
    };
    let mut entries = vec![];
    for entry in std::fs::read_dir(folder).map_err(error)? {
        let entry = entry.map_err(error)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            // Of the entry itself: a link to a folder might lead back to this one. Reading it as a file is an error.
            let is_folder = entry.file_type().map_err(error)?.is_dir();
            entries.push((entry.path(), is_folder));
        }
    }
    if entries.is_empty() {
        return Err(DataError::Empty {
            path: folder.to_path_buf(),
            expected: "text files or files of JSON lines",
        });
    }
    entries.sort();
    for (path, is_folder) in entries {
        match is_folder {
            true => list(&path, files)?,
            false => files.push(path),
        }
    }
    Ok(())
}
