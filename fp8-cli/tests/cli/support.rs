//! Running the tool, and models to run it on.

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Output};

pub fn fp8(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fp8"));
    // Times of layers do not go into the user's own folder.
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.args(args).output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The output of a command, which must succeed.
#[track_caller]
pub fn output(args: &[&str]) -> String {
    let output = fp8(args);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    text(&output.stdout)
}

/// The line on stderr of a command, which must fail.
#[track_caller]
pub fn failure(args: &[&str]) -> String {
    let (code, line) = refusal(args);
    assert!(code == 1 || code == 2, "{args:?}: {code}");
    line
}

/// The exit code and the line on stderr of a command, which must fail.
#[track_caller]
pub fn refusal(args: &[&str]) -> (i32, String) {
    let output = fp8(args);
    assert!(output.stdout.is_empty(), "{args:?}");
    let line = text(&output.stderr);
    assert_eq!(line.lines().count(), 1, "{args:?}: {line}");
    assert!(line.starts_with("error: "), "{line}");
    (output.status.code().unwrap(), line)
}

pub fn golden(family: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/families");
    path.join(family).to_str().unwrap().to_string()
}

/// A directory, and paths in it.
pub struct Dir(tempfile::TempDir);

impl Dir {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn join(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_string()
    }

    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<String> = entries.map(|e| name(e).into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// The JSON that a command prints.
#[track_caller]
pub fn json_output(args: &[&str]) -> Value {
    serde_json::from_str(&output(args)).unwrap()
}

/// A copy of a golden model that a test may change.
pub fn copy(family: &str, to: &str) -> String {
    std::fs::create_dir(to).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(format!("{}/{name}", golden(family)), format!("{to}/{name}")).unwrap();
    }
    to.to_string()
}

/// A copy of a golden model with a tokenizer, whose token 7 is the word `w7`.
pub fn speaking(family: &str, to: &str) -> String {
    copy(family, to);
    write_tokenizer(to, 0..128);
    to.to_string()
}

/// A tokenizer of words `w7` with these numbers; other words are number 0.
pub fn write_tokenizer(dir: &str, ids: std::ops::Range<u32>) {
    let vocab: HashMap<String, u32> = ids.map(|id| (format!("w{id}"), id)).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "w0" },
    });
    std::fs::write(format!("{dir}/tokenizer.json"), tokenizer.to_string()).unwrap();
}

/// Words of these tokens.
pub fn words(ids: &[u64]) -> String {
    let words: Vec<String> = ids.iter().map(|id| format!("w{id}")).collect();
    words.join(" ")
}

/// Changes a JSON file.
pub fn edit(path: &str, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

/// The logits from `fp8 logits` for one row of ids, by token.
#[track_caller]
pub fn logits(dir: &Dir, model: &str, ids: &[u64], options: &[&str]) -> Vec<Vec<f32>> {
    let (input, out) = (dir.join("ids.safetensors"), dir.join("logits.safetensors"));
    let ids: Vec<i64> = ids.iter().map(|&id| id as i64).collect();
    let row = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
    write_ids(&input, row.unsqueeze(0).unwrap());
    output(
        &[
            &["logits", model, "--ids", &input, "--out", &out][..],
            options,
        ]
        .concat(),
    );
    let tensors = candle_core::safetensors::load(&out, &Device::Cpu).unwrap();
    assert_eq!(tensors["logits"].dtype(), DType::F32);
    tensors["logits"].squeeze(0).unwrap().to_vec2().unwrap()
}

pub fn write_ids(path: &str, ids: Tensor) {
    candle_core::safetensors::save(&HashMap::from([("input_ids", ids)]), path).unwrap();
}
