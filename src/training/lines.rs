//! Lines of JSON that runs write and read again, and the numbers in them.

use std::fmt::Display;
use std::path::Path;

/// What `parse` makes of each line of the file at `path`. A kill leaves a last line without its end, which belongs to a step that a resumed
/// run repeats; any other line that cannot be read is damage, and a warning names the first of them.
pub(super) fn readable<T, E: Display>(
    path: &Path,
    text: &str,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Vec<T> {
    let (mut read, mut unreadable) = (vec![], vec![]);
    for (index, line) in text.split_inclusive('\n').enumerate() {
        match parse(line.trim_end()) {
            Ok(value) => read.push(value),
            Err(_) if !line.ends_with('\n') => {}
            Err(error) => unreadable.push((index + 1, error)),
        }
    }
    if let [(number, error), more @ ..] = &unreadable[..] {
        let others = match more.len() {
            0 => String::new(),
            count => format!(", nor can {count} others"),
        };
        let path = path.display();
        crate::warn(&format!(
            "{path}, line {number} cannot be read ({error}){others}: such lines are dropped"
        ));
    }
    read
}

/// Numbers of JSON, which has no NaN and no Inf: these are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. Also reads `null` as NaN, as
/// earlier versions wrote all three.
///
/// ```
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Line {
///     #[serde(with = "fp8::training::any_number")]
///     loss: f64,
/// }
/// let text = serde_json::to_string(&Line { loss: f64::NEG_INFINITY })?;
/// assert_eq!(text, r#"{"loss":"-Infinity"}"#);
/// let line: Line = serde_json::from_str(&text)?;
/// assert_eq!(line.loss, f64::NEG_INFINITY);
/// # Ok::<(), serde_json::Error>(())
/// ```
pub mod any_number {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    const NAMES: [(&str, f64); 3] = [
        ("NaN", f64::NAN),
        ("Infinity", f64::INFINITY),
        ("-Infinity", f64::NEG_INFINITY),
    ];

    /// Writes a number.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        let named = NAMES
            .into_iter()
            .find(|(_, named)| named == number || named.is_nan() && number.is_nan());
        match named {
            Some((name, _)) => name.serialize(serializer),
            None => number.serialize(serializer),
        }
    }

    /// Reads a number.
    ///
    /// # Errors
    /// Those of the deserializer, and for anything else than a number or one of the strings.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Number {
            Finite(f64),
            Named(String),
            Null(()),
        }
        let named = match Number::deserialize(deserializer) {
            Ok(Number::Finite(number)) => Some(number),
            Ok(Number::Null(())) => Some(f64::NAN),
            Ok(Number::Named(name)) => NAMES
                .into_iter()
                .find(|named| named.0 == name)
                .map(|named| named.1),
            Err(_) => None,
        };
        let expected = "expected a number, \"NaN\", \"Infinity\" or \"-Infinity\"";
        named.ok_or_else(|| D::Error::custom(expected))
    }
}
