//! What files hold.

use super::error::Place;
use crate::models::ChatMessage;

/// A document and where it is.
#[derive(Debug)]
pub(super) struct Document {
    pub place: Place,
    pub body: Body,
}

/// What a document is.
#[derive(Debug)]
pub(super) enum Body {
    /// The text of a whole file.
    File(String),
    /// `text` of a line.
    Text(String),
    /// `text` and `label`.
    Labelled(String, Label),
    /// `query`, `positive` and perhaps `negative`.
    Texts(Vec<String>),
    /// `prompt` and `completion`, of which the second is learned.
    Completion(String, String),
    /// A chat, of which the assistant's messages from this one on are learned.
    Chat(Vec<ChatMessage>, usize),
}

/// A label, in the order of classes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Label {
    Integer(i64),
    Name(String),
}

impl Label {
    /// The name of its class.
    pub fn name(&self) -> String {
        match self {
            Self::Integer(number) => number.to_string(),
            Self::Name(name) => name.clone(),
        }
    }
}
