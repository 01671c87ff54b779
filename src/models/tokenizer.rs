//! Text to tokens and back, with what a model's directory says about them.

use super::TextError;
use super::gguf::{GgufError, GgufFile};
use super::options::{read_json, token_ids};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value as Jinja, context};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// `tokenizer.json` of a model's directory, with its special tokens and chat template.
///
/// ```no_run
/// use fp8::models::{ChatMessage, Tokenizer};
///
/// let tokenizer = Tokenizer::open("model")?;
/// let ids = tokenizer.encode("In the beginning", true)?;
/// println!("{}", tokenizer.decode(&ids, true)?);
/// let chat = tokenizer.chat(&[ChatMessage::new("user", "Hello!")])?;
/// let ids = tokenizer.encode(&chat, false)?;
/// # Ok::<(), fp8::models::TextError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    dir: PathBuf,
    bos: Option<u32>,
    eos: Vec<u32>,
    chat_template: Option<String>,
    /// As text, for the chat template.
    bos_text: String,
    eos_text: String,
}

/// One turn of a chat.
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
    ///
    /// ```
    /// let message = fp8::models::ChatMessage::new("user", "Hello!");
    /// assert_eq!(message.role, "user");
    /// ```
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a directory. Special tokens come from `tokenizer_config.json`, numbers of the tokens that end
    /// a text from `generation_config.json`, else `config.json`, else `tokenizer_config.json`; the chat template from
    /// `chat_template.jinja` or `tokenizer_config.json`. Each of these files may be missing. Padding and truncation that
    /// `tokenizer.json` asks for are turned off: what a text has is what it gets.
    ///
    /// # Errors
    /// [`TextError`] naming the file.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, TextError> {
        let dir = dir.as_ref();
        let path = dir.join("tokenizer.json");
        let bytes = read(&path)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(fault(&path))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(fault(&path))?;

        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or(Value::Null);
        let bos_text = special(&config, "bos_token");
        let eos_text = special(&config, "eos_token");
        let mut bos = bos_text.as_ref().and_then(|text| inner.token_to_id(text));
        let mut eos = vec![];
        for name in ["generation_config.json", "config.json"] {
            let path = dir.join(name);
            let json = read_json(&path)?.unwrap_or(Value::Null);
            if eos.is_empty() {
                eos = token_ids(&json, "eos_token_id", &path)?;
            }
            if bos.is_none() {
                bos = token_ids(&json, "bos_token_id", &path)?.first().copied();
            }
        }
        if eos.is_empty() {
            eos.extend(eos_text.as_ref().and_then(|text| inner.token_to_id(text)));
        }
        let chat_template = match std::fs::read_to_string(dir.join("chat_template.jinja")) {
            Ok(text) => Some(text),
            Err(_) => chat_template(&config),
        };
        Ok(Self {
            inner,
            dir: dir.to_path_buf(),
            bos,
            eos,
            chat_template,
            bos_text: bos_text.unwrap_or_default(),
            eos_text: eos_text.unwrap_or_default(),
        })
    }

    /// The tokenizer in a GGUF file, with its special tokens and chat template.
    ///
    /// # Errors
    /// [`GgufError`], also for kinds of tokenizers that are not read.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, GgufError> {
        let inner = file.tokenizer()?;
        let config = file.tokenizer_config()?;
        let bos_text = special(&config, "bos_token");
        let eos_text = special(&config, "eos_token");
        let id = |text: &Option<String>| text.as_ref().and_then(|text| inner.token_to_id(text));
        Ok(Self {
            bos: id(&bos_text),
            eos: id(&eos_text).into_iter().collect(),
            inner,
            dir: file.path().to_path_buf(),
            chat_template: chat_template(&config),
            bos_text: bos_text.unwrap_or_default(),
            eos_text: eos_text.unwrap_or_default(),
        })
    }

    /// The tokens of a text; with `special_tokens` those that the tokenizer puts around a text are there too.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn encode(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode_fast(text, special_tokens);
        Ok(encoding.map_err(self.fault())?.get_ids().to_vec())
    }

    /// The text of tokens, without special tokens where `skip_special_tokens` says so.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        self.inner
            .decode(ids, skip_special_tokens)
            .map_err(self.fault())
    }

    /// The token that begins a text, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end a text; often one, none if nothing is known.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// The number of a token, `None` if there is no such token.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, those added to the vocabulary included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Whether [`Tokenizer::chat`] can write a chat.
    pub fn has_chat_template(&self) -> bool {
        self.chat_template.is_some()
    }

    /// A chat in the form that the model was trained on, up to where the model's answer begins. It holds the special tokens:
    /// encode it without further ones.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`], and [`TextError::ChatTemplate`] for a template that does not compile or refuses these
    /// messages.
    pub fn chat(&self, messages: &[ChatMessage]) -> Result<String, TextError> {
        let path = || self.dir.clone();
        let Some(template) = &self.chat_template else {
            return Err(TextError::NoChatTemplate { path: path() });
        };
        render(template, messages, &self.bos_text, &self.eos_text).map_err(|error| {
            TextError::ChatTemplate {
                path: path(),
                reason: error.to_string(),
            }
        })
    }

    /// The tokenizer itself, for all else that it can do.
    pub fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    fn fault(&self) -> impl FnOnce(tokenizers::Error) -> TextError + use<> {
        fault(&self.dir.join("tokenizer.json"))
    }
}

