//! Texts as tokens, long ones in parts.

use crate::models::{TextError, Tokenizer};
use rayon::prelude::*;
use std::collections::HashSet;

/// Bytes of a part of a long text; shorter texts are encoded in one call.
const PART: usize = 64 << 10;
/// Bytes on each side of a cut that are encoded to test it.
const AROUND: usize = 1 << 10;
/// Line ends that are tested for a cut before the rest of the text is encoded in one call.
const TRIES: usize = 64;

/// A tokenizer, and what it puts around texts.
#[derive(Debug)]
pub(super) struct Encoder<'a> {
    pub tokenizer: &'a Tokenizer,
    /// What follows each text.
    end: Option<u32>,
    /// What the tokenizer puts before and after a text; `None` if it cannot be told from the text.
    around: Option<[Vec<u32>; 2]>,
    /// Tokens that stand for no text.
    special: HashSet<u32>,
}

impl<'a> Encoder<'a> {
    pub fn new(tokenizer: &'a Tokenizer, end_of_text: bool) -> Result<Self, TextError> {
        let added = tokenizer.inner().get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special);
        let special = special.map(|(id, _)| *id);
        let special = special.chain(tokenizer.eos().iter().copied()).collect();
        let (inside, whole) = (tokenizer.encode("a", false)?, tokenizer.encode("a", true)?);
        let at = match inside.is_empty() {
            true => None,
            false => whole.windows(inside.len()).position(|part| part == inside),
        };
        let around = at.map(|at| [whole[..at].to_vec(), whole[at + inside.len()..].to_vec()]);
        Ok(Self {
            tokenizer,
            end: tokenizer.eos().first().copied().filter(|_| end_of_text),
            around,
            special,
        })
    }

    /// Whether the token is a special token or ends texts.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The tokens of a document, with those that the tokenizer puts around it and the one that ends texts.
    pub fn document(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let cuts = match &self.around {
            Some(_) if text.len() > PART => self.cuts(text)?,
            _ => vec![],
        };
        let mut ids = match (&self.around, cuts.is_empty()) {
            (Some([before, after]), false) => {
                let starts = std::iter::once(0).chain(cuts.iter().copied());
                let ends = cuts.iter().copied().chain([text.len()]);
                let parts: Vec<&str> = starts
                    .zip(ends)
                    .map(|(start, end)| &text[start..end])
                    .collect();
                let parts = parts.into_par_iter();
                let parts = parts.map(|part| self.tokenizer.encode(part, false));
                let mut ids = before.clone();
                for part in parts.collect::<Vec<_>>() {
                    ids.extend(part?);
                }
                ids.extend(after);
                ids
            }
            _ => self.tokenizer.encode(text, true)?,
        };
        self.close(&mut ids);
        Ok(ids)
    }

    /// Adds the token that ends texts, unless the tokenizer has put one there.
    pub fn close(&self, ids: &mut Vec<u32>) {
        let closed = ids
            .last()
            .is_some_and(|last| self.tokenizer.eos().contains(last));
        ids.extend(self.end.filter(|_| !closed));
    }

    /// Starts of lines, about [`PART`] bytes apart, at which the text can be cut without a change of tokens, as far as the text around
    /// the cut shows.
    fn cuts(&self, text: &str) -> Result<Vec<usize>, TextError> {
        let mut cuts = vec![];
        let mut next = PART;
        'cuts: while next < text.len() {
            let from = text.floor_char_boundary(next);
            let ends = text[from..].match_indices('\n').take(TRIES);
            for cut in ends.map(|(at, _)| from + at + 1) {
                if cut < text.len() && self.separates(text, cut)? {
                    cuts.push(cut);
                    next = cut + PART;
                    continue 'cuts;
                }
            }
            break;
        }
        Ok(cuts)
    }

    /// Whether the text around `cut` has the same tokens in one piece and in two.
    fn separates(&self, text: &str, cut: usize) -> Result<bool, TextError> {
        let start = text.floor_char_boundary(cut.saturating_sub(AROUND));
        let end = text.ceil_char_boundary(cut + AROUND);
        let encode = |text: &str| self.tokenizer.encode(text, false);
        let mut two = encode(&text[start..cut])?;
        two.extend(encode(&text[cut..end])?);
        Ok(encode(&text[start..end])? == two)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A tokenizer of two letters, after this pre-tokenizer.
    fn tokenizer(pre_tokenizer: Value) -> Tokenizer {
        let dir = tempfile::tempdir().expect("a folder");
        let vocab = json!({ "a": 0, "b": 1, "Ċ": 2, "Ġ": 3, "ĊĊ": 4, "\n": 5, "▁": 6, " ": 7 });
        let file = json!({ "version": "1.0", "added_tokens": [], "pre_tokenizer": pre_tokenizer,
            "model": { "type": "BPE", "vocab": vocab, "merges": [["Ċ", "Ċ"]] } });
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).expect("written");
        Tokenizer::open(dir.path()).expect("a tokenizer")
    }

    #[test]
    fn a_text_is_cut_where_its_tokens_stay() {
        let bytes = tokenizer(
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }),
        );
        let encoder = Encoder::new(&bytes, true).expect("an encoder");
        let cuts = |encoder: &Encoder<'_>, line: &str| {
            let text = line.repeat(3 * PART / line.len() + 100);
            let cuts = encoder.cuts(&text).expect("cuts");
            assert!(cuts.iter().all(|&cut| text[..cut].ends_with('\n')));
            cuts.len()
        };
        assert_eq!(cuts(&encoder, "a b\n"), 3);
        // Two line ends at the end of a part would be one token: each part gets one.
        assert_eq!(cuts(&encoder, "a b\n\n"), 3);
        assert_eq!(cuts(&encoder, "a b "), 0);
        // A letter in front of each text would also be in front of each part.
        let in_front = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
        let in_front = tokenizer(in_front);
        let encoder = Encoder::new(&in_front, true).expect("an encoder");
        assert_eq!(cuts(&encoder, "a b\n"), 0);
    }
}
