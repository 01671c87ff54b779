//! A tokenizer with a token for each byte.

use serde_json::{Value, json};
use std::path::Path;

/// The letters of byte-level BPE for the bytes of `text`.
fn letters(text: &str) -> Vec<String> {
    // Printable bytes stand for themselves, the others for letters from U+0100 on.
    let mut others = 0x100u32..;
    let mut table = vec![String::new(); 256];
    for byte in 0..=255u8 {
        let own = char::from(byte);
        let letter = match matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            true => own,
            false => others.next().and_then(char::from_u32).unwrap_or(own),
        };
        table[byte as usize] = letter.to_string();
    }
    let bytes = text.bytes();
    bytes.map(|byte| table[byte as usize].clone()).collect()
}

/// Writes the files of a tokenizer to `dir`: a token for each byte of `alphabet`, in order, and `<end>` as the last one.
pub fn write_byte_tokenizer(dir: &Path, alphabet: &str) {
    let mut vocab = serde_json::Map::new();
    for letter in letters(alphabet) {
        let id = vocab.len();
        vocab.entry(letter).or_insert(Value::from(id));
    }
    let end = vocab.len();
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [{ "id": end, "content": "<end>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true }],
        "pre_tokenizer": bytes,
        "decoder": bytes,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    let write = |name: &str, value: Value| std::fs::write(dir.join(name), value.to_string());
    write("tokenizer.json", tokenizer).expect("written");
    write("tokenizer_config.json", json!({ "eos_token": "<end>" })).expect("written");
}