fn fault(path: &Path) -> impl FnOnce(tokenizers::Error) -> TextError + use<> {
    let path = path.to_path_buf();
    move |error| TextError::Tokenizer {
        path,
        reason: error.to_string(),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    std::fs::read(path).map_err(|source| TextError::Io {
        path: path.to_path_buf(),
        source,
    })
}

/// A special token is written as text, or as an object with it.
fn special(config: &Value, key: &str) -> Option<String> {
    let token = &config[key];
    let text = token.as_str().or_else(|| token["content"].as_str());
    text.map(str::to_string)
}

/// One template, or several with names, of which one is the default.
fn chat_template(config: &Value) -> Option<String> {
    let template = &config["chat_template"];
    let named = || {
        let templates = template.as_array()?;
        let default = templates.iter().find(|entry| entry["name"] == "default")?;
        default["template"].as_str()
    };
    template.as_str().or_else(named).map(str::to_string)
}

/// With the settings and the functions that transformers gives to templates.
fn render(
    template: &str,
    messages: &[ChatMessage],
    bos: &str,
    eos: &str,
) -> Result<String, minijinja::Error> {
    let mut jinja = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    jinja.set_syntax(syntax);
    // Methods of Python's texts, lists and dictionaries.
    jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    jinja.add_function("raise_exception", |text: String| -> Result<String, _> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
    });
    let messages: Vec<Jinja> = messages
        .iter()
        .map(|message| context! { role => &message.role, content => &message.content })
        .collect();
    jinja.render_str(
        template,
        context! { messages, bos_token => bos, eos_token => eos, add_generation_prompt => true },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_know_what_transformers_gives_them() -> Result<(), minijinja::Error> {
        let template = "{{ bos_token }}{%- for m in messages %}\n{% if m['role'] == 'user' %}\n<u>{{ m['content'].strip() }}</u>\n{% endif %}\n\
            {% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
        let messages = [ChatMessage::new("user", " hi ")];
        let text = render(template, &messages, "<s>", "</s>")?;
        assert_eq!(text, "<s><u>hi</u>\n<a>");
        Ok(())
    }

    #[test]
    fn a_template_can_refuse() {
        let template = "{{ raise_exception('roles must alternate') }}";
        let error = render(template, &[], "", "").expect_err("refused");
        assert!(
            error.to_string().contains("roles must alternate"),
            "{error}"
        );
        assert!(render("{% for %}", &[], "", "").is_err());
    }

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
