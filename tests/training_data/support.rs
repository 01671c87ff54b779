//! A tokenizer, and files to read.

use fp8::models::Tokenizer;
use fp8::training::{Batch, DataError, Dataset, DatasetOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// As many chat models have it, with other words.
pub const CHATML: &str = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|turn|>assistant\n{% endif %}";

/// Bytes as tokens, with a few pairs, also across a line end; `<s>` before a text.
pub fn byte_pairs() -> Value {
    let special = |id: usize, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
    };
    let names = ["<s>", "</s>", "<|turn|>", "<|end|>"];
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    // Spaces and line ends are written as these letters.
    let letters = (' '..='~')
        .map(|c| if c == ' ' { 'Ġ' } else { c })
        .chain(['Ċ', 'č']);
    let merges = [
        ["Ġ", "a"],
        ["a", "b"],
        ["Ċ", "Ġ"],
        ["Ċ", "Ċ"],
        ["b", "Ġ"],
        ["t", "h"],
        ["th", "e"],
    ];
    let tokens = letters
        .map(String::from)
        .chain(merges.iter().map(|pair| pair.concat()));
    let tokens: Vec<String> = names.map(String::from).into_iter().chain(tokens).collect();
    let vocab: serde_json::Map<String, Value> = tokens
        .into_iter()
        .enumerate()
        .map(|(id, token)| (token, json!(id)))
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": names.iter().enumerate().map(|(id, name)| special(id, name)).collect::<Vec<_>>(),
        "pre_tokenizer": bytes,
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } } },
        "decoder": bytes,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges },
    })
}

/// The end token of [`byte_pairs`].
pub const END: u32 = 1;

/// A folder with a tokenizer, to which tests add data.
pub struct Folder {
    dir: tempfile::TempDir,
    pub tokenizer: Tokenizer,
}

impl Folder {
    pub fn new() -> Self {
        Self::with(&byte_pairs(), CHATML)
    }

    /// With this `tokenizer.json` and chat template.
    pub fn with(tokenizer: &Value, template: &str) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: String| {
            std::fs::write(dir.path().join(name), text).expect("written")
        };
        write("tokenizer.json", tokenizer.to_string());
        let config = json!({ "bos_token": "<s>", "eos_token": "</s>", "chat_template": template });
        write("tokenizer_config.json", config.to_string());
        let tokenizer = Tokenizer::open(dir.path()).expect("a tokenizer");
        Self { dir, tokenizer }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(&path, text).expect("written");
        path
    }

    /// A file with a line for each value.
    pub fn lines(&self, name: &str, values: &[Value]) -> PathBuf {
        let lines: Vec<String> = values.iter().map(Value::to_string).collect();
        self.write(name, lines.join("\n"))
    }

    pub fn open(&self, file: &Path, options: &DatasetOptions) -> Result<Dataset, DataError> {
        Dataset::open(&[file.to_path_buf()], &self.tokenizer, options)
    }

    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, false).expect("tokens")
    }
}

/// A row of a batch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowOf {
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    pub segments: Vec<usize>,
    pub padding: usize,
    pub label: Option<u32>,
}

/// The rows of a batch, whose parts must have the sizes that they promise.
pub fn rows_of(batch: &Batch) -> Vec<RowOf> {
    let (rows, context) = (batch.rows, batch.context);
    assert_eq!(batch.tokens.len(), rows * context);
    assert_eq!(batch.targets.len(), rows * context);
    assert_eq!([batch.segments.len(), batch.padding.len()], [rows; 2]);
    if let Some(labels) = &batch.labels {
        assert_eq!(labels.len(), rows);
    }
    let row = |row: usize| RowOf {
        tokens: batch.tokens[row * context..][..context].to_vec(),
        targets: batch.targets[row * context..][..context].to_vec(),
        segments: batch.segments[row].clone(),
        padding: batch.padding[row],
        label: batch.labels.as_ref().map(|labels| labels[row]),
    };
    (0..rows).map(row).collect()
}

/// All rows of an epoch, in its order.
pub fn epoch(data: &Dataset, epoch: u64) -> Vec<RowOf> {
    rows_of(&data.train_batch(epoch, data.rows()))
}

/// All rows of validation.
pub fn validation(data: &Dataset) -> Vec<RowOf> {
    let batches = data.validation_batches(3);
    batches.flat_map(|batch| rows_of(&batch)).collect()
}
