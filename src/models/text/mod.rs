//! Text to tokens and back: the tokenizer, chats and their templates.

mod caught;
mod chat;
mod template;
mod tokenizer;

pub use chat::ChatMessage;
pub use tokenizer::Tokenizer;
