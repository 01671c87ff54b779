//! Keeps what is written away from what is read.

use super::FileError;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// Fails if writing the directory `target` could replace or change one of `inputs`, files or directories that the program reads: if they are the
/// same, or one lies within the other. Links are followed, also those above a target that does not exist yet.
///
/// # Errors
/// [`FileError::IsInput`] with the first such input.
///
/// ```
/// use fp8_files::atomic::{FileError, keep_apart};
/// # let dir = tempfile::tempdir().unwrap();
/// let model = dir.path().join("model");
/// std::fs::create_dir(&model).unwrap();
/// assert!(keep_apart(dir.path().join("model-fp8"), [&model]).is_ok());
/// let refused = keep_apart(model.join("fp8"), [&model]);
/// assert!(matches!(refused, Err(FileError::IsInput { .. })));
/// ```
pub fn keep_apart<P: AsRef<Path>>(
    target: impl AsRef<Path>,
    inputs: impl IntoIterator<Item = P>,
) -> Result<(), FileError> {
    let target = target.as_ref();
    let real = resolved(target);
    for input in inputs {
        let input = input.as_ref();
        let other = resolved(input);
        let relation = match (real.starts_with(&other), other.starts_with(&real)) {
            (true, true) => "is",
            (true, false) => "lies within",
            (false, true) => "holds",
            (false, false) => continue,
        };
        return Err(FileError::IsInput {
            path: target.to_path_buf(),
            relation,
            input: input.to_path_buf(),
        });
    }
    Ok(())
}

/// The path without links and `..`, as far as it exists; the rest by its names alone.
fn resolved(path: &Path) -> PathBuf {
    let full = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let mut missing: Vec<OsString> = vec![];
    let mut above = full.as_path();
    loop {
        if let Ok(mut real) = above.canonicalize() {
            for name in missing.iter().rev() {
                match name == ".." {
                    true => real.pop(),
                    false => {
                        real.push(name);
                        true
                    }
                };
            }
            return real;
        }
        let (Some(last), Some(parent)) = (above.components().next_back(), above.parent()) else {
            return full;
        };
        if last != Component::CurDir {
            missing.push(last.as_os_str().to_os_string());
        }
        above = parent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relation(target: &Path, input: &Path) -> Option<&'static str> {
        match keep_apart(target, [input]) {
            Ok(()) => None,
            Err(FileError::IsInput { relation, .. }) => Some(relation),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn targets_are_compared_with_what_paths_name() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        std::fs::create_dir_all(model.join("sub")).unwrap();
        let file = model.join("model.safetensors");
        std::fs::write(&file, "").unwrap();
        let cases = [
            (model.clone(), Some("is")),
            (model.join("."), Some("is")),
            (model.join("sub/.."), Some("is")),
            (model.join("sub"), Some("lies within")),
            (model.join("new/deeper"), Some("lies within")),
            (dir.path().join("new/../model/x"), Some("lies within")),
            (dir.path().to_path_buf(), Some("holds")),
            // The beginning of a name is not a directory above it.
            (dir.path().join("model-fp8"), None),
            (model.join("../other"), None),
            (model.join("new/../../other"), None),
        ];
        for (target, expected) in cases {
            assert_eq!(relation(&target, &model), expected, "{}", target.display());
        }
        assert_eq!(relation(&model, &file), Some("holds"));
        assert_eq!(relation(&model.join("out"), &file), None);
    }

    #[test]
    #[cfg(unix)]
    fn links_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (model, link) = (dir.path().join("model"), dir.path().join("link"));
        std::fs::create_dir(&model).unwrap();
        std::os::unix::fs::symlink(&model, &link).unwrap();
        assert_eq!(relation(&link, &model), Some("is"));
        assert_eq!(relation(&model, &link), Some("is"));
        assert_eq!(relation(&link.join("new"), &model), Some("lies within"));
    }
}
