//! The entries of a file that hold the tokenizer.

use super::described::Described;
use super::options::GgufOptions;
use super::vocabulary::{self, Kind, Vocabulary};
use crate::models::error::{GgufError, Result};
use crate::models::families::Config;
use crate::models::files::{Entries, read_json};
use crate::models::text::{MAX_TOKENIZER, Tokenizer, chat_template, special, with_special_tokens};
use crate::read::{read_text, read_text_if_present};
use candle_core::quantized::gguf_file::Value as Entry;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Bytes of the longest chat template.
const MAX_TEMPLATE: u64 = 1 << 20;

/// The files of a tokenizer: in the source's directory, or made by the source.
struct Files {
    directory: Option<PathBuf>,
    made: BTreeMap<String, Value>,
}

impl Files {
    fn of(model: &Described<'_>) -> Result<Self> {
        Ok(Self {
            directory: model.source.directory(),
            made: model.source.files()?,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        let directory = self.directory.clone().unwrap_or_default();
        directory.join(name)
    }

    /// A small file; null if there is none.
    fn json(&self, name: &str) -> Result<Value> {
        let found = match (self.made.get(name), &self.directory) {
            (Some(made), _) => Some(made.clone()),
            (None, Some(_)) => read_json(&self.path(name))?,
            (None, None) => None,
        };
        Ok(found.unwrap_or(Value::Null))
    }

    fn tokenizer(&self) -> Result<String> {
        match self.made.get("tokenizer.json") {
            Some(made) => Ok(made.to_string()),
            None => Ok(read_text(self.path("tokenizer.json"), MAX_TOKENIZER)?),
        }
    }

    fn template(&self, config: &Value) -> Result<Option<String>> {
        let found = match &self.directory {
            Some(_) => read_text_if_present(self.path("chat_template.jinja"), MAX_TEMPLATE)?,
            None => None,
        };
        Ok(found.or_else(|| chat_template(config)))
    }
}

/// The special tokens of `tokenizer_config.json`, and the ends of their keys in the file.
const SPECIAL: [(&str, &str); 5] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("pad", "padding"),
    ("mask", "mask"),
];

pub(super) fn entries(
    model: &Described<'_>,
    options: &GgufOptions,
) -> Result<Vec<(String, Entry)>> {
    let files = Files::of(model)?;
    let path = files.path("tokenizer.json");
    let text = files.tokenizer()?;
    let json = serde_json::from_str(&text).map_err(|error| GgufError::Broken {
        path: path.clone(),
        reason: error.to_string(),
    })?;
    let map = files.json("special_tokens_map.json")?;
    let config = with_special_tokens(files.json("tokenizer_config.json")?, &map);
    let tokenizer = Tokenizer::of_json(path.clone(), &text, &config)?;
    let rows = match &model.parsed {
        Config::Llama(config) => config.vocab_size,
        Config::Bert(config) => config.vocab_size,
    };
    let pre = options.pre_tokenizer.as_deref();
    let vocabulary = vocabulary::read(&path, &json, rows, pre)?;

    let mut ids = BTreeMap::new();
    for (token, key) in SPECIAL {
        if let Some(id) = id(&files, model, &tokenizer, &config, token)? {
            ids.insert(key, id);
        }
    }
    if vocabulary.kind == Kind::Bert {
        // llama.cpp puts the first before a text and the second after it.
        for (token, key) in [("cls_token", "bos"), ("sep_token", "seperator")] {
            let found = special(&config, token).and_then(|text| tokenizer.token_id(&text));
            ids.extend(found.map(|id| (key, id)));
        }
    }
    let mut entries = of_vocabulary(vocabulary);
    let mut add = |key: &str, value| entries.push((format!("tokenizer.ggml.{key}"), value));
    for (key, id) in &ids {
        add(&format!("{key}_token_id"), Entry::U32(*id));
    }
    if !matches!(model.parsed, Config::Bert(_)) {
        let (before, after) = around(&tokenizer)?;
        for (key, added, token) in [
            ("add_bos_token", before, ids.get("bos")),
            ("add_eos_token", after, ids.get("eos")),
        ] {
            let adds = !added.is_empty();
            if adds && (added.len() > 1 || token != added.first()) {
                let error = GgufError::UnsupportedTokenizer {
                    path,
                    key: "post_processor",
                    value: format!("one that adds the tokens {added:?}"),
                    known: "those that add the first or the last token of a text",
                };
                return Err(error.into());
            }
            add(key, Entry::Bool(adds));
        }
    }
    if let Some(template) = files.template(&config)? {
        let key = "tokenizer.chat_template".to_string();
        entries.push((key, Entry::String(template)));
    }
    Ok(entries)
}

fn of_vocabulary(vocabulary: Vocabulary) -> Vec<(String, Entry)> {
    let name = match vocabulary.kind {
        Kind::Gpt2 => "gpt2",
        Kind::Llama => "llama",
        Kind::Bert => "bert",
    };
    let mut entries = vec![];
    let mut add = |key: &str, value| entries.push((format!("tokenizer.ggml.{key}"), value));
    add("model", Entry::String(name.into()));
    add("pre", Entry::String(vocabulary.pre));
    let (texts, kinds): (Vec<_>, Vec<_>) = vocabulary.tokens.into_iter().unzip();
    let texts = texts.into_iter().map(Entry::String);
    add("tokens", Entry::Array(texts.collect()));
    if vocabulary.kind == Kind::Llama {
        let scores = vocabulary.scores.into_iter().map(Entry::F32);
        add("scores", Entry::Array(scores.collect()));
        add("add_space_prefix", Entry::Bool(vocabulary.space_prefix));
    }
    let kinds = kinds.into_iter().map(Entry::I32);
    add("token_type", Entry::Array(kinds.collect()));
    if vocabulary.kind == Kind::Gpt2 {
        let merges = vocabulary.merges.into_iter().map(Entry::String);
        add("merges", Entry::Array(merges.collect()));
    }
    entries
}

/// The id of a special token: by its text in `tokenizer_config.json`, else in the configurations.
fn id(
    files: &Files,
    model: &Described<'_>,
    tokenizer: &Tokenizer,
    config: &Value,
    token: &str,
) -> Result<Option<u32>> {
    let text = special(config, &format!("{token}_token"));
    if let Some(id) = text.and_then(|text| tokenizer.token_id(&text)) {
        return Ok(Some(id));
    }
    let generation = files.json("generation_config.json")?;
    let key = format!("{token}_token_id");
    for (path, json) in [
        (files.path("generation_config.json"), &generation),
        (model.path.clone(), model.config),
    ] {
        if let Some(id) = Entries::new(&path, json).token_ids(&key)?.first() {
            return Ok(Some(*id));
        }
    }
    Ok(None)
}

/// The tokens that the tokenizer adds before and after a text.
fn around(tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>)> {
    let plain = tokenizer.encode("a", false)?;
    let whole = tokenizer.encode("a", true)?;
    let mut places = whole.windows(plain.len().max(1));
    let start = places.position(|window| window == plain).unwrap_or(0);
    let before = whole[..start].to_vec();
    let after = whole.get(start + plain.len()..).unwrap_or_default();
    Ok((before, after.to_vec()))
}
