//! Damaged files, headers and indexes, and paths that lead out of the directory.

use crate::support::*;
use candle_core::Device;
use fp8_files::Error;
use fp8_files::load::Checkpoint;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn check(case: &str, dir: &Path, parts: &[&str]) {
    let error = Checkpoint::open_dir(dir).expect_err(case);
    assert!(!matches!(error, Error::Candle(_)), "{case}: {error:?}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{case}: {text:?} lacks {part:?}");
    }
}

#[test]
fn directories_without_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().display().to_string();
    check(
        "empty",
        dir.path(),
        &[&here, "model.safetensors", "found 0"],
    );
    check("absent", &dir.path().join("absent"), &["absent"]);
    for name in ["a.safetensors", "b.safetensors"] {
        write(&dir.path().join(name), &[floats("x", &[1], &[1.])], None);
    }
    check("two files and no index", dir.path(), &[&here, "found 2"]);
    check(
        "a file",
        &dir.path().join("a.safetensors"),
        &["a.safetensors"],
    );
    fs::remove_file(dir.path().join("b.safetensors")).unwrap();
    assert_eq!(Checkpoint::open_dir(dir.path()).unwrap().names(), ["x"]);
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    check(
        "a directory as the model",
        dir.path(),
        &["model.safetensors", "directory"],
    );
}

#[test]
fn indexes_that_do_not_fit_their_files() {
    const INDEX: &str = "model.safetensors.index.json";
    let map = |value: Value| json!({"weight_map": value}).to_string();
    let outside = tempfile::tempdir().unwrap();
    write(
        &outside.path().join("o.safetensors"),
        &[floats("x", &[1], &[1.])],
        None,
    );
    let absolute = outside.path().join("o.safetensors").display().to_string();
    let up = format!(
        "../{}/o.safetensors",
        outside.path().file_name().unwrap().display()
    );
    let cases: Vec<(&str, String, Vec<&str>)> = vec![
        ("no JSON", "{".into(), vec!["not valid"]),
        ("no map", "{}".into(), vec!["weight_map"]),
        ("a list", map(json!([])), vec!["weight_map"]),
        ("empty", map(json!({})), vec!["empty"]),
        (
            "a number for a file",
            map(json!({"x": 3})),
            vec!["`x`", "3"],
        ),
        (
            "a file that is missing",
            map(json!({"x": "a.safetensors", "y": "gone.safetensors"})),
            vec!["`gone.safetensors`", "not in the directory"],
        ),
        (
            "a tensor that is missing",
            map(json!({"x": "a.safetensors", "y": "a.safetensors"})),
            vec!["`y`", "a.safetensors"],
        ),
        (
            "a tensor in another file",
            map(json!({"x": "b.safetensors", "z": "b.safetensors"})),
            vec!["`x`", "b.safetensors"],
        ),
        ("up", map(json!({"x": up})), vec!["leads out"]),
        ("absolute", map(json!({"x": absolute})), vec!["leads out"]),
        (
            "up from within",
            map(json!({"x": "sub/../../a.safetensors"})),
            vec!["leads out"],
        ),
        ("no name", map(json!({"x": ""})), vec!["leads out"]),
        ("dots", map(json!({"x": ".."})), vec!["leads out"]),
    ];
    for (case, index, parts) in cases {
        let dir = tempfile::tempdir().unwrap();
        write(
            &dir.path().join("a.safetensors"),
            &[floats("x", &[1], &[1.])],
            None,
        );
        write(
            &dir.path().join("b.safetensors"),
            &[floats("z", &[1], &[1.])],
            None,
        );
        fs::write(dir.path().join(INDEX), index).unwrap();
        check(case, dir.path(), &[&[INDEX][..], &parts].concat());
    }
    // Without an index, one name in two files is an error.
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
    for path in &paths {
        write(path, &[floats("x", &[1], &[1.])], None);
    }
    assert!(matches!(
        Checkpoint::open(&paths),
        Err(Error::DuplicateTensor { .. })
    ));
}

#[test]
fn configurations_that_are_not_json() {
    for (name, text) in [
        ("config.json", "{"),
        ("config.json", "\u{0}"),
        ("hf_quant_config.json", "[}"),
        ("params.json", "nope"),
    ] {
        let native = floats("tok_embeddings.weight", &[1], &[1.]);
        let model = Model::new(None, &[native]);
        model.file(name, text);
        let tensors = match name {
            "params.json" => vec![floats("tok_embeddings.weight", &[1], &[1.])],
            _ => vec![floats("x", &[1], &[1.])],
        };
        write(&model.path().join("model.safetensors"), &tensors, None);
        check(name, model.path(), &[name, "not valid"]);
    }
    // A list is valid JSON that declares nothing.
    let model = Model::new(Some(json!([1])), &[floats("x", &[1], &[1.])]);
    assert!(model.open().is_ok());
}

/// A corrupt header gives an error, or values that can be read, but no panic.
#[test]
fn headers_with_a_byte_changed() {
    let config =
        json!({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}});
    let tensors = [
        weight("fc.weight", 4, 32),
        floats("fc.weight_scale", &[], &[0.5]),
        floats("fc.input_scale", &[], &[0.5]),
        floats("fc.bias", &[4], &[1.; 4]),
    ];
    let model = Model::new(Some(config), &tensors);
    let path = model.path().join("model.safetensors");
    let good = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut refused = 0;
    for at in 0..header {
        for change in [
            |_| b'"',
            |_| b'9',
            |byte: u8| byte ^ 0x20,
            |byte: u8| byte.wrapping_add(1),
        ] {
            let mut bytes = good.clone();
            bytes[at] = change(bytes[at]);
            fs::write(&path, bytes).unwrap();
            let Ok(checkpoint) = model.open() else {
                refused += 1;
                continue;
            };
            for path in checkpoint.layer_paths() {
                let _ = checkpoint.stored_layer(&path, &Device::Cpu);
            }
            for name in checkpoint.other_names() {
                let _ = checkpoint.tensor(&name, &Device::Cpu);
            }
        }
    }
    assert!(refused > header, "{refused} of {header}");
    // A truncated file is rejected with an error that names it.
    for len in 0..good.len() {
        fs::write(&path, &good[..len]).unwrap();
        check(
            "cut",
            model.path(),
            &["model.safetensors", "not a valid safetensors file"],
        );
    }
    // Truncating the file after it was opened is an error; with a memory map it would kill the process.
    fs::write(&path, &good).unwrap();
    let checkpoint = model.open().unwrap();
    fs::write(&path, &good[..header]).unwrap();
    let error = checkpoint.stored_layer("fc", &Device::Cpu).unwrap_err();
    assert!(matches!(&error, Error::Read { .. }), "{error:?}");
    assert!(error.to_string().contains("model.safetensors"));
}
