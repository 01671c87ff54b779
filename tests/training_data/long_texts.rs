//! Long texts are encoded in parts, with the tokens of the whole.

use crate::support::{END, Folder, byte_pairs, validation};
use fp8::training::{DatasetOptions, Validation};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

/// About 300 KB of words, in lines of all kinds.
fn text(line_ends: &[&str]) -> String {
    let mut rng = StdRng::seed_from_u64(29);
    let words = ["the", "abbot", "a", "b", "  ab", "ba.", "<|end|>", "12"];
    let mut text = String::new();
    while text.len() < 300_000 {
        text += words[rng.random_range(0..words.len())];
        text += match rng.random_range(0..9) {
            0 => line_ends[rng.random_range(0..line_ends.len())],
            _ => " ",
        };
    }
    text
}

/// Byte-level pairs; spaces as letters in front of every text, as SentencePiece has them.
fn tokenizers() -> [Value; 2] {
    let mut in_front = byte_pairs();
    let letters = (' '..='~').filter(|c| *c != ' ').map(String::from);
    let letters = letters.chain(["▁", "\n", "\r", "▁a", "\n▁"].map(String::from));
    let tokens = ["<s>", "</s>", "<|turn|>", "<|end|>"]
        .map(String::from)
        .into_iter()
        .chain(letters);
    let vocab: serde_json::Map<String, Value> = tokens
        .enumerate()
        .map(|(id, token)| (token, json!(id)))
        .collect();
    in_front["model"]["vocab"] = Value::Object(vocab);
    in_front["model"]["merges"] = json!([["▁", "a"], ["\n", "▁"]]);
    in_front["pre_tokenizer"] = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false });
    in_front["decoder"] = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false });
    [byte_pairs(), in_front]
}

#[test]
fn parts_have_the_tokens_of_the_whole() {
    let ends: [&[&str]; 4] = [
        &["\n"],
        &["\n\n", " \n", "\n ", "\n\n\n"],
        &["\r\n"],
        &[" "],
    ];
    for (which, tokenizer) in tokenizers().iter().enumerate() {
        let folder = Folder::with(tokenizer, "");
        for ends in ends {
            let text = text(ends);
            let file = folder.write("text.txt", &text);
            let mut whole = folder.tokenizer.encode(&text, true).expect("tokens");
            assert!(whole.len() > 100_000);
            whole.push(END);
            let options =
                DatasetOptions::new(1000).with_validation(Validation::Files(vec![file.clone()]));
            let data = folder.open(&file, &options).expect("data");
            let rows = validation(&data);
            let tokens: Vec<u32> = rows
                .iter()
                .flat_map(|row| row.tokens[..1000 - row.padding].to_vec())
                .collect();
            assert_eq!(tokens.len(), whole.len(), "{which} {ends:?}");
            assert!(tokens == whole, "{which} {ends:?}");
        }
    }
}
