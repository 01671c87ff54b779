//! The hub on local files.

use super::*;
use std::fs;

const INDEX: &str = "model.safetensors.index.json";
const SHARDS: &str = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;

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
        write(&snapshot.join(name), text)?;
    }
    let options = HubOptions::default().with_cache_dir(dir.path());
    Ok((dir, options))
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, text)
}

#[test]
fn a_whole_model_in_the_cache_is_found_without_a_network() -> Outcome {
    let (dir, options) = cache_of(&[
        ("config.json", "{}"),
        ("model.safetensors", ""),
        ("tokenizer.json", "{}"),
    ])?;
    let expected = dir.path().join("models--owner--name/snapshots/abc");
    assert_eq!(download("owner/name", &options)?, expected);
    assert_eq!(cached("owner/other", &options)?, None);
    let other = options.with_revision("v2");
    assert_eq!(cached("owner/name", &other)?, None);
    Ok(())
}

#[test]
fn the_hub_is_asked_for_a_tokenizer_that_is_missing() -> Outcome {
    let files = [
        ("config.json", "{}"),
        ("model.safetensors", ""),
        ("tokenizer.json", "{}"),
    ];
    for name in TOKENIZERS {
        let (_dir, options) = cache_of(&[files[0], files[1], (name, "")])?;
        let found = download_by("owner/name", &options, || panic!("{name} is there"))?;
        assert_eq!(Some(found), cached("owner/name", &options)?);
    }
    for revision in ["main", "def"] {
        let (dir, options) = cache_of(&files[..2])?;
        let model = dir.path().join("models--owner--name");
        // The commit of the hub: the one of which the cache has all files but the tokenizer.
        fs::rename(model.join("snapshots/abc"), model.join("snapshots/def"))?;
        fs::write(model.join("refs/main"), "def")?;
        fs::write(model.join("refs/def"), "def")?;
        let options = options.with_revision(revision);
        let expected = model.join("snapshots/def");
        // Without a network, the rest is used.
        let ask = |count| {
            let fetched = || fetch_some(&options, &files, count);
            download_by("owner/name", &options, fetched)
        };
        assert_eq!(ask(0)?, expected);
        assert!(!expected.join("tokenizer.json").exists());
        // Only the tokenizer is downloaded, and then the hub is asked no more.
        assert_eq!(ask(1)?, expected);
        assert!(expected.join("tokenizer.json").is_file());
        let found = download_by("owner/name", &options, || panic!("it is whole"))?;
        assert_eq!(found, expected);
    }
    Ok(())
}

