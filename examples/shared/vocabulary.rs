//! Tokens of a text: its bytes, and frequent pairs of tokens merged into one, learned from the text (byte pair encoding: Sennrich,
//! Haddow, Birch, arXiv:1508.07909). Any bytes are a valid text; no result depends on the order of a hash map.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// The tokens that every vocabulary has: the bytes.
pub const BYTES: usize = 256;
/// The file of a model's merges, beside its `config.json`; a model on bytes has none.
pub const FILE: &str = "merges.json";
/// No token is longer than this many bytes, so that encoding takes linear time.
const LONGEST_CHUNK: usize = 32;

type Pair = [u32; 2];

/// Token `256 + i` stands for the pair of tokens `merges[i]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vocabulary {
    merges: Vec<Pair>,
    #[serde(skip)]
    ranks: HashMap<Pair, u32>,
}

impl Vocabulary {
    /// Merges the most frequent pair within the words of `text`, again and again until there are `size` tokens; of equally frequent
    /// pairs the smallest.
    pub fn learn(text: &[u8], size: usize) -> Result<Self> {
        let mut counts: BTreeMap<&[u8], u64> = BTreeMap::new();
        for chunk in chunks(text) {
            *counts.entry(chunk).or_default() += 1;
        }
        let mut words = vec![];
        let mut pairs = Pairs::default();
        for (i, (word, count)) in counts.into_iter().enumerate() {
            let word: Vec<u32> = word.iter().map(|&byte| byte.into()).collect();
            pairs.add(&word, i, count);
            words.push((word, count));
        }
        let mut vocabulary = Self::default();
        while BYTES + vocabulary.merges.len() < size {
            let len = BYTES + vocabulary.merges.len();
            let pair = pairs.most_frequent().with_context(|| {
                format!("--vocab {size}: only {len} tokens occur more than once in the training text, give at most {len}")
            })?;
            let token = vocabulary.push(pair);
            for i in pairs.places.remove(&pair).unwrap_or_default() {
                let (word, count) = &mut words[i];
                pairs.remove(word, *count);
                merge(word, pair, token);
                pairs.add(word, i, *count);
            }
        }
        Ok(vocabulary)
    }

    /// The vocabulary of `size` tokens that a model in `dir` was saved with.
    pub fn open(dir: &Path, size: usize) -> Result<Self> {
        if size <= BYTES {
            return Ok(Self::default());
        }
        let path = dir.join(FILE);
        let text = crate::runs::read(&path)?;
        let saved: Self = serde_json::from_str(&text)
            .with_context(|| format!("{}: not the merges of a vocabulary", path.display()))?;
        let mut vocabulary = Self::default();
        // In a hostile file, thirty doublings make a token of a gigabyte.
        let mut lengths = vec![1; BYTES];
        for pair in saved.merges {
            let known = BYTES + vocabulary.merges.len();
            ensure!(
                pair.iter().all(|&token| (token as usize) < known),
                "{}: token {known} stands for {pair:?}, which come later",
                path.display()
            );
            let length: usize = pair.iter().map(|&token| lengths[token as usize]).sum();
            ensure!(
                length <= LONGEST_CHUNK,
                "{}: token {known} stands for {length} bytes, more than {LONGEST_CHUNK}",
                path.display()
            );
            lengths.push(length);
            vocabulary.push(pair);
        }
        ensure!(
            vocabulary.len() == size,
            "{}: {} tokens, where the model has {size}",
            path.display(),
            vocabulary.len()
        );
        Ok(vocabulary)
    }

    fn push(&mut self, pair: Pair) -> u32 {
        let token = self.len() as u32;
        self.ranks.insert(pair, token);
        self.merges.push(pair);
        token
    }

    /// How many tokens there are.
    pub fn len(&self) -> usize {
        BYTES + self.merges.len()
    }

    /// Whether tokens are bytes.
    pub fn is_bytes(&self) -> bool {
        self.merges.is_empty()
    }

