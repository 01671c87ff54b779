//! The folders and files of runs, and how errors read.

use crate::calibrate::{self, end};
use crate::{candle_sources, runs};
use anyhow::anyhow;
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use fp8::models::{Llama, LlamaConfig};
use fp8::training::{Line, Metrics};
use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::path::Path;

type Outcome = Result<(), Box<dyn Error>>;

/// Writes the files of a finished run.
fn finish(dir: &Path) -> Outcome {
    for name in ["metrics.jsonl", "config.json", "model.safetensors"] {
        fs::write(dir.join(name), "old")?;
    }
    fs::write(dir.join("checkpoint/f32.safetensors"), "old")?;
    Ok(())
}

#[test]
fn runs_without_a_named_folder_go_to_fresh_ones() -> Outcome {
    let root = tempfile::tempdir()?;
    let default = root.path().join("target/train_gpt");
    let error = runs::newest_model(&default).unwrap_err().to_string();
    assert!(error.contains("holds no model"), "{error}");
    for name in ["train_gpt", "train_gpt-2", "train_gpt-3"] {
        let dir = runs::begin(None, &default, false, true)?;
        assert_eq!(dir, root.path().join("target").join(name));
        finish(&dir)?;
    }
    let first = default.join("checkpoint/f32.safetensors");
    assert_eq!(fs::read_to_string(first)?, "old");
    // The folder of a run that stopped before it wrote anything is used again.
    let fourth = runs::begin(None, &default, false, true)?;
    assert_eq!(runs::begin(None, &default, false, true)?, fourth);
    assert_eq!(
        runs::newest_model(&default)?,
        root.path().join("target/train_gpt-3")
    );
    Ok(())
}

#[test]
fn an_earlier_run_is_removed_only_with_overwrite() -> Outcome {
    let root = tempfile::tempdir()?;
    let (out, default) = (root.path().join("out"), root.path().join("default"));
    let begin = |overwrite| runs::begin(Some(&out), &default, overwrite, true);
    assert_eq!(begin(false)?, out);
    for file in ["metrics.jsonl", "checkpoint/delayed.safetensors"] {
        fs::write(out.join(file), "old")?;
        let error = begin(false).unwrap_err().to_string();
        assert!(
            error.contains("--overwrite") && error.contains("--resume") && error.contains(file),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1);
        assert_eq!(fs::read_to_string(out.join(file))?, "old");
        fs::remove_file(out.join(file))?;
    }
    // Not every example can resume a run.
    finish(&out)?;
    let error = runs::begin(Some(&out), &default, false, false).unwrap_err();
    assert!(!error.to_string().contains("--resume"), "{error}");
    fs::write(out.join("notes.txt"), "mine")?;
    begin(true)?;
    let left = fs::read_dir(&out)?.map(|entry| Ok(entry?.file_name()));
    let mut left = left.collect::<Result<Vec<_>, std::io::Error>>()?;
    left.sort();
    assert_eq!(left, ["checkpoint", "notes.txt"]);
    assert_eq!(fs::read_dir(out.join("checkpoint"))?.count(), 0);
    Ok(())
}

#[test]
fn calibrate_replaces_a_model_only_with_overwrite() -> Outcome {
    let root = tempfile::tempdir()?;
    let path = |name: &str| root.path().join(name).display().to_string();
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2,
    });
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    Llama::new(&LlamaConfig::parse("config.json", &config)?, vb)?;
    fs::create_dir(path("model"))?;
    fs::write(path("model/config.json"), config.to_string())?;
    vars.save(path("model/model.safetensors"))?;
    let ids = Tensor::new(&[[1u32, 5, 9, 2]], &Device::Cpu)?;
    let ids = HashMap::from([("input_ids", ids)]);
    candle_core::safetensors::save(&ids, path("ids.safetensors"))?;
    let (model, ids, out) = (path("model"), path("ids.safetensors"), path("out"));
    let run = |more: &[&str]| {
        let args = ["calibrate", &model, "--ids", &ids, "--recipe", "rowwise"];
        let args = [&args, &["--out", &out][..], more].concat();
        calibrate::run(&calibrate::Args::try_parse_from(args)?)
    };
    run(&[])?;
    let written = path("out/model.safetensors");
    fs::write(&written, "old")?;
    let error = run(&[]).unwrap_err().to_string();
    assert!(error.contains(&out), "{error}");
    assert!(error.contains("--overwrite"), "{error}");
    assert_eq!(fs::read(&written)?, b"old");
    run(&["--overwrite"])?;
    assert_ne!(fs::read(&written)?, b"old");
    // Parts of another model; whoever opened the folder would read its shards, so these are not replaced on request either.
    fs::remove_dir_all(&out)?;
    fs::create_dir(&out)?;
    for (file, text) in [
        ("config.json", "{}"),
        ("model.safetensors.index.json", r#"{"weight_map": {}}"#),
    ] {
        let path = format!("{out}/{file}");
        fs::write(&path, text)?;
        let error = run(&[]).unwrap_err().to_string();
        let replaced = file == "config.json";
        assert!(error.contains(file), "{error}");
        assert_eq!(error.contains("--overwrite"), replaced, "{error}");
        if !replaced {
            let error = run(&["--overwrite"]).unwrap_err().to_string();
            assert!(
                error.contains(file) && error.contains("remove it"),
                "{error}"
            );
        }
        assert_eq!(fs::read_to_string(&path)?, text);
        fs::remove_file(&path)?;
    }
    Ok(())
}

#[test]
fn options_of_what_calibrate_writes_need_a_recipe() {
    let all = ["calibrate", "model", "--ids", "ids"];
    let needy: [&[&str]; 2] = [&["--to", "autofp8"], &["--power-of-two-inputs"]];
    for more in needy {
        let args = [&all[..], more].concat();
        let error = calibrate::Args::try_parse_from(args).err();
        let error = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("--recipe"), "{more:?}: {error}");
    }
    assert!(calibrate::Args::try_parse_from(all).is_ok());
}

#[cfg(unix)]
#[test]
fn metrics_are_a_regular_file() -> Outcome {
    let dir = tempfile::tempdir()?;
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("metrics.jsonl"))?;
    let error = Metrics::open(dir.path(), |_: &Line| true).err();
    let error = error.ok_or("a device was read")?.to_string();
    assert!(error.contains("not a regular file"), "{error}");
    Ok(())
}

#[test]
fn the_sources_of_candle_are_found_without_cargo() -> Outcome {
    let folder = candle_sources::candle_sources()?;
    assert!(folder.join("tensor.rs").is_file(), "{}", folder.display());
    Ok(())
}

#[test]
fn an_error_is_one_line_without_its_backtrace() {
    let inner = candle_core::Error::Msg("no such tensor".into());
    let inner = candle_core::Error::WithBacktrace {
        inner: Box::new(inner),
        backtrace: Box::new(Backtrace::force_capture()),
    };
    let error = anyhow::Error::new(inner).context("loading the model");
    assert_eq!(end::one_line(&error), "loading the model: no such tensor");
    let named = anyhow!("disk full").context("cannot write: disk full");
    assert_eq!(end::one_line(&named), "cannot write: disk full");
}
