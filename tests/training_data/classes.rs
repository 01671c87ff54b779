//! Texts with labels.

use crate::support::{END, Folder, byte_pairs, epoch, validation};
use fp8::training::{DataError, DatasetOptions, IGNORED, Task, Validation};
use serde_json::{Value, json};

fn line(text: &str, label: impl Into<Value>) -> Value {
    json!({ "text": text, "label": label.into() })
}

#[test]
fn a_text_has_a_row_and_a_class() {
    // This tokenizer ends texts with a token, which truncated texts keep.
    let mut file = byte_pairs();
    let single = file["post_processor"]["single"]
        .as_array_mut()
        .expect("a list");
    single.push(json!({ "SpecialToken": { "id": "<|end|>", "type_id": 0 } }));
    file["post_processor"]["special_tokens"]["<|end|>"] =
        json!({ "id": "<|end|>", "ids": [3], "tokens": ["<|end|>"] });
    let folder = Folder::with(&file, "");
    let texts = ["a", "b a", "", "baker baker baker"];
    let labels = ["good", "bad", "good", "none"];
    let lines: Vec<Value> = texts
        .iter()
        .zip(labels)
        .map(|(text, label)| line(text, label))
        .collect();
    let path = folder.lines("texts.jsonl", &lines);
    let checked = folder.lines("checked.jsonl", &lines);
    let options = DatasetOptions::new(8).with_validation(Validation::Files(vec![checked]));
    let data = folder.open(&path, &options).expect("data");
    assert_eq!(data.task(), Task::Classification);
    assert_eq!(data.labels(), ["bad", "good", "none"]);
    let rows = validation(&data);
    let classes: Vec<_> = rows.iter().map(|row| row.label).collect();
    assert_eq!(classes, [1, 0, 1, 2].map(Some));
    for (row, text) in rows.iter().zip(texts) {
        let mut ids = vec![0];
        ids.extend(folder.encode(text));
        ids.truncate(7);
        ids.push(3);
        let len = ids.len();
        ids.resize(8, END);
        assert_eq!(row.tokens, ids);
        assert_eq!(row.targets, [IGNORED; 8]);
        let segments = if len == 8 {
            vec![8]
        } else {
            vec![len, 8 - len]
        };
        assert_eq!((&row.segments, row.padding), (&segments, 8 - len));
    }
    assert_eq!(data.summary().truncated, 2);
    assert_eq!(
        (
            data.rows(),
            data.summary().classes,
            data.summary().predicted
        ),
        (4, 3, 0)
    );
    assert!(epoch(&data, 0).iter().all(|row| rows.contains(row)));
}

#[test]
fn integer_labels_are_sorted_as_numbers() {
    let folder = Folder::new();
    let lines = [10, 9, -1, 9].map(|label| line("a", label));
    let path = folder.lines("texts.jsonl", &lines);
    let options = DatasetOptions::new(8).with_validation(Validation::None);
    let data = folder.open(&path, &options).expect("data");
    assert_eq!(data.labels(), ["-1", "9", "10"]);
    let mut classes = data.train_batch(0, 4).labels.expect("labels");
    classes.sort();
    assert_eq!(classes, [0, 1, 1, 2]);
}

#[test]
fn labels_are_classes_of_the_model_by_name_or_by_number() {
    let folder = Folder::new();
    let classes = |known: [&str; 3], labels: [i32; 3]| {
        let path = folder.lines("texts.jsonl", &labels.map(|label| line("a", label)));
        let options = DatasetOptions::new(8).with_validation(Validation::None);
        let options = options.with_labels(known.map(String::from).to_vec());
        let data = folder.open(&path, &options).expect("data");
        let mut found = data.train_batch(0, 3).labels.expect("labels");
        found.sort();
        (data.labels().to_vec(), found)
    };
    let known = ["1", "2", "3"];
    assert_eq!(
        classes(known, [1, 2, 3]),
        (known.map(String::from).to_vec(), vec![0, 1, 2])
    );
    // Not all of them are names: none is taken as one.
    assert_eq!(
        classes(known, [0, 1, 2]),
        (known.map(String::from).to_vec(), vec![0, 1, 2])
    );
}

#[test]
fn labels_that_make_no_classes_are_refused() {
    let folder = Folder::new();
    let options = DatasetOptions::new(8);
    let open = |lines: &[Value]| folder.open(&folder.lines("texts.jsonl", lines), &options);
    let error = open(&[line("a", 1), line("b", 1)]).expect_err("one class");
    assert!(
        matches!(&error, DataError::OneClass { label } if label == "1"),
        "{error}"
    );
    let error = open(&[line("a", 1), line("b", "1")]).expect_err("two kinds");
    let text = error.to_string();
    assert!(
        text.contains("texts.jsonl, line 2: `label` is the string `1`"),
        "{text}"
    );
    let error = open(&[line("a", 1.5)]).expect_err("no integer");
    assert!(error.to_string().contains("`label` is 1.5"), "{error}");
    let error = open(&[line("a", Value::Null)]).expect_err("no label");
    assert!(error.to_string().contains("`label` is null"), "{error}");

    // A file without labels beside one that has them.
    let labelled = folder.lines("a.jsonl", &[line("a", 1), line("b", 2)]);
    let text = folder.write("b.txt", "ab");
    let files = [labelled, text];
    let error = fp8::training::Dataset::open(&files, &folder.tokenizer, &options);
    let error = error.expect_err("no label").to_string();
    assert!(error.contains("b.txt: no `label`"), "{error}");
}

#[test]
fn a_row_needs_room_for_the_tokens_around_a_text() {
    let mut file = byte_pairs();
    let single = file["post_processor"]["single"]
        .as_array_mut()
        .expect("a list");
    single.push(json!({ "SpecialToken": { "id": "<s>", "type_id": 0 } }));
    let folder = Folder::with(&file, "");
    let path = folder.lines("texts.jsonl", &[line("a", 1), line("b", 2)]);
    let error = folder
        .open(&path, &DatasetOptions::new(2))
        .expect_err("no room");
    assert!(matches!(error, DataError::Tokenizer(_)), "{error}");
    assert!(folder.open(&path, &DatasetOptions::new(3)).is_ok());
}
