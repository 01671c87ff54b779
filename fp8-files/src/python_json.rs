//! JSON as Python reads and writes it: with the tokens `NaN`, `Infinity` and `-Infinity`.
//!
//! Python's `json` writes them for floats that are not finite, so there are configurations with them: Mamba2's `time_step_limit` is
//! `[0.0, Infinity]`. JSON has no such numbers, and neither has [`Value`]. Here each token is a string that no configuration has: its
//! name after U+0000. Whoever wants a number there finds none, which is an error that names the entry and never another number; and
//! what is written has the tokens again.

use serde::de::Error as _;
use serde_json::{Error, Value};

/// What Python writes for floats that are not finite.
const TOKENS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// U+0000 in JSON text; a string has no other way to say it.
const NUL: &str = "\\u0000";

/// The beginning of a string in JSON text that begins with U+0000.
const BEGINNING: &str = "\"\\u0000";

/// Parses JSON text that may have Python's tokens.
///
/// ```
/// use fp8_files::python_json;
/// let config = python_json::parse(r#"{"time_step_limit": [0.0, Infinity]}"#)?;
/// let limits = &config["time_step_limit"];
/// assert_eq!((limits[0].as_f64(), limits[1].as_f64()), (Some(0.), None));
/// assert_eq!(python_json::to_text(limits), "[0.0,Infinity]");
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// # Errors
/// As [`serde_json::from_str`]; and for a string that would stand for a token.
pub fn parse(text: &str) -> Result<Value, Error> {
    let strict = serde_json::from_str::<Value>(text);
    // Nearly every file is plain JSON, and so keeps the places of its errors.
    if strict.is_ok() && !text.contains(NUL) {
        return strict;
    }
    match as_json(text)? {
        Some(text) => serde_json::from_str(&text),
        None => strict,
    }
}

/// A value in one line of JSON text, with the tokens that [`parse`] has read.
pub fn to_text(value: &Value) -> String {
    as_python(value.to_string())
}

/// As [`to_text`], in several lines.
pub fn to_pretty(value: &Value) -> String {
    as_python(format!("{value:#}"))
}

/// JSON text in which strings stand for the tokens; None if `text` has no token.
fn as_json(text: &str) -> Result<Option<String>, Error> {
    let (mut json, mut rest) = (String::with_capacity(text.len()), text);
    let mut found = false;
    while !rest.is_empty() {
        let (piece, after) = split_first(rest);
        rest = after;
        if TOKENS.contains(&piece) && !is_key(rest) {
            found = true;
            json += &format!("{BEGINNING}{piece}\"");
            continue;
        }
        if is_taken(piece) {
            let reason = format!("the string {piece} stands for a number that is not finite here");
            return Err(Error::custom(reason));
        }
        json += piece;
    }
    Ok(found.then_some(json))
}

/// JSON text with the tokens in place of the strings that stand for them.
fn as_python(json: String) -> String {
    if !json.contains(NUL) {
        return json;
    }
    let (mut text, mut rest) = (String::with_capacity(json.len()), json.as_str());
    while !rest.is_empty() {
        let (piece, after) = split_first(rest);
        rest = after;
        text += match token_of(piece) {
            Some(token) if !is_key(rest) => token,
            _ => piece,
        };
    }
    text
}

/// The token that a string stands for, as `serde_json` writes it.
fn token_of(piece: &str) -> Option<&str> {
    let name = piece.strip_prefix(BEGINNING)?.strip_suffix('"')?;
    TOKENS.contains(&name).then_some(name)
}

/// Whether a string would be taken for a token, however its characters are escaped.
fn is_taken(piece: &str) -> bool {
    let stands = |text: String| {
        text.strip_prefix('\0')
            .is_some_and(|name| TOKENS.contains(&name))
    };
    piece.starts_with(BEGINNING) && serde_json::from_str::<String>(piece).is_ok_and(stands)
}

/// Whether what stands before `rest` is the key of an entry, which has to be a string in Python too.
fn is_key(rest: &str) -> bool {
    rest.trim_start().starts_with(':')
}

/// The first piece of JSON text and the rest. A piece is a string with its quotes, a word (which may be a number) or what stands
/// between these.
fn split_first(text: &str) -> (&str, &str) {
    let is_between = |byte: &u8| b" \t\r\n{}[]:,".contains(byte);
    let mut bytes = text.bytes();
    let end = match bytes.next() {
        Some(b'"') => {
            let mut escaped = false;
            let closing = bytes.position(|byte| {
                let closes = byte == b'"' && !escaped;
                escaped = byte == b'\\' && !escaped;
                closes
            });
            // The first quote, what lies between, and the last one.
            closing.map(|within| within + 2)
        }
        Some(first) if is_between(&first) => text.bytes().position(|byte| !is_between(&byte)),
        _ => text
            .bytes()
            .position(|byte| byte == b'"' || is_between(&byte)),
    };
    text.split_at(end.unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_python_writes_is_read_and_written_again() {
        for text in [
            "NaN",
            r#"{"a":-Infinity,"b":[0.0,Infinity,{"c":NaN}],"d":1}"#,
            r#"[NaN,NaN,"NaN",null]"#,
        ] {
            let value = parse(text).unwrap();
            assert_eq!(to_text(&value), text);
            assert_eq!(parse(&to_pretty(&value)).unwrap(), value, "{text}");
        }
        let spaced = parse("{\"a\" : [ NaN\t,\r\n -Infinity ] }").unwrap();
        assert_eq!(
            to_pretty(&spaced),
            "{\n  \"a\": [\n    NaN,\n    -Infinity\n  ]\n}"
        );
        // No number, and nothing that could be missing.
        let numbers = [spaced["a"][0].as_f64(), spaced["a"][1].as_f64()];
        assert!(numbers == [None, None] && !spaced["a"][0].is_null());
    }

    #[test]
    fn strings_stay_what_they_are() {
        for text in [
            r#"{"NaN":"Infinity","a":"x, NaN","b\"":"\\","c":[NaN,"\\\"","[NaN]"]}"#,
            r#"{"a":"\u0000","b":"\u0000x","c":"x\"\u0000NaN","d":NaN}"#,
            r#"{"a":"é\"NaN\"ü","b":-Infinity}"#,
        ] {
            assert_eq!(to_text(&parse(text).unwrap()), text);
        }
        // A program's own value, of which a key is no number either.
        let own = json!({ "\0NaN": "\0NaN" });
        assert_eq!(to_text(&own), r#"{"\u0000NaN":NaN}"#);
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "{NaN: 1}",
            "[-NaN]",
            "[NaN1]",
            "[nan]",
            "[+Infinity]",
            "[NaN NaN]",
            "[NaN\"a\"]",
            "{\"a\": NaN",
            "[NaN, \"NaN",
            "[NaN, \"\\",
            "",
            // Strings that stand for a token.
            r#"["\u0000NaN"]"#,
            r#"[NaN, "\u0000N\u0061N"]"#,
            r#"{"\u0000-Infinity": 1}"#,
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        // Plain JSON has the parser's own message.
        let (ours, own) = (parse("[1, }"), serde_json::from_str::<Value>("[1, }"));
        assert_eq!(ours.unwrap_err().to_string(), own.unwrap_err().to_string());
    }
}
