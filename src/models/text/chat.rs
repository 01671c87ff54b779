//! Chats in the form that a model was trained on: messages through the template of its files.

use serde_json::Value;

/// One turn of a chat.
///
/// ```
/// # use fp8::models::Tokenizer;
/// # let dir = tempfile::tempdir()?;
/// # let json = r#"{ "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "Whitespace" }, "model": { "type": "WordLevel",
/// #     "vocab": { "<unk>": 0, "<s>": 1, "</s>": 2, "in": 3, "the": 4, "beginning": 5 }, "unk_token": "<unk>" } }"#;
/// # std::fs::write(dir.path().join("tokenizer.json"), json)?;
/// # let json = r#"{ "bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}</s>" }"#;
/// # std::fs::write(dir.path().join("tokenizer_config.json"), json)?;
/// # let tokenizer = Tokenizer::open(dir.path())?;
/// use fp8::models::ChatMessage;
/// let chat = [ChatMessage::new("user", "in the beginning")];
/// assert_eq!(tokenizer.chat(&chat)?, "in the beginning</s>"); // as this model's template says
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`, or what else the template knows.
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

/// A special token is written as text, or as an object with it.
pub(super) fn special(config: &Value, key: &str) -> Option<String> {
    let token = &config[key];
    let text = token.as_str().or_else(|| token["content"].as_str());
    text.map(str::to_string)
}

/// One template, or several with names, of which one is the default.
pub(super) fn chat_template(config: &Value) -> Option<String> {
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
    fn special_tokens_and_templates_have_two_spellings() {
        let config = serde_json::json!({
            "bos_token": "<s>", "eos_token": { "content": "</s>" },
            "chat_template": [{ "name": "tool", "template": "t" }, { "name": "default", "template": "d" }],
        });
        assert_eq!(special(&config, "bos_token").as_deref(), Some("<s>"));
        assert_eq!(special(&config, "eos_token").as_deref(), Some("</s>"));
        assert_eq!(special(&config, "pad_token"), None);
        assert_eq!(chat_template(&config).as_deref(), Some("d"));
    }
}
