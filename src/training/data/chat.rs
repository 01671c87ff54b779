//! Prompts and chats as tokens, and which of these are learned.

use super::encode::Encoder;
use super::error::{DataError, Place};
use crate::models::{ChatMessage, TextError, Tokenizer};

/// Tokens, and for each whether a model learns to predict it.
pub(super) type Marked = (Vec<u32>, Vec<bool>);

/// Tokens before a border that may be different ones if the text goes on after it.
const NEAR: usize = 16;

/// How many of `ids`, the tokens of a longer text, belong to its prefix, whose tokens alone are `own`. A token that spans the end
/// of the prefix is not counted.
fn border(tokenizer: &Tokenizer, own: &[u32], ids: &[u32]) -> Result<usize, TextError> {
    let equal = own.iter().zip(ids).take_while(|(a, b)| a == b);
    let mut border = equal.count();
    if border == own.len() {
        return Ok(border);
    }
    // Two line ends, for example, may be one token at the end of a text and two before a word.
    let text = tokenizer.decode(own, false)?;
    for end in border + 1..=ids.len().min(border + NEAR) {
        let part = tokenizer.decode(&ids[..end], false)?;
        if text.starts_with(&part) {
            border = end;
        } else if part.len() > text.len() {
            break;
        }
    }
    Ok(border)
}

/// A text of which the part after `prompt` is learned: all tokens that hold some of it, and the one that ends the text.
pub(super) fn completion(
    encoder: &Encoder<'_>,
    prompt: &str,
    completion: &str,
) -> Result<Marked, TextError> {
    let ids = encoder.document(&format!("{prompt}{completion}"))?;
    let tokenizer = encoder.tokenizer;
    let given = border(tokenizer, &tokenizer.encode(prompt, true)?, &ids)?;
    let learned = (0..ids.len()).map(|at| at >= given).collect();
    Ok((ids, learned))
}

/// A chat as its template writes it. In each answer from message `from` on, the tokens after the beginning of the answer are learned, up to
/// the last special token.
pub(super) fn chat(
    encoder: &Encoder<'_>,
    place: &Place,
    messages: &[ChatMessage],
    from: usize,
) -> Result<Marked, DataError> {
    let tokenizer = encoder.tokenizer;
    let failed = |source| DataError::Text {
        place: place.clone(),
        source,
    };
    let encode = |text: &str| tokenizer.encode(text, false);
    let whole = tokenizer.transcript(messages).map_err(failed)?;
    let ids = encode(&whole).map_err(failed)?;
    let border_of = |text: &str| border(tokenizer, &encode(text)?, &ids);
    let mut learned = vec![false; ids.len()];
    for (at, message) in messages.iter().enumerate().skip(from) {
        if message.role != "assistant" {
            continue;
        }
        let differs = |what| DataError::Turns {
            place: place.clone(),
            message: at + 1,
            what,
        };
        let before = tokenizer.chat(&messages[..at]).map_err(failed)?;
        if !whole.starts_with(&before) {
            return Err(differs("the beginning of"));
        }
        let start = border_of(&before).map_err(failed)?;
        let mut end = ids.len();
        if at + 1 < messages.len() {
            let through = tokenizer.transcript(&messages[..=at]).map_err(failed)?;
            // Some templates end the whole chat with the end token.
            let through = match through.strip_suffix(tokenizer.eos_text()) {
                Some(open) if !whole.starts_with(&through) => open,
                _ => &through,
            };
            if !whole.starts_with(through) || through.len() < before.len() {
                return Err(differs("the end of"));
            }
            end = border_of(through).map_err(failed)?;
        }
        // What follows the end of the turn, a line end as a rule, comes from the template and not from the model.
        let answer = ids.get(start..end).unwrap_or_default();
        let last = answer.iter().rposition(|&id| encoder.is_special(id));
        let end = last.map_or(end, |last| start + last + 1);
        if let Some(learned) = learned.get_mut(start..end) {
            learned.fill(true);
        }
    }
    Ok((ids, learned))
}
