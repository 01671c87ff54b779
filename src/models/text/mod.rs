//! Text to tokens and back: the tokenizer, chats and their templates.

mod caught;
mod chat;
mod template;
mod tokenizer;

pub use chat::ChatMessage;
pub(crate) use chat::{chat_template, special, with_special_tokens};
pub(crate) use tokenizer::MAX_TOKENIZER;
pub use tokenizer::Tokenizer;
