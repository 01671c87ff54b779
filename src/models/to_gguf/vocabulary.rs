//! The vocabulary of a `tokenizer.json` as llama.cpp stores it.

use crate::models::error::GgufError;
use crate::models::files::gguf::pre::{Rules, pre_tokenizer_name};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// llama.cpp's kinds of tokens.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// What SentencePiece writes for a space.
const SPACE: char = '\u{2581}';

/// llama.cpp's kinds of tokenizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// BPE over bytes.
    Gpt2,
    /// BPE over characters, with a token for each byte, as SentencePiece makes it.
    Llama,
    /// WordPiece.
    Bert,
}

#[derive(Debug)]
pub(super) struct Vocabulary {
    pub(super) kind: Kind,
    /// Texts and kinds, by id.
    pub(super) tokens: Vec<(String, i32)>,
    /// Pairs of tokens, the first to be merged first.
    pub(super) merges: Vec<String>,
    /// For [`Kind::Llama`]: the order of merges as numbers of tokens.
    pub(super) scores: Vec<f32>,
    /// llama.cpp's name of the rule that splits text.
    pub(super) pre: String,
    /// Whether a space is put before a text.
    pub(super) space_prefix: bool,
}

/// A `tokenizer.json`, with its path for messages.
struct Reader<'a> {
    path: &'a Path,
    json: &'a Value,
}

