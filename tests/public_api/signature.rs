//! Tokens as text, spaced as rustfmt would on one line.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// Operators of several characters.
const OPERATORS: [&str; 8] = ["->", "=>", "::", "...", "..=", "..", "==", "!="];

/// The tokens on one line. Trailing commas go, as rustfmt sets them by the length of a line.
pub fn text(tokens: TokenStream) -> String {
    let mut words = vec![];
    collect(tokens, &mut words);
    let mut line = String::new();
    for (i, word) in words.iter().enumerate() {
        let next = words.get(i + 1).map(String::as_str);
        if word == "," && matches!(next, None | Some(")" | "]" | ">")) {
            continue;
        }
        let previous = i.checked_sub(1).map(|i| words[i].as_str());
        if previous.is_some_and(|previous| spaced(previous, word)) {
            line.push(' ');
        }
        line += word;
    }
    line
}

fn collect(tokens: TokenStream, words: &mut Vec<String>) {
    let mut operator = String::new();
    for token in tokens {
        match token {
            TokenTree::Punct(punct) => {
                operator.push(punct.as_char());
                let ends = punct.spacing() == Spacing::Alone;
                if ends || !OPERATORS.iter().any(|known| known.starts_with(&operator)) {
                    flush(&mut operator, words, ends);
                }
                continue;
            }
            TokenTree::Ident(ident) => {
                let lifetime = operator == "'";
                let name = std::mem::take(&mut operator) + &ident.to_string();
                if !lifetime && name.len() > ident.to_string().len() {
                    let split = name.len() - ident.to_string().len();
                    words.push(name[..split].to_string());
                    words.push(name[split..].to_string());
                } else {
                    words.push(name);
                }
            }
            TokenTree::Literal(literal) => {
                flush(&mut operator, words, true);
                words.push(literal.to_string());
            }
            TokenTree::Group(group) => {
                flush(&mut operator, words, true);
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::None => ("", ""),
                };
                if open.is_empty() {
                    collect(group.stream(), words);
                    continue;
                }
                words.push(open.into());
                collect(group.stream(), words);
                words.push(close.into());
            }
        }
    }
    flush(&mut operator, words, true);
}

/// Moves what `operator` holds to the words; with `all` false its last character may begin another one.
fn flush(operator: &mut String, words: &mut Vec<String>, all: bool) {
    if operator == "'" && !all {
        return;
    }
    while !operator.is_empty() {
        let known = OPERATORS.iter().find(|known| operator.starts_with(**known));
        let len = match known {
            Some(known) => known.len(),
            None => operator.chars().next().map_or(1, char::len_utf8),
        };
        let rest = operator.split_off(len);
        words.push(std::mem::replace(operator, rest));
        if !all
            && OPERATORS
                .iter()
                .any(|known| known.starts_with(operator.as_str()))
        {
            return;
        }
    }
}

/// Whether a space belongs between two neighbours.
fn spaced(left: &str, right: &str) -> bool {
    let name = left.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    match (left, right) {
        ("(" | "[" | "<" | "::" | "&" | "*" | "!" | "?" | "#", _) => false,
        (_, ")" | "]" | ">" | "," | ";" | ":" | "::") => false,
        (_, "(") => !(name || left == ">") || ["mut", "dyn", "in"].contains(&left),
        (_, "<") => !name,
        (_, "[") => true,
        (_, "..") => name,
        _ => true,
    }
}