    /// The tokens of `text`.
    pub fn encode(&self, text: &[u8]) -> Vec<u32> {
        if self.is_bytes() {
            return text.iter().map(|&byte| byte.into()).collect();
        }
        let mut known: HashMap<&[u8], Vec<u32>> = HashMap::new();
        let mut tokens = vec![];
        for chunk in chunks(text) {
            tokens.extend_from_slice(
                known
                    .entry(chunk)
                    .or_insert_with(|| self.encode_chunk(chunk)),
            );
        }
        tokens
    }

    /// Merges in the order in which they were learned.
    fn encode_chunk(&self, chunk: &[u8]) -> Vec<u32> {
        let mut word: Vec<u32> = chunk.iter().map(|&byte| byte.into()).collect();
        let rank = |pair: &[u32]| self.ranks.get(pair).copied();
        while let Some(token) = word.windows(2).filter_map(rank).min() {
            merge(&mut word, self.merges[token as usize - BYTES], token);
        }
        word
    }

    /// The bytes of tokens; unknown tokens give none.
    pub fn decode(&self, tokens: &[u32]) -> Vec<u8> {
        let mut text = vec![];
        let mut open: Vec<u32> = tokens.iter().rev().copied().collect();
        while let Some(token) = open.pop() {
            match u8::try_from(token) {
                Ok(byte) => text.push(byte),
                Err(_) => {
                    let pair = self.merges.get(token as usize - BYTES);
                    open.extend(
                        pair.into_iter()
                            .flat_map(|&[first, second]| [second, first]),
                    );
                }
            }
        }
        text
    }
}

/// How often neighbours occur, and in which words.
#[derive(Default)]
struct Pairs {
    counts: HashMap<Pair, u64>,
    places: HashMap<Pair, BTreeSet<usize>>,
}

impl Pairs {
    fn add(&mut self, word: &[u32], place: usize, count: u64) {
        for pair in neighbours(word) {
            *self.counts.entry(pair).or_default() += count;
            self.places.entry(pair).or_default().insert(place);
        }
    }

    fn remove(&mut self, word: &[u32], count: u64) {
        for pair in neighbours(word) {
            let Some(total) = self.counts.get_mut(&pair) else {
                continue;
            };
            *total -= count;
            if *total == 0 {
                self.counts.remove(&pair);
            }
        }
    }

    fn most_frequent(&self) -> Option<Pair> {
        let frequent = self.counts.iter().filter(|(_, count)| **count > 1);
        let best = frequent.max_by_key(|&(pair, count)| (count, Reverse(pair)));
        best.map(|(pair, _)| *pair)
    }
}

fn neighbours(word: &[u32]) -> impl Iterator<Item = Pair> {
    word.windows(2).map(|pair| [pair[0], pair[1]])
}

fn merge(word: &mut Vec<u32>, pair: Pair, token: u32) {
    let (mut from, mut to) = (0, 0);
    while from < word.len() {
        let here = word[from..].starts_with(&pair);
        word[to] = if here { token } else { word[from] };
        from += if here { 2 } else { 1 };
        to += 1;
    }
    word.truncate(to);
}

/// Chunks that no merge crosses: words with a space before them, runs of spaces, runs of signs.
fn chunks(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    #[derive(PartialEq)]
    enum Class {
        Word,
        Space,
        Sign,
    }
    let class = |byte: u8| match byte {
        b'_' | 0x80.. => Class::Word,
        _ if byte.is_ascii_alphanumeric() => Class::Word,
        _ if byte.is_ascii_whitespace() => Class::Space,
        _ => Class::Sign,
    };
    let is_word = move |byte: Option<&u8>| byte.is_some_and(|&byte| class(byte) == Class::Word);
    let mut rest = text;
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let has_space = first == b' ' && is_word(rest.get(1));
        let (start, of) = match has_space {
            true => (1, Class::Word),
            false => (0, class(first)),
        };
        let run = rest[start..].iter().take(LONGEST_CHUNK - start);
        let mut len = start + run.take_while(|&&byte| class(byte) == of).count();
        // The last of several spaces belongs to the word after it.
        if of == Class::Space && len > 1 && rest[len - 1] == b' ' && is_word(rest.get(len)) {
            len -= 1;
        }
        let (chunk, after) = rest.split_at(len);
        rest = after;
        Some(chunk)
    })
}
