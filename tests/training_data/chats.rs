//! Which tokens of chats are learned.

use crate::support::{Folder, RowOf, byte_pairs, epoch};
use fp8::models::TextError;
use fp8::training::{DataError, DatasetOptions, IGNORED, Validation};
use proptest::prelude::*;
use serde_json::{Value, json};

fn options(context: usize) -> DatasetOptions {
    DatasetOptions::new(context).with_validation(Validation::None)
}

fn line(messages: &[(&str, &str)]) -> Value {
    json!({ "messages": messages_of(messages) })
}

fn messages_of(messages: &[(&str, &str)]) -> Value {
    let message = |(role, content): &(&str, &str)| json!({ "role": role, "content": content });
    messages.iter().map(message).collect()
}

/// What `CHATML` makes of messages, and for each byte whether it is of an answer: its content and the end of its turn.
fn written(messages: &[(&str, &str)]) -> (String, Vec<bool>) {
    let (mut text, mut learned) = (String::new(), vec![]);
    for (role, content) in messages {
        let parts = [
            (format!("<|turn|>{role}\n"), false),
            (format!("{content}<|end|>"), *role == "assistant"),
            ("\n".into(), false),
        ];
        for (part, is_learned) in parts {
            learned.extend(vec![is_learned; part.len()]);
            text += &part;
        }
    }
    (text, learned)
}

/// The tokens of a text; one is learned if any of its bytes is.
fn marked(folder: &Folder, text: &str, learned: &[bool]) -> Vec<(u32, bool)> {
    let (mut tokens, mut start) = (vec![], 0);
    for id in folder.encode(text) {
        let token = folder.tokenizer.decode(&[id], false).expect("a text");
        let bytes = &learned[start..start + token.len()];
        tokens.push((id, bytes.contains(&true)));
        start += token.len();
    }
    assert_eq!(start, text.len(), "{text:?}");
    tokens
}

/// The texts that a row learns, one for each run of targets.
fn learned(folder: &Folder, row: &RowOf) -> Vec<String> {
    let runs = row.targets.split(|&target| target == IGNORED);
    let runs = runs.filter(|run| !run.is_empty());
    runs.map(|run| folder.tokenizer.decode(run, false).expect("a text"))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn answers_are_learned_to_the_end_of_their_turns(
        chats in proptest::collection::vec(proptest::collection::vec((0usize..4, "[ab \n]{0,9}"), 1..7), 1..5),
        context in 20usize..200,
    ) {
        let folder = Folder::new();
        let chats: Vec<Vec<(&str, &str)>> = chats.iter().map(|chat| {
            // As many answers as others.
            let roles = ["user", "assistant", "assistant", "system"];
            let mut chat: Vec<(&str, &str)> = chat.iter().map(|(role, content)| (roles[*role], content.as_str())).collect();
            chat.push(("assistant", "a"));
            chat
        }).collect();
        let lines: Vec<Value> = chats.iter().map(|chat| line(chat)).collect();
        let file = folder.lines("chats.jsonl", &lines);

        let (mut rows, mut truncated, mut lost, mut unused) = (vec![], 0, 0, 0);
        for chat in &chats {
            let (text, learned) = written(chat);
            let mut tokens = marked(&folder, &text, &learned);
            truncated += usize::from(tokens.len() > context);
            lost += tokens.len().saturating_sub(context);
            tokens.truncate(context);
            match tokens[1..].iter().any(|(_, learned)| *learned) {
                true => rows.push(crate::plain::row(&[tokens], context, crate::support::END)),
                false => unused += 1,
            }
        }
        let data = folder.open(&file, &options(context).with_packing(false));
        if rows.is_empty() {
            let refused = matches!(data, Err(DataError::NoRows { part: "training", .. }));
            prop_assert!(refused);
            return Ok(());
        }
        let data = data.expect("data");
        prop_assert_eq!(epoch(&data, 0), crate::plain::shuffled(&rows, 0, 0));
        let summary = data.summary();
        prop_assert_eq!([summary.truncated, summary.truncated_tokens, summary.unused], [truncated, lost, unused]);
        prop_assert_eq!(data.description().contains("truncated"), truncated > 0);
    }
}

#[test]
fn a_chat_is_learned_in_parts() {
    let folder = Folder::new();
    let chat = [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "  ho\n\nthe end"),
        ("user", "bye"),
        ("assistant", ""),
        ("user", "?"),
    ];
    let file = folder.lines("chats.jsonl", &[line(&chat)]);
    let data = folder.open(&file, &options(200)).expect("data");
    let row = &epoch(&data, 0)[0];
    // The first space of the answer is one token with the line end before it.
    assert_eq!(
        learned(&folder, row),
        ["\n  ho\n\nthe end<|end|>", "<|end|>"]
    );
}