impl Reader<'_> {
    fn unsupported(
        &self,
        key: &'static str,
        value: impl ToString,
        known: &'static str,
    ) -> GgufError {
        GgufError::UnsupportedTokenizer {
            path: self.path.to_path_buf(),
            key,
            value: value.to_string(),
            known,
        }
    }

    fn broken(&self, reason: String) -> GgufError {
        let path: PathBuf = self.path.to_path_buf();
        GgufError::Broken { path, reason }
    }

    /// The parts of a sequence, or the part alone.
    fn parts(&self, key: &str) -> Vec<&Value> {
        let part = &self.json[key];
        let lists = ["pretokenizers", "normalizers", "decoders"];
        let list = lists.iter().find_map(|list| part.get(list)?.as_array());
        match list {
            Some(parts) => parts.iter().collect(),
            None if part.is_null() => vec![],
            None => vec![part],
        }
    }

    fn has(&self, key: &str, kind: &str) -> bool {
        self.parts(key).iter().any(|part| part["type"] == kind)
    }

    fn kind(&self) -> Result<Kind, GgufError> {
        let model = &self.json["model"];
        // Old files leave the type out.
        let kind = model["type"].as_str().unwrap_or("BPE");
        match kind {
            "WordPiece" => Ok(Kind::Bert),
            "BPE" if self.has("pre_tokenizer", "ByteLevel") => Ok(Kind::Gpt2),
            "BPE" if model["byte_fallback"] == true => Ok(Kind::Llama),
            "BPE" => Err(self.unsupported(
                "model",
                kind,
                "BPE over bytes or with a token for each byte",
            )),
            _ => Err(self.unsupported("model", kind, "BPE and WordPiece")),
        }
    }

    fn vocab(&self) -> Result<&Map<String, Value>, GgufError> {
        let vocab = self.json["model"]["vocab"].as_object();
        vocab.ok_or_else(|| {
            self.broken("model.vocab is not an object that maps texts to ids".into())
        })
    }

    /// The texts of tokens with their kinds, by id, for a model with `rows` embeddings.
    fn tokens(&self, kind: Kind, rows: usize) -> Result<Vec<(String, i32)>, GgufError> {
        let mut tokens = BTreeMap::new();
        let unknown = self.json["model"]["unk_token"].as_str();
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| usize::try_from(id).ok());
            let bad = || {
                self.broken(format!(
                    "the id {value} is not below {rows}, the rows of the embedding"
                ))
            };
            id.filter(|id| *id < rows).ok_or_else(bad)
        };
        for (text, value) in self.vocab()? {
            let of_kind = match kind {
                Kind::Llama if Some(text.as_str()) == unknown => UNKNOWN,
                Kind::Llama if is_byte(text) => BYTE,
                _ => NORMAL,
            };
            let text = match kind {
                Kind::Bert => phantom(text),
                _ => text.clone(),
            };
            if let Some((other, _)) = tokens.insert(id(value)?, (text.clone(), of_kind)) {
                return Err(self.broken(format!("`{other}` and `{text}` have the id {value}")));
            }
        }
        for token in self.json["added_tokens"].as_array().into_iter().flatten() {
            let Some(text) = token["content"].as_str() else {
                return Err(self.broken("an added token has no content".into()));
            };
            let of_kind = match token["special"] == true {
                true if kind == Kind::Llama && Some(text) == unknown => UNKNOWN,
                true => CONTROL,
                false => USER_DEFINED,
            };
            let text = match (kind, of_kind) {
                // llama.cpp looks for them before it replaces spaces.
                (Kind::Llama, USER_DEFINED) => text.replace(SPACE, " "),
                _ => text.to_string(),
            };
            tokens.insert(id(&token["id"])?, (text, of_kind));
        }
        let absent = |id| (format!("[PAD{id}]"), UNUSED);
        let token = |id| tokens.remove(&id).unwrap_or_else(|| absent(id));
        Ok((0..rows).map(token).collect())
    }

    fn merges(&self) -> Result<Vec<String>, GgufError> {
        let merges = self.json["model"]["merges"].as_array();
        let merge = |value: &Value| {
            // A text with a space, or in newer files a pair.
            let pair = value.as_array().and_then(|pair| match pair.as_slice() {
                [left, right] => Some(format!("{} {}", left.as_str()?, right.as_str()?)),
                _ => None,
            });
            let text = pair.or_else(|| value.as_str().map(String::from));
            text.ok_or_else(|| self.broken(format!("the merge {value} is not a pair of tokens")))
        };
        merges.into_iter().flatten().map(merge).collect()
    }

    /// SentencePiece merges the pair whose result has the highest score, so a token's score is its first merge's place, negated.
    fn scores(&self, tokens: &[(String, i32)], merges: &[String]) -> Vec<f32> {
        let mut ranks: BTreeMap<String, usize> = BTreeMap::new();
        for (rank, merge) in merges.iter().enumerate() {
            ranks.entry(merge.replacen(' ', "", 1)).or_insert(rank);
        }
        let score = |(text, kind): &(String, i32)| match *kind {
            NORMAL => -(ranks.get(text).copied().unwrap_or(merges.len()) as f32),
            _ => 0.,
        };
        tokens.iter().map(score).collect()
    }

    fn space_prefix(&self) -> bool {
        let prepends = |part: &&Value| match part["type"].as_str() {
            Some("Prepend") => true,
            Some("Metaspace") => match part["prepend_scheme"].as_str() {
                Some(scheme) => scheme != "never",
                None => part["add_prefix_space"] != false,
            },
            _ => false,
        };
        let normalizer = self.parts("normalizer");
        let pre = self.parts("pre_tokenizer");
        normalizer.iter().chain(&pre).any(prepends)
    }

    fn pre(&self, kind: Kind) -> Result<String, GgufError> {
        match kind {
            Kind::Llama => Ok("default".into()),
            // llama.cpp lowercases every text.
            Kind::Bert => match self.parts("normalizer").as_slice() {
                [part] if part["type"] == "BertNormalizer" && part["lowercase"] != false => {
                    Ok("default".into())
                }
                _ => Err(self.unsupported(
                    "normalizer",
                    &self.json["normalizer"],
                    "BERT's in lower case",
                )),
            },
            Kind::Gpt2 => {
                let rules = Rules {
                    normalizer: self.parts("normalizer"),
                    pre_tokenizer: self.parts("pre_tokenizer"),
                };
                let name = pre_tokenizer_name(&rules).map(String::from);
                name.ok_or_else(|| {
                    let known = "those of smollm, gpt-2, llama-bpe and qwen2, or one that is named (`--pre`, `with_pre_tokenizer`),";
                    self.unsupported("pre_tokenizer", &self.json["pre_tokenizer"], known)
                })
            }
        }
    }
}

/// Reads the vocabulary of a model with `rows` embeddings; `pre` is the name of the rule that splits text, if it is known.
pub(super) fn read(
    path: &Path,
    json: &Value,
    rows: usize,
    pre: Option<&str>,
) -> Result<Vocabulary, GgufError> {
    let reader = Reader { path, json };
    let kind = reader.kind()?;
    let pre = match pre {
        Some(pre) => pre.to_string(),
        None => reader.pre(kind)?,
    };
    let tokens = reader.tokens(kind, rows)?;
    let merges = match kind {
        Kind::Bert => vec![],
        _ => reader.merges()?,
    };
    let scores = match kind {
        Kind::Llama => reader.scores(&tokens, &merges),
        _ => vec![],
    };
    Ok(Vocabulary {
        space_prefix: kind == Kind::Llama && reader.space_prefix(),
        kind,
        tokens,
        // SentencePiece's files have scores instead.
        merges: if kind == Kind::Gpt2 { merges } else { vec![] },
        scores,
        pre,
    })
}

