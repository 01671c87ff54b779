//! Queries with texts, and classes that a model knows already.

use crate::support::{END, Folder};
use fp8::training::{Dataset, DatasetOptions, IGNORED, Task, Validation};
use serde_json::{Value, json};

fn options() -> DatasetOptions {
    DatasetOptions::new(8).with_validation(Validation::None)
}

#[test]
fn a_group_of_rows_has_a_query_and_its_texts() {
    let folder = Folder::new();
    let pair = [json!({ "query": "a", "positive": "b a", "label": 3 })];
    let triple = [json!({ "query": "a", "positive": "baker baker baker", "negative": "b" })];
    for (lines, texts) in [
        (&pair, vec!["a", "b a"]),
        (&triple, vec!["a", "baker baker baker", "b"]),
    ] {
        let path = folder.lines("pairs.jsonl", lines);
        let data = folder.open(&path, &options()).expect("data");
        assert_eq!((data.task(), data.rows()), (Task::Embedding, 1));
        let batch = data.train_batch(0, 2);
        assert_eq!((batch.group, batch.rows), (texts.len(), 2 * texts.len()));
        assert!(batch.labels.is_none());
        for (row, text) in texts.iter().chain(&texts).enumerate() {
            // As the tokenizer has it, cut at the end of the row.
            let mut ids = vec![0];
            ids.extend(folder.encode(text));
            ids.truncate(8);
            let used = ids.len();
            ids.resize(8, END);
            assert_eq!(batch.tokens[row * 8..][..8], ids, "{text}");
            assert_eq!(batch.padding[row], 8 - used, "{text}");
        }
        assert!(batch.targets.iter().all(|target| *target == IGNORED));
        let part = batch.part(texts.len()..2 * texts.len());
        assert_eq!((part.rows, part.group), (texts.len(), texts.len()));
        assert_eq!(part.tokens, batch.tokens[..part.tokens.len()]);
    }
}

#[test]
fn lines_of_other_kinds_are_refused() {
    let folder = Folder::new();
    let pair = json!({ "query": "a", "positive": "b" });
    let open = |task: Option<Task>, files: &[&[Value]]| {
        let paths = files.iter().enumerate();
        let paths: Vec<_> = paths
            .map(|(number, lines)| folder.lines(&format!("{number}.jsonl"), lines))
            .collect();
        let options = options().with_task(task);
        let error = Dataset::open(&paths, &folder.tokenizer, &options);
        error.expect_err("an error").to_string()
    };
    let triple = json!({ "query": "a", "positive": "b", "negative": "a" });
    let text = json!({ "text": "a" });
    let error = open(None, &[&[pair.clone(), triple.clone()]]);
    assert!(
        error.contains("line 2: an object with `query` and `positive` and `negative`"),
        "{error}"
    );
    let error = open(
        None,
        &[std::slice::from_ref(&pair), std::slice::from_ref(&triple)],
    );
    assert!(error.contains("1.jsonl, line 1: a `negative`"), "{error}");
    let error = open(
        None,
        &[std::slice::from_ref(&triple), std::slice::from_ref(&pair)],
    );
    assert!(error.contains("1.jsonl, line 1: no `negative`"), "{error}");
    let error = open(
        None,
        &[std::slice::from_ref(&pair), std::slice::from_ref(&text)],
    );
    assert!(error.contains("1.jsonl, line 1: no `query`"), "{error}");
    let error = open(Some(Task::LanguageModel), &[std::slice::from_ref(&pair)]);
    assert!(error.contains("predict the next token"), "{error}");
    let error = open(None, &[&[json!({ "query": "a", "positive": 1 })]]);
    assert!(error.contains("`positive` is a number"), "{error}");
    for key in ["negatives", "negative_1", "negative2"] {
        let error = open(
            None,
            &[&[json!({ "query": "a", "positive": "b", key: "c" })]],
        );
        assert!(
            error.contains(key) && error.contains("`negative` alone"),
            "{error}"
        );
    }
    let error = open(None, &[&[json!({ "query": "a" })]]);
    assert!(error.contains("none of the known keys"), "{error}");
}

#[test]
fn known_classes_keep_their_order() {
    let folder = Folder::new();
    let known = ["warm", "cold", "dry"].map(String::from).to_vec();
    let open = |labels: &[Value]| {
        let lines = labels
            .iter()
            .map(|label| json!({ "text": "a", "label": label }));
        let path = folder.lines("texts.jsonl", &lines.collect::<Vec<_>>());
        folder.open(&path, &options().with_labels(known.clone()))
    };
    let classes = |data: &Dataset| {
        let rows = data.rows();
        let mut classes = data.train_batch(0, rows).labels.expect("labels");
        classes.sort();
        classes
    };
    let data = open(&["dry".into(), "warm".into()]).expect("data");
    assert_eq!((data.labels(), classes(&data)), (&known[..], vec![0, 2]));
    // A single class is enough to measure a model, and numbers are numbers of classes.
    let data = open(&[1.into()]).expect("data");
    assert_eq!((data.labels(), classes(&data)), (&known[..], vec![1]));
    let data = open(&["dry".into(), "hot".into()]).expect("data");
    assert_eq!(data.labels(), ["dry", "hot"]);
    let data = open(&[1.into(), 3.into()]).expect("data");
    assert_eq!(data.labels(), ["1", "3"]);
    open(&["hot".into()]).expect_err("one class");
}
