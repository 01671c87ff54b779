//! Damaged tokenizer files: loading, encoding or decoding gives an error that names the file.

use fp8::models::{Error, GenerationOptions, Result, TextError, Tokenizer};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::path::Path;

/// Byte-level pairs with a template around a text; words in pieces; a unigram model behind a map of characters.
fn files() -> [Value; 3] {
    // In base64: four bytes of length, a tree of 256 nodes that has nothing, and a text of one byte.
    let charsmap = format!("AAQA{}", "A".repeat(1368));
    let special = |id: u32, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true })
    };
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    [
        json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [special(0, "<s>"), special(1, "</s>")],
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": "\\d" }, "behavior": "Isolated", "invert": false }, bytes] },
            "post_processor": { "type": "TemplateProcessing",
                "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
                "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
                "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } } },
            "decoder": bytes,
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": { "<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5, "Ġab": 6, "1": 7 },
                "merges": [["a", "b"], ["Ġ", "ab"]] },
        }),
        json!({
            "version": "1.0", "truncation": { "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0 },
            "padding": { "strategy": { "Fixed": 8 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]" },
            "added_tokens": [special(0, "[PAD]"), special(1, "[UNK]"), special(2, "[CLS]"), special(3, "[SEP]")],
            "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true },
            "pre_tokenizer": { "type": "BertPreTokenizer" },
            "post_processor": { "type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2] },
            "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
            "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                "vocab": { "[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "ab": 4, "##b": 5, "a": 6, "1": 7 } },
        }),
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special(0, "<unk>")],
            "normalizer": { "type": "Precompiled", "precompiled_charsmap": charsmap },
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [{ "type": "FixedLength", "length": 2 },
                { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true }] },
            "post_processor": null,
            "decoder": { "type": "Sequence", "decoders": [{ "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
                { "type": "ByteFallback" }, { "type": "Fuse" }, { "type": "Strip", "content": " ", "start": 1, "stop": 0 }] },
            "model": { "type": "Unigram", "unk_id": 0, "byte_fallback": false,
                "vocab": [["<unk>", 0.0], ["▁", -1.0], ["a", -2.0], ["b", -2.5], ["ab", -1.5], ["▁a", -3.0], ["1", -4.0]] },
        }),
    ]
}

/// Opens `text` as a tokenizer's file and uses all of it.
fn uses(dir: &Path, text: &[u8]) -> Result<()> {
    std::fs::write(dir.join("tokenizer.json"), text).expect("written");
    let tokenizer = Tokenizer::open(dir)?;
    let (mut first, mut ids) = (Ok(()), (0..10).collect::<Vec<u32>>());
    for special_tokens in [true, false] {
        match tokenizer.encode("ab  abba 1 é </s>", special_tokens) {
            Ok(encoded) => ids.extend(encoded),
            Err(error) => first = Err(error.into()),
        }
    }
    tokenizer.decode(&ids, false)?;
    tokenizer.decode(&ids[10..], true)?;
    first
}

#[test]
fn cut_files_are_errors() {
    let dir = tempfile::tempdir().expect("a directory");
    for file in files() {
        let text = file.to_string().into_bytes();
        uses(dir.path(), &text).expect("a whole file");
        for end in (0..text.len()).step_by(3) {
            let error = uses(dir.path(), &text[..end]).expect_err("a cut file");
            assert!(error.to_string().contains("tokenizer.json"), "{error}");
        }
    }
}

#[test]
fn mutated_files_never_panic() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut rng = StdRng::seed_from_u64(32);
    let mut refused = 0;
    for file in files() {
        let whole = file.to_string().into_bytes();
        for _ in 0..1000 {
            let mut text = whole.clone();
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..text.len());
                let end = (at + rng.random_range(0..12)).min(text.len());
                match rng.random_range(0..4) {
                    0 => text[at] = b"0123456789\"[]{},:-aABP#"[rng.random_range(0..23)],
                    1 => drop(text.drain(at..end)),
                    2 => text.splice(at..at, text[at..end].to_vec()).for_each(drop),
                    // A changed digit is still JSON.
                    _ => match text.iter().skip(at).position(u8::is_ascii_digit) {
                        Some(digit) => text[at + digit] = rng.random_range(b'0'..=b'9'),
                        None => continue,
                    },
                }
            }
            if let Err(error) = uses(dir.path(), &text) {
                assert!(error.to_string().contains("tokenizer.json"), "{error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 500, "{refused} of 3000");
}

/// A change that the tokenizers crate accepts.
type Change = fn(&mut Value);

#[test]
fn files_that_contradict_themselves_are_errors() {
    let dir = tempfile::tempdir().expect("a directory");
    let cases: [(usize, Change); 8] = [
        (0, |file| file["decoder"] = json!(5)),
        (0, |file| file["decoder"] = json!([])),
        (0, |file| {
            file["model"]["merges"] = json!([["a", "nothing"]])
        }),
        (0, |file| file["model"]["merges"] = json!([["b", "a"]])),
        (0, |file| {
            file["post_processor"]["special_tokens"] = json!({})
        }),
        (
            0,
            |file| {
                file["post_processor"]["single"] =
                    json!([{ "SpecialToken": { "id": "<x>", "type_id": 0 } }])
            },
        ),
        (2, |file| {
            file["normalizer"]["precompiled_charsmap"] = json!("AAAAAA==")
        }),
        (2, |file| {
            file["pre_tokenizer"]["pretokenizers"][0]["length"] = json!(0)
        }),
    ];
    for (i, (which, change)) in cases.into_iter().enumerate() {
        let mut file = files()[which].clone();
        change(&mut file);
        let error = uses(dir.path(), file.to_string().as_bytes()).expect_err("a contradiction");
        assert!(
            matches!(error, Error::Text(TextError::Tokenizer { .. })),
            "{i}: {error:?}"
        );
        assert!(error.to_string().contains("tokenizer.json"), "{i}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn files_beside_a_model_are_regular_and_of_a_size() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let open = || {
        Tokenizer::open(dir.path())
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "config.json",
        "chat_template.jinja",
    ] {
        std::fs::write(path("tokenizer.json"), files()[0].to_string()).expect("written");
        assert_eq!(open(), Ok(()));
        let _ = std::fs::remove_file(path(name));
        std::os::unix::fs::symlink("/dev/zero", path(name)).expect("a link");
        let error = open().expect_err(name);
        assert!(error.contains(name) && error.contains("device"), "{error}");
        std::fs::remove_file(path(name)).expect("removed");
        // A sparse file takes no disk space.
        let file = std::fs::File::create(path(name)).expect("a file");
        file.set_len(1 << 40).expect("a long file");
        let error = open().expect_err(name);
        assert!(error.contains(name) && error.contains("bytes"), "{error}");
        std::fs::remove_file(path(name)).expect("removed");
    }
    std::os::unix::fs::symlink("/dev/zero", path("generation_config.json")).expect("a link");
    let error = GenerationOptions::from_dir(dir.path()).expect_err("a device");
    assert!(
        error.to_string().contains("generation_config.json"),
        "{error}"
    );
}

#[test]
fn a_chat_template_that_is_not_utf_8_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("tokenizer.json"), files()[0].to_string()).expect("written");
    std::fs::write(
        path("tokenizer_config.json"),
        r#"{"chat_template": "other"}"#,
    )
    .expect("written");
    std::fs::write(path("chat_template.jinja"), b"{{ '\xff' }}").expect("written");
    let error = Tokenizer::open(dir.path())
        .expect_err("no UTF-8")
        .to_string();
    assert!(error.contains("chat_template.jinja"), "{error}");
}