/// `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// llama.cpp marks the beginnings of words where WordPiece marks their continuations.
fn phantom(text: &str) -> String {
    match text.strip_prefix("##") {
        Some(rest) => rest.to_string(),
        None => format!("{SPACE}{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(json: &Value, rows: usize) -> Result<Vocabulary, GgufError> {
        read(Path::new("tokenizer.json"), json, rows, None)
    }

    #[test]
    fn word_pieces_mark_beginnings() {
        let json = json!({
            "model": { "type": "WordPiece", "unk_token": "[UNK]", "vocab": { "[UNK]": 0, "a": 1, "##b": 2 } },
            "added_tokens": [{ "id": 0, "content": "[UNK]", "special": true }],
            "normalizer": { "type": "BertNormalizer", "lowercase": true },
        });
        let vocabulary = of(&json, 4).expect("a vocabulary");
        let expected = [
            ("[UNK]", CONTROL),
            ("\u{2581}a", NORMAL),
            ("b", NORMAL),
            ("[PAD3]", UNUSED),
        ];
        let expected = expected.map(|(text, kind)| (text.to_string(), kind));
        assert_eq!(vocabulary.tokens, expected);
        let error = of(&json, 2).expect_err("too few rows").to_string();
        assert!(error.contains("the id 2 is not below 2"), "{error}");
        let mut cased = json.clone();
        cased["normalizer"]["lowercase"] = json!(false);
        let error = of(&cased, 4).expect_err("cased").to_string();
        assert!(error.contains("BERT's in lower case"), "{error}");
    }

    /// Merging by scores, as SentencePiece and llama.cpp do: the pair with the highest score first, the leftmost of equals.
    fn by_scores(text: &str, vocabulary: &Vocabulary) -> Vec<String> {
        let score = |text: &str| {
            let mut tokens = vocabulary.tokens.iter();
            let id = tokens.position(|(token, _)| token == text)?;
            Some(vocabulary.scores[id])
        };
        let mut pieces: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let pairs = pieces.windows(2).enumerate();
            let scored = pairs.filter_map(|(i, pair)| Some((score(&pair.concat())?, i)));
            let best = scored.reduce(|best, next| if next.0 > best.0 { next } else { best });
            let Some((_, i)) = best else {
                return pieces;
            };
            let right = pieces.remove(i + 1);
            pieces[i] += &right;
        }
    }

    #[test]
    fn scores_merge_as_the_merges_do() {
        // Each token by all of its splits, in the order of one training, as SentencePiece's converter lists them.
        let words = ["ab", "abc", "ca", "bca", "abca", "aa", "aab", "cc", "ccab"];
        let singles = ["<unk>", "<0x0A>", "a", "b", "c"];
        let vocab: Map<String, Value> = singles
            .iter()
            .chain(&words)
            .enumerate()
            .map(|(id, text)| (text.to_string(), json!(id)))
            .collect();
        let mut merges = vec![];
        for word in words {
            for cut in 1..word.len() {
                let (left, right) = word.split_at(cut);
                if vocab.contains_key(left) && vocab.contains_key(right) {
                    merges.push(json!([left, right]));
                }
            }
        }
        let rows = vocab.len();
        let json = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": { "type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocab, "merges": merges },
        });
        let vocabulary = of(&json, rows).expect("a vocabulary");
        assert_eq!(vocabulary.kind, Kind::Llama);
        assert_eq!(
            (vocabulary.tokens[0].1, vocabulary.tokens[1].1),
            (UNKNOWN, BYTE)
        );
        let theirs = tokenizers::Tokenizer::from_bytes(json.to_string()).expect("a tokenizer");
        for number in 0..3usize.pow(8) {
            let text: String = (0..8)
                .map(|i| ['a', 'b', 'c'][number / 3usize.pow(i) % 3])
                .collect();
            let expected = theirs.encode(text.as_str(), false).expect("tokens");
            assert_eq!(
                by_scores(&text, &vocabulary),
                expected.get_tokens(),
                "{text}"
            );
        }
    }
}