#[test]
fn a_model_of_which_a_file_is_missing_is_not_whole() -> Outcome {
    let mut files = vec![
        ("config.json", "{}"),
        (INDEX, SHARDS),
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
fn an_index_that_names_no_file_is_broken() -> Outcome {
    let (_dir, options) = cache_of(&[("config.json", "{}"), (INDEX, r#"{"weight_map": {}}"#)])?;
    let error = cached("owner/name", &options).expect_err("refused");
    assert!(error.to_string().contains("empty"), "{error}");
    Ok(())
}

#[test]
fn mistrals_own_form_is_whole_too() -> Outcome {
    let mut files = vec![("params.json", "{}")];
    let (_dir, options) = cache_of(&files)?;
    assert_eq!(cached("owner/name", &options)?, None);
    files.push(("consolidated.safetensors", ""));
    let (_dir, options) = cache_of(&files)?;
    assert!(cached("owner/name", &options)?.is_some());
    // As a part of a repository with the usual form it is not what is read.
    files.push(("config.json", "{}"));
    let (_dir, options) = cache_of(&files)?;
    assert_eq!(cached("owner/name", &options)?, None);
    Ok(())
}

#[test]
fn a_sentence_encoder_needs_its_pooling() -> Outcome {
    let modules = r#"[{"path": "", "type": "Transformer"}, {"path": "1_Pooling"}]"#;
    let mut files = vec![
        ("config.json", "{}"),
        ("model.safetensors", ""),
        (MODULES, modules),
    ];
    let (_dir, options) = cache_of(&files)?;
    assert_eq!(cached("owner/name", &options)?, None);
    files.push((POOLING, "{}"));
    let (_dir, options) = cache_of(&files)?;
    assert!(cached("owner/name", &options)?.is_some());
    files.truncate(2);
    files.push((MODULES, r#"[{"path": ""}]"#));
    let (_dir, options) = cache_of(&files)?;
    assert!(cached("owner/name", &options)?.is_some());
    // Its folder may have another number.
    files.truncate(2);
    files.push((MODULES, r#"[{"path": ""}, {"path": "2_Pooling"}]"#));
    files.push((POOLING, "{}"));
    let (_dir, options) = cache_of(&files)?;
    assert_eq!(cached("owner/name", &options)?, None);
    files.push(("2_Pooling/config.json", "{}"));
    let (_dir, options) = cache_of(&files)?;
    assert!(cached("owner/name", &options)?.is_some());
    Ok(())
}

/// Gets the files of commit `def` as a hub would give them, the first `count` of them.
fn fetch_some(
    options: &HubOptions,
    files: &[(&str, &str)],
    count: usize,
) -> Result<PathBuf, HubError> {
    let names: Vec<String> = files.iter().map(|(name, _)| name.to_string()).collect();
    let of = |options: &HubOptions| Ok(cache(options)?.repo(repo("owner/name", options)?));
    let commit = of(&options.clone().with_revision("def"))?;
    let mut left = count;
    fetch(
        "owner/name",
        &names,
        "def",
        &of(options)?,
        &commit,
        |name| {
            if let Some(path) = commit.get(name) {
                return Ok(path);
            }
            left = left
                .checked_sub(1)
                .ok_or(std::io::ErrorKind::TimedOut)
                .map_err(std::io::Error::from)?;
            let path = commit.pointer_path("def").join(name);
            let file = files.iter().find(|(known, _)| *known == name);
            write(&path, file.map_or("", |(_, text)| text))?;
            Ok(path)
        },
    )
}

#[test]
fn an_interrupted_download_is_not_whole_and_goes_on() -> Outcome {
    let encoder = [
        ("model.safetensors", ""),
        ("config.json", "{}"),
        (MODULES, r#"[{"path": "1_Pooling"}]"#),
        ("tokenizer.json", "{}"),
        (POOLING, "{}"),
    ];
    let shards = [
        ("model-1.safetensors", ""),
        ("model-2.safetensors", ""),
        (INDEX, SHARDS),
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
    ];
    for (files, revision) in [
        (encoder, "main"),
        (encoder, "def"),
        (shards, "main"),
        (shards, "def"),
    ] {
        for count in 0..files.len() {
            // An older commit was not whole either.
            let (dir, options) =
                cache_of(&[("config.json", "old"), ("model-1.safetensors", "old")])?;
            let options = options.with_revision(revision);
            let error = fetch_some(&options, &files, count).expect_err("interrupted");
            assert!(matches!(error, HubError::Download { .. }), "{error}");
            assert_eq!(cached("owner/name", &options)?, None, "{revision} {count}");
            // The rest, and nothing of the older commit.
            let whole = fetch_some(&options, &files, files.len() - count)?;
            let expected = dir.path().join("models--owner--name/snapshots/def");
            assert_eq!(whole, expected);
            for (name, text) in files {
                assert_eq!(fs::read_to_string(whole.join(name))?, text, "{name}");
            }
            assert_eq!(cached("owner/name", &options)?, Some(whole));
        }
    }
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
    let error = cached("a/b", &revision).expect_err("a revision elsewhere");
    let is_named = matches!(&error, HubError::Name { what: "revision", name } if name == "../x");
    assert!(is_named, "{error}");
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
        "model-00001-of-00001.safetensors",
        "config.json",
        "consolidated.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "pytorch_model.bin",
        "onnx/model.safetensors",
        "../evil.json",
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "3_Pooling/config.json",
        "../4_Pooling/config.json",
        "tokenizer.model",
    ];
    let names = names.map(str::to_string);
    let expected = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "modules.json",
        "1_Pooling/config.json",
        "3_Pooling/config.json",
        "tokenizer.model",
        "model-00001-of-00001.safetensors",
    ];
    assert_eq!(wanted(&names), expected);
    let mistral = ["params.json", "consolidated.safetensors"].map(str::to_string);
    assert_eq!(wanted(&mistral), mistral);
}
