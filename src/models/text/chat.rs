//! Chat messages, and the entries of tokenizer files that describe chats.

use serde_json::Value;

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
    let token = &config[key];
    let text = token.as_str().or_else(|| token["content"].as_str());
    text.map(str::to_string)
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
}
