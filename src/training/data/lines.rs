//! Lines of JSON as documents.

use super::document::{Body, Document, Label};
use super::error::{DataError, Place};
use crate::models::ChatMessage;
use serde_json::{Map, Value};
use std::path::Path;

const EXPECTED: &str = "an object with `text`, with `text` and `label`, with `messages`, with `prompt` and `completion`, or with \
     `query` and `positive`";
/// The keys that say what a line is. All others are ignored, except [`LOST`].
const KEYS: [&str; 5] = ["text", "label", "messages", "prompt", "completion"];
/// The keys of texts that are compared; the last may be missing. Where the first two are, all other keys are ignored.
pub(super) const COMPARED: [&str; 3] = ["query", "positive", "negative"];
/// Keys of chats that change what a template writes, and that templates do not get here.
const LOST: [&str; 2] = ["tools", "documents"];

/// The documents of a file with a JSON object on each line that is not blank. All lines have the same of the known keys.
pub(super) fn read(path: &Path, text: &str) -> Result<Vec<Document>, DataError> {
    let mut documents = vec![];
    // The keys of the first line, and its number.
    let mut first: Option<(String, usize)> = None;
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let number = index + 1;
        let place = Place {
            path: path.to_path_buf(),
            line: Some(number),
        };
        let object = object(&place, line)?;
        let keys = keys(&object);
        match &first {
            None => first = Some((keys, number)),
            Some((expected, _)) if *expected == keys => {}
            Some((expected, at)) => {
                let expected = format!("{expected}, as on line {at}");
                return content(place, keys, expected);
            }
        }
        let body = body(&place, &object)?;
        documents.push(Document { place, body });
    }
    Ok(documents)
}

fn content<T>(
    place: Place,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> Result<T, DataError> {
    Err(DataError::Content {
        place,
        found: found.into(),
        expected: expected.into(),
    })
}

fn object(place: &Place, line: &str) -> Result<Map<String, Value>, DataError> {
    match serde_json::from_str(line) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(Value::Array(_)) => content(place.clone(), "a list", one_on_each_line()),
        Ok(other) => content(place.clone(), kind(&other), EXPECTED),
        // The start of a list over many lines.
        Err(_) if line.trim() == "[" => {
            content(place.clone(), "a list over many lines", one_on_each_line())
        }
        Err(error) => {
            // Its line is always 1.
            let reason = error.to_string();
            let reason = reason.split(" at line ").next().unwrap_or_default();
            Err(DataError::Json {
                place: place.clone(),
                column: error.column(),
                reason: reason.into(),
            })
        }
    }
}

