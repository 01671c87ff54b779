//! Chat messages, and the entries of tokenizer files that describe chats.

use serde_json::Value;
use std::collections::BTreeMap;

/// One turn of a chat.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl ChatMessage {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// A special token: a string, or an object whose `content` is the string.
pub(crate) fn special(config: &Value, key: &str) -> Option<String> {
    text(&config[key])
}

fn text(token: &Value) -> Option<String> {
    let text = token.as_str().or_else(|| token["content"].as_str());
    text.map(str::to_string)
}

/// The special tokens of a model by the names that chat templates give them: text, or a list of texts.
pub(crate) type SpecialTokens = BTreeMap<String, Value>;

/// The special tokens of a `tokenizer_config.json`. As in transformers, those that are missing or empty have no entry.
pub(crate) fn special_tokens(config: &Value) -> SpecialTokens {
    const NAMES: [&str; 7] = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"];
    let names = NAMES.iter().map(|name| format!("{name}_token"));
    let named = names.filter_map(|name| Some((name.clone(), special(config, &name)?)));
    // Tokens that only some models have, `image_token` for example.
    let extra = &config["extra_special_tokens"];
    let keys = extra.as_object().into_iter().flatten().map(|(key, _)| key);
    let extra = keys.filter_map(|key| Some((key.clone(), special(extra, key)?)));
    let mut tokens: SpecialTokens = (named.chain(extra))
        .filter(|(_, text)| !text.is_empty())
        .map(|(name, text)| (name, Value::String(text)))
        .collect();
    let additional = "additional_special_tokens";
    if let Some(list) = config[additional].as_array()
        && !list.is_empty()
    {
        let texts = list.iter().filter_map(text).map(Value::String);
        tokens.insert(additional.into(), texts.collect());
    }
    tokens
}

/// A `tokenizer_config.json` with the tokens of `special_tokens_map.json`, which replace its own unless it has `added_tokens_decoder`: newer
/// versions of transformers write that, and no longer read the other file. Lists are put together.
pub(crate) fn with_special_tokens(config: Value, map: &Value) -> Value {
    let (mut config, map) = match map {
        Value::Object(map) if config["added_tokens_decoder"].is_null() => (config, map),
        _ => return config,
    };
    if config.is_null() {
        config = Value::Object(serde_json::Map::new());
    }
    if let Some(entries) = config.as_object_mut() {
        for (key, token) in map.iter().filter(|(_, token)| !token.is_null()) {
            match (entries.get_mut(key), token) {
                (Some(Value::Array(own)), Value::Array(more)) => {
                    let new: Vec<Value> =
                        more.iter().filter(|&x| !own.contains(x)).cloned().collect();
                    own.extend(new);
                }
                _ => {
                    entries.insert(key.clone(), token.clone());
                }
            }
        }
    }
    config
}

/// The template: a string, or the default one of a list of named templates.
pub(crate) fn chat_template(config: &Value) -> Option<String> {
    let template = &config["chat_template"];
    let named = || {
        let templates = template.as_array()?;
        let default = templates.iter().find(|entry| entry["name"] == "default")?;
        default["template"].as_str()
    };
    template.as_str().or_else(named).map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_and_templates_are_read_in_both_spellings() {
        let config = serde_json::json!({
            "bos_token": "<s>", "eos_token": { "content": "</s>" },
            "chat_template": [{ "name": "tool", "template": "t" }, { "name": "default", "template": "d" }],
        });
        assert_eq!(special(&config, "bos_token").as_deref(), Some("<s>"));
        assert_eq!(special(&config, "eos_token").as_deref(), Some("</s>"));
        assert_eq!(special(&config, "pad_token"), None);
        assert_eq!(chat_template(&config).as_deref(), Some("d"));
    }

    #[test]
    fn tokens_of_an_older_file_replace_those_of_older_configurations() {
        let list = "additional_special_tokens";
        let map =
            serde_json::json!({ "bos_token": "<a>", "pad_token": null, list: ["<x>", "<y>"] });
        let old = serde_json::json!({
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", list: ["<z>", "<x>"],
        });
        let want = serde_json::json!({
            "bos_token": "<a>", "eos_token": "</s>", "pad_token": "<p>", list: ["<z>", "<x>", "<y>"],
        });
        assert_eq!(with_special_tokens(old.clone(), &map), want);
        let want = serde_json::json!({ "bos_token": "<a>", list: ["<x>", "<y>"] });
        assert_eq!(with_special_tokens(Value::Null, &map), want);
        let mut new = old.clone();
        new["added_tokens_decoder"] = serde_json::json!({});
        assert_eq!(with_special_tokens(new.clone(), &map), new);
        assert_eq!(with_special_tokens(old.clone(), &Value::Null), old);
    }

    #[test]
    fn templates_know_every_special_token() {
        let config = serde_json::json!({
            "bos_token": null, "eos_token": { "content": "</s>" }, "pad_token": "<pad>", "unk_token": "",
            "additional_special_tokens": ["<a>", { "content": "<b>" }],
            "extra_special_tokens": { "image_token": "<image>" }, "model_max_length": 5,
        });
        let want = serde_json::json!({
            "eos_token": "</s>", "pad_token": "<pad>", "additional_special_tokens": ["<a>", "<b>"],
            "image_token": "<image>",
        });
        assert_eq!(serde_json::json!(special_tokens(&config)), want);
    }
}
