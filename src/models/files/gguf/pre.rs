//! The rules by which byte-level BPE tokenizers split a text, with llama.cpp's names.

use serde_json::Value;

/// Patterns that split a text before its bytes are merged, by `tokenizer.ggml.pre`.
pub(super) const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(super) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(super) const KNOWN_PRE: &str =
    "smollm, starcoder, refact, codeshell, gpt-2, llama-bpe and qwen2";

/// The parts of a `tokenizer.json` that come before the merges.
pub(crate) struct Rules<'a> {
    pub(crate) normalizer: Vec<&'a Value>,
    pub(crate) pre_tokenizer: Vec<&'a Value>,
}

/// llama.cpp's name; None if the rules are not among those that are known.
pub(crate) fn pre_tokenizer_name(rules: &Rules<'_>) -> Option<&'static str> {
    let is_byte_level = |part: &Value, regex: bool| {
        part["type"] == "ByteLevel"
            && part["add_prefix_space"] != true
            && part["use_regex"].as_bool().unwrap_or(true) == regex
    };
    let pattern = |part: &Value| match part["type"] == "Split"
        && part["behavior"] == "Isolated"
        && part["invert"] != true
    {
        true => part["pattern"]["Regex"].as_str().map(String::from),
        false => None,
    };
    let is_nfc = matches!(rules.normalizer.as_slice(), [part] if part["type"] == "NFC");
    if !is_nfc && !rules.normalizer.is_empty() {
        return None;
    }
    match rules.pre_tokenizer.as_slice() {
        [one] if is_byte_level(one, true) && !is_nfc => Some("gpt-2"),
        [digits, other]
            if digits["type"] == "Digits"
                && digits["individual_digits"] == true
                && is_byte_level(other, true)
                && !is_nfc =>
        {
            Some("smollm")
        }
        [split, other] if is_byte_level(other, false) => match pattern(split)?.as_str() {
            LLAMA3 if !is_nfc => Some("llama-bpe"),
            QWEN2 if is_nfc => Some("qwen2"),
            _ => None,
        },
        _ => None,
    }
}