#[test]
fn prompts_and_completions_of_messages_learn_the_completion() {
    let folder = Folder::new();
    let prompt = [("user", "a"), ("assistant", "b"), ("user", "c")];
    let completion = [("assistant", "d")];
    let value = json!({ "prompt": messages_of(&prompt), "completion": messages_of(&completion) });
    let file = folder.lines("chats.jsonl", &[value]);
    let data = folder.open(&file, &options(200)).expect("data");
    assert_eq!(learned(&folder, &epoch(&data, 0)[0]), ["d<|end|>"]);
}

#[test]
fn other_templates_mark_the_same_answers() {
    let chat = [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ];
    let cases: [(&str, [&str; 2]); 4] = [
        // No special tokens: the whole turn. At the end of a text two line ends are one token, before a word they are two.
        (
            "{% for m in messages %}### {{ m.role }}:\n\n{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}### assistant:\n\n{% endif %}",
            ["b\n\n", "d\n\n"],
        ),
        // No beginning of an answer: the model writes the space, too.
        (
            "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|turn|>{{ m.content }}<|end|>{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
            [" b </s>", " d </s>"],
        ),
        // The end token at the end of the whole chat.
        (
            "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% else %}{{ eos_token }}{% endif %}",
            ["b<|end|>", "d<|end|>\n</s>"],
        ),
        // A message that is not in the chat.
        (
            "{% if messages and messages[0].role != 'system' %}<|turn|>system\nbe<|end|>{% endif %}\
            {% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
            ["b<|end|>", "d<|end|>"],
        ),
    ];
    for (template, expected) in cases {
        let folder = Folder::with(&byte_pairs(), template);
        let file = folder.lines("chats.jsonl", &[line(&chat)]);
        let data = folder.open(&file, &options(200)).expect("data");
        assert_eq!(
            learned(&folder, &epoch(&data, 0)[0]),
            expected,
            "{template}"
        );
    }
}

#[test]
fn templates_that_rewrite_earlier_messages_are_refused() {
    let chat = [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ];
    // The number of messages comes first; what was thought is dropped from all answers but the last.
    let counting =
        "{{ messages | length }}{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}";
    let forgetful = "{% for m in messages %}<|turn|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}ha{% endif %}{{ m.content }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|turn|>assistant\n{% endif %}";
    for (template, part) in [(counting, "the beginning of"), (forgetful, "the end of")] {
        let folder = Folder::with(&byte_pairs(), template);
        let file = folder.lines("chats.jsonl", &[line(&chat)]);
        let error = folder.open(&file, &options(200)).expect_err("refused");
        let DataError::Turns {
            place,
            message,
            what,
            ..
        } = &error
        else {
            panic!("{error:?}");
        };
        assert_eq!((place.line, *message, *what), (Some(1), 2, part), "{error}");
        assert!(error.to_string().contains("chats.jsonl, line 1"), "{error}");

        // What the message advises.
        let advised =
            json!({ "prompt": messages_of(&chat[..3]), "completion": messages_of(&chat[3..]) });
        let file = folder.lines("advised.jsonl", &[advised]);
        let opened = folder.open(&file, &options(200));
        assert_eq!(opened.is_ok(), template == forgetful);
    }
}

#[test]
fn what_the_template_refuses_names_the_line() {
    let template = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('roles must alternate') }}{% endif %}<|turn|>{{ m.content }}<|end|>{% endfor %}";
    let folder = Folder::with(&byte_pairs(), template);
    let good = line(&[("user", "a"), ("assistant", "b")]);
    let bad = line(&[("user", "a"), ("user", "b"), ("assistant", "b")]);
    let file = folder.lines("chats.jsonl", &[good.clone(), good, bad.clone(), bad]);
    let error = folder.open(&file, &options(200)).expect_err("refused");
    let refused = matches!(&error, DataError::Text { place, source: TextError::ChatTemplate { .. } } if place.line == Some(3));
    assert!(refused, "{error:?}");
    assert!(
        error.to_string().contains("roles must alternate"),
        "{error}"
    );
}

#[test]
fn a_model_without_a_template_cannot_learn_chats() {
    let folder = Folder::new();
    std::fs::remove_file(folder.path("tokenizer_config.json")).expect("removed");
    let tokenizer = fp8::models::Tokenizer::open(folder.path("")).expect("a tokenizer");
    let file = folder.lines("chats.jsonl", &[line(&[("assistant", "a")])]);
    let error =
        fp8::training::Dataset::open(&[file], &tokenizer, &options(9)).expect_err("refused");
    let refused = matches!(
        &error,
        DataError::Text {
            source: TextError::NoChatTemplate { .. },
            ..
        }
    );
    assert!(refused && error.to_string().contains("line 1"), "{error}");
}
