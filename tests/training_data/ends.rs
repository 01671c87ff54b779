//! Ends of texts, and files of several kinds together.

use crate::support::{CHATML, END, Folder, byte_pairs};
use fp8::training::{Dataset, DatasetOptions, Validation};
use serde_json::json;

fn options() -> DatasetOptions {
    DatasetOptions::new(32).with_validation(Validation::None)
}

/// The tokenizer's own end token is not followed by another.
#[test]
fn a_text_has_one_end() {
    let mut own_end = byte_pairs();
    let template = &mut own_end["post_processor"];
    let end = json!({ "SpecialToken": { "id": "</s>", "type_id": 0 } });
    template["single"].as_array_mut().expect("parts").push(end);
    template["special_tokens"]["</s>"] = json!({ "id": "</s>", "ids": [END], "tokens": ["</s>"] });
    for tokenizer in [byte_pairs(), own_end] {
        let folder = Folder::with(&tokenizer, CHATML);
        let file = folder.lines("texts.jsonl", &[json!({ "text": "a cab" })]);
        let data = folder.open(&file, &options()).expect("data");
        let batch = data.train_batch(0, 1);
        let mut expected = vec![0];
        expected.extend(folder.encode("a cab"));
        expected.push(END);
        let used = batch.context - batch.padding[0];
        assert_eq!(batch.tokens[..used], expected);
    }
}

#[test]
fn texts_chats_and_completions_can_be_learned_together() {
    let folder = Folder::new();
    let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
    let chat = json!({ "messages": [turn("user", "a"), turn("assistant", "b")] });
    let files = [
        folder.write("plain.txt", "the cab"),
        folder.lines("texts.jsonl", &[json!({ "text": "a cab" })]),
        folder.lines("chats.jsonl", &[chat]),
        folder.lines(
            "completions.jsonl",
            &[json!({ "prompt": "a", "completion": "b" })],
        ),
    ];
    let open = |files: &[_]| Dataset::open(files, &folder.tokenizer, &options()).expect("data");
    let all = open(&files);
    let alone = files
        .each_ref()
        .map(|file| open(std::slice::from_ref(file)));
    let sum = |count: fn(&Dataset) -> usize| alone.iter().map(count).sum::<usize>();
    assert_eq!(all.summary().documents, 4);
    assert_eq!(all.summary().tokens, sum(|data| data.summary().tokens));
    assert_eq!(
        all.summary().predicted,
        sum(|data| data.summary().predicted)
    );
}
