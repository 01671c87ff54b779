//! `tokenizer.json` from the metadata of a GGUF file.

use super::GgufError;
use super::file::GgufFile;
use super::metadata::integer;
use super::pre::{KNOWN_PRE, LLAMA3, QWEN2};
use serde_json::{Map, Value, json};

/// Kinds of tokens, by `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

impl GgufFile {
    /// The `tokenizer.json` of this model, for byte-level BPE (`tokenizer.ggml.model` is `gpt2`).
    ///
    /// # Errors
    /// [`GgufError::UnsupportedTokenizer`] for other kinds and for a `tokenizer.ggml.pre` that is not known, and
    /// [`GgufError`] for entries that are missing or contradict each other.
    pub(crate) fn tokenizer_json(&self) -> Result<Value, GgufError> {
        let unsupported = |key, value: &str, known| GgufError::UnsupportedTokenizer {
            path: self.path().to_path_buf(),
            key,
            value: value.to_string(),
            known,
        };
        let text = |key| {
            let text = self.metadata.text(key)?;
            text.ok_or_else(|| self.metadata.error(key, "a text"))
        };
        let model_key = "tokenizer.ggml.model";
        let model = text(model_key)?;
        if model != "gpt2" {
            return Err(unsupported(model_key, model, "gpt2 (byte-level BPE)"));
        }
        let pre_key = "tokenizer.ggml.pre";
        let pre = text(pre_key)?;

        let byte_level = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex });
        let split = |pattern: &str| {
            let cut = json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
            json!({ "type": "Sequence", "pretokenizers": [cut, byte_level(false)] })
        };
        let (normalizer, pre_tokenizer, ignore_merges) = match pre {
            "gpt-2" => (Value::Null, byte_level(true), false),
            "smollm" | "starcoder" | "refact" | "codeshell" => {
                let digits = json!({ "type": "Digits", "individual_digits": true });
                let both =
                    json!({ "type": "Sequence", "pretokenizers": [digits, byte_level(true)] });
                (Value::Null, both, false)
            }
            "llama-bpe" | "llama3" | "llama-v3" => (Value::Null, split(LLAMA3), true),
            "qwen2" | "deepseek-r1-qwen" => (json!({ "type": "NFC" }), split(QWEN2), false),
            _ => return Err(unsupported(pre_key, pre, KNOWN_PRE)),
        };

        let tokens = self.metadata.texts("tokenizer.ggml.tokens")?;
        let vocab = self.vocabulary(&tokens)?;
        let merges = self.merges(&vocab)?;
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(&tokens)?,
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self.post_processor(&tokens)?,
            "decoder": byte_level(true),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": ignore_merges,
                "vocab": vocab,
                "merges": merges,
            },
        }))
    }

    /// The `tokenizer_config.json` beside it: special tokens and the chat template.
    ///
    /// # Errors
    /// [`GgufError`] for entries of another kind.
    pub(crate) fn tokenizer_config(&self) -> Result<Value, GgufError> {
        let tokens = self.metadata.texts("tokenizer.ggml.tokens")?;
        let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast" });
        for (key, entry) in [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        ] {
            if let Some((_, text)) = self.special(entry, &tokens)? {
                config[key] = json!(text);
            }
        }
        if let Some(length) = self.metadata.count(".context_length")? {
            config["model_max_length"] = json!(length);
        }
        if let Some(template) = self.metadata.text("tokenizer.chat_template")? {
            config["chat_template"] = json!(template);
        }
        Ok(config)
    }

    /// The tokenizer, built in memory.
    ///
    /// # Errors
    /// As [`GgufFile::tokenizer_json`].
    pub(crate) fn tokenizer(&self) -> Result<tokenizers::Tokenizer, GgufError> {
        let json = self.tokenizer_json()?.to_string();
        tokenizers::Tokenizer::from_bytes(json)
            .map_err(|error| self.broken(format!("the tokenizer: {error}")))
    }

    fn vocabulary(&self, tokens: &[&str]) -> Result<Map<String, Value>, GgufError> {
        let mut vocab = Map::new();
        for (id, token) in tokens.iter().enumerate() {
            if let Some(other) = vocab.insert((*token).to_string(), json!(id)) {
                return Err(self.broken(format!("tokens {other} and {id} are both `{token}`")));
            }
        }
        if tokens.len() > self.vocab_size {
            return Err(self.broken(format!(
                "{} tokens have a text, and `token_embd.weight` has {} rows",
                tokens.len(),
                self.vocab_size
            )));
        }
        Ok(vocab)
    }

    fn merges(&self, vocab: &Map<String, Value>) -> Result<Vec<[&str; 2]>, GgufError> {
        let merges = self.metadata.texts("tokenizer.ggml.merges")?;
        let pairs = merges.into_iter().map(|merge| {
            let pair = merge.split_once(' ').filter(|(left, right)| {
                vocab.contains_key(*left)
                    && vocab.contains_key(*right)
                    && vocab.contains_key(&format!("{left}{right}"))
            });
            match pair {
                Some((left, right)) => Ok([left, right]),
                None => Err(self.broken(format!(
                    "the merge `{merge}` joins tokens that are not in the vocabulary"
                ))),
            }
        });
        pairs.collect()
    }

    fn added_tokens(&self, tokens: &[&str]) -> Result<Vec<Value>, GgufError> {
        let key = "tokenizer.ggml.token_type";
        let kinds = self.metadata.array(key)?.unwrap_or_default();
        if !kinds.is_empty() && kinds.len() != tokens.len() {
            return Err(self.metadata.error(key, "one kind per token"));
        }
        let mut added = vec![];
        for (id, (kind, token)) in kinds.iter().zip(tokens).enumerate() {
            let kind = integer(kind);
            let kind = kind.ok_or_else(|| self.metadata.error(key, "an array of numbers"))?;
            if kind == CONTROL || kind == USER_DEFINED {
                added.push(json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind == CONTROL,
                }));
            }
        }
        Ok(added)
    }

    /// The id and text of a special token.
    fn special<'a>(
        &self,
        entry: &str,
        tokens: &[&'a str],
    ) -> Result<Option<(usize, &'a str)>, GgufError> {
        let Some(id) = self.metadata.count(entry)? else {
            return Ok(None);
        };
        let text = tokens.get(id).map(|text| Some((id, *text)));
        text.ok_or_else(|| self.metadata.error(entry, "the number of a token"))
    }

    /// The tokens that the file adds before and after a text.
    fn post_processor(&self, tokens: &[&str]) -> Result<Value, GgufError> {
        let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true });
        let added = |flag: &str, entry: &str, by_default: bool| {
            if !self.metadata.flag(flag)?.unwrap_or(by_default) {
                return Ok(None);
            }
            let token = self.special(entry, tokens)?.map(Some);
            token.ok_or_else(|| self.metadata.error(entry, "the number of a token"))
        };
        // If the file does not say, Llama 3's texts begin with its bos token.
        let pre = self.metadata.text("tokenizer.ggml.pre")?;
        let llama3 = matches!(pre, Some("llama-bpe" | "llama3" | "llama-v3"));
        let bos = added(
            "tokenizer.ggml.add_bos_token",
            "tokenizer.ggml.bos_token_id",
            llama3,
        )?;
        let eos = added(
            "tokenizer.ggml.add_eos_token",
            "tokenizer.ggml.eos_token_id",
            false,
        )?;
        if bos.is_none() && eos.is_none() {
            return Ok(byte_level);
        }
        let piece = |id: &str, kind: usize| json!({ "Sequence": { "id": id, "type_id": kind } });
        let token =
            |text: &str, kind: usize| json!({ "SpecialToken": { "id": text, "type_id": kind } });
        let text = |id: &str, kind: usize| -> Vec<Value> {
            let mut parts = vec![];
            parts.extend(bos.map(|(_, text)| token(text, kind)));
            parts.push(piece(id, kind));
            parts.extend(eos.map(|(_, text)| token(text, kind)));
            parts
        };
        let mut specials = Map::new();
        for (id, text) in [bos, eos].into_iter().flatten() {
            let entry = json!({ "id": text, "ids": [id], "tokens": [text] });
            specials.insert(text.to_string(), entry);
        }
        let pair = [text("A", 0), text("B", 1)].concat();
        let template = json!({
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": pair,
            "special_tokens": specials,
        });
        Ok(json!({ "type": "Sequence", "processors": [byte_level, template] }))
    }
}