/// What is expected in place of a list of objects.
fn one_on_each_line() -> String {
    format!("one object on each line (`jq -c '.[]'` makes lines of a list): {EXPECTED}")
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Whether a key beside `query` and `positive` holds negative texts in a form of other libraries.
fn is_another_negative(key: &str) -> bool {
    let number = key
        .strip_prefix("negative_")
        .or(key.strip_prefix("negative"));
    let numbered = |number: &str| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    key == "negatives" || number.is_some_and(numbered)
}

fn is_compared(object: &Map<String, Value>) -> bool {
    COMPARED[..2].iter().all(|key| object.contains_key(*key))
}

/// Which of the known keys the line has, for people.
fn keys(object: &Map<String, Value>) -> String {
    let known = match is_compared(object) {
        true => &COMPARED[..],
        false => &KEYS[..],
    };
    let keys = known.iter().filter(|key| object.contains_key(**key));
    let keys: Vec<String> = keys.map(|key| format!("`{key}`")).collect();
    match keys.is_empty() {
        true => "an object with none of the known keys".into(),
        false => format!("an object with {}", keys.join(" and ")),
    }
}

fn body(place: &Place, object: &Map<String, Value>) -> Result<Body, DataError> {
    if is_compared(object) {
        let other = object.keys().find(|key| is_another_negative(key));
        if let Some(key) = other {
            let expected =
                "`negative` alone: write a line for each, with the same query and positive";
            return content(place.clone(), format!("`{key}`"), expected);
        }
        let texts = COMPARED
            .iter()
            .filter_map(|key| Some((key, object.get(*key)?)));
        let texts = texts.map(|(key, value)| string(place, key, value));
        return Ok(Body::Texts(texts.collect::<Result<_, _>>()?));
    }
    let value = KEYS.map(|key| object.get(key));
    match value {
        [Some(text), None, None, None, None] => Ok(Body::Text(string(place, "text", text)?)),
        [Some(text), Some(label), None, None, None] => Ok(Body::Labelled(
            string(place, "text", text)?,
            self::label(place, label)?,
        )),
        [None, None, Some(messages), None, None] => {
            no_lost_keys(place, "the line", object, &LOST)?;
            chat(place, self::messages(place, "messages", messages)?, 0)
        }
        [
            None,
            None,
            None,
            Some(prompt @ Value::Array(_)),
            Some(completion),
        ] => {
            no_lost_keys(place, "the line", object, &LOST)?;
            let mut messages = self::messages(place, "prompt", prompt)?;
            let learned = messages.len();
            messages.extend(self::messages(place, "completion", completion)?);
            chat(place, messages, learned)
        }
        [None, None, None, Some(prompt), Some(completion)] => Ok(Body::Completion(
            string(place, "prompt", prompt)?,
            string(place, "completion", completion)?,
        )),
        _ => content(place.clone(), keys(object), EXPECTED),
    }
}

fn string(place: &Place, key: &str, value: &Value) -> Result<String, DataError> {
    match value {
        Value::String(text) => Ok(text.clone()),
        other => content(
            place.clone(),
            format!("`{key}` is {}", kind(other)),
            "a string",
        ),
    }
}

fn label(place: &Place, value: &Value) -> Result<Label, DataError> {
    let integer = value.as_i64().map(Label::Integer);
    let label = integer.or_else(|| value.as_str().map(|name| Label::Name(name.into())));
    match label {
        Some(label) => Ok(label),
        None => {
            let found = match value {
                Value::Number(number) => format!("`label` is {number}"),
                other => format!("`label` is {}", kind(other)),
            };
            content(place.clone(), found, "a string or a 64-bit integer")
        }
    }
}

fn messages(place: &Place, key: &str, value: &Value) -> Result<Vec<ChatMessage>, DataError> {
    let Value::Array(values) = value else {
        let found = format!("`{key}` is {}", kind(value));
        return content(place.clone(), found, "a list of messages");
    };
    let messages = values.iter().enumerate().map(|(index, value)| {
        let name = format!("message {} of `{key}`", index + 1);
        let Value::Object(message) = value else {
            let found = format!("{name} is {}", kind(value));
            return content(place.clone(), found, "an object with `role` and `content`");
        };
        let part = |part: &str| match message.get(part) {
            Some(Value::String(text)) => Ok(text.clone()),
            other => {
                let found = other.map_or("missing", kind);
                let found = format!("`{part}` of {name} is {found}");
                content(place.clone(), found, "a string")
            }
        };
        let (role, content) = (part("role")?, part("content")?);
        let others = message.keys().map(String::as_str);
        let others: Vec<&str> = others
            .filter(|key| !["role", "content"].contains(key))
            .collect();
        no_lost_keys(place, &name, message, &others)?;
        Ok(ChatMessage::new(role, content))
    });
    messages.collect()
}

/// None of these keys has a value: training without them would be training on something else.
fn no_lost_keys(
    place: &Place,
    owner: &str,
    object: &Map<String, Value>,
    keys: &[&str],
) -> Result<(), DataError> {
    let lost = keys.iter().find(|key| {
        let value = object.get(**key);
        value.is_some_and(|value| !value.is_null())
    });
    match lost {
        Some(key) => content(
            place.clone(),
            format!("{owner} has `{key}`, which no chat template gets here"),
            "messages of `role` and `content` alone",
        ),
        None => Ok(()),
    }
}

/// A chat with something to learn.
fn chat(place: &Place, messages: Vec<ChatMessage>, learned: usize) -> Result<Body, DataError> {
    let answers = messages[learned..].iter();
    match answers
        .filter(|message| message.role == "assistant")
        .count()
    {
        0 => content(
            place.clone(),
            "no message of the role `assistant`",
            "at least one, which is what a model learns",
        ),
        _ => Ok(Body::Chat(messages, learned)),
    }
}
