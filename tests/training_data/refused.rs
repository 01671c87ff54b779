//! Files and options that are refused: the error names the place and what was expected.

use crate::support::Folder;
use fp8::training::{DataError, Dataset, DatasetOptions, Validation};

/// The error of a file with this content.
fn refused(folder: &Folder, name: &str, content: impl AsRef<[u8]>) -> String {
    let file = folder.write(name, content);
    let error = folder.open(&file, &DatasetOptions::new(8));
    error.expect_err("refused").to_string()
}

#[test]
fn lines_are_checked() {
    let folder = Folder::new();
    let cases = [
        (
            r#"{"text": "a""#,
            "line 2, column 12: not JSON: EOF while parsing an object",
        ),
        (
            r#"{"text": "a"} x"#,
            "line 2, column 15: not JSON: trailing characters",
        ),
        (
            r#"["a"]"#,
            "line 2: a list, expected one object on each line",
        ),
        (r#""a""#, "line 2: a string, expected an object with `text`"),
        (
            r#"{"txt": "a"}"#,
            "an object with none of the known keys, expected an object with `text`",
        ),
        (r#"{"text": 3}"#, "`text` is a number, expected a string"),
        (r#"{"text": null}"#, "`text` is null, expected a string"),
        (r#"{"prompt": "a"}"#, "an object with `prompt`, expected"),
        (
            r#"{"text": "a", "messages": []}"#,
            "an object with `text` and `messages`, expected",
        ),
        (r#"{"label": 1}"#, "an object with `label`, expected"),
        (
            r#"{"prompt": "a", "completion": ["b"]}"#,
            "`completion` is a list, expected a string",
        ),
        (
            r#"{"prompt": [], "completion": "b"}"#,
            "`completion` is a string, expected a list of messages",
        ),
        (
            r#"{"messages": "a"}"#,
            "`messages` is a string, expected a list",
        ),
        (r#"{"messages": []}"#, "no message of the role `assistant`"),
        (
            r#"{"messages": [{"role": "user", "content": "a"}]}"#,
            "no message of the role `assistant`",
        ),
        (
            r#"{"messages": ["a"]}"#,
            "message 1 of `messages` is a string",
        ),
        (
            r#"{"messages": [{"role": "assistant"}]}"#,
            "`content` of message 1 of `messages` is missing",
        ),
        (
            r#"{"messages": [{"role": 1, "content": "a"}]}"#,
            "`role` of message 1 of `messages` is a number",
        ),
        (
            r#"{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}"#,
            "has `tool_calls`",
        ),
        (
            r#"{"messages": [{"role": "assistant", "content": "a"}], "tools": [1]}"#,
            "the line has `tools`",
        ),
        (
            r#"{"prompt": [{"role": "assistant", "content": "a"}], "completion": []}"#,
            "no message of the role `assistant`",
        ),
    ];
    for (line, expected) in cases {
        // Blank lines count.
        let error = refused(&folder, "data.jsonl", format!("\n{line}\n"));
        assert!(error.contains(expected), "{line}: {error}");
        assert!(error.contains("data.jsonl, line 2"), "{line}: {error}");
    }
    let error = refused(&folder, "data.json", "[\n{\"text\": \"a\"}\n]");
    assert!(
        error.contains("data.json, line 1: a list over many lines"),
        "{error}"
    );
}

#[test]
fn lines_of_two_kinds_are_refused() {
    let folder = Folder::new();
    let content = "{\"text\": \"ab\", \"n\": 1}\n\n{\"text\": \"ab\", \"label\": 1}\n";
    let error = refused(&folder, "data.jsonl", content);
    let expected =
        "line 3: an object with `text` and `label`, expected an object with `text`, as on line 1";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn files_without_anything_are_refused() {
    let folder = Folder::new();
    let error = refused(&folder, "a.txt", " \n");
    assert!(error.contains("a.txt is empty: expected text"), "{error}");
    let error = refused(&folder, "a.jsonl", "\n\n");
    assert!(
        error.contains("a.jsonl is empty: expected a JSON object on each line"),
        "{error}"
    );
    let error = refused(&folder, "b.txt", b"a\xff");
    assert!(
        error.contains("b.txt") && error.contains("not UTF-8 at byte"),
        "{error}"
    );
    std::fs::create_dir(folder.path("empty")).expect("made");
    folder.write("empty/.hidden", "abc");
    let options = DatasetOptions::new(8);
    let error = folder
        .open(&folder.path("empty"), &options)
        .expect_err("empty");
    assert!(matches!(error, DataError::Empty { .. }), "{error}");
    let error = folder
        .open(&folder.path("absent.txt"), &options)
        .expect_err("absent");
    assert!(matches!(error, DataError::File(_)), "{error}");

    // A prompt that fills the row leaves nothing to learn.
    let error = refused(
        &folder,
        "c.jsonl",
        r#"{"prompt": "abbaabbaabba", "completion": "a"}"#,
    );
    assert!(
        error.contains("no row of training is left of 1 documents"),
        "{error}"
    );
    let files = Dataset::open(&[], &folder.tokenizer, &options).expect_err("no file");
    assert!(
        matches!(
            files,
            DataError::NoRows {
                part: "training",
                documents: 0,
                ..
            }
        ),
        "{files}"
    );
    let good = folder.write("good.txt", "abba");
    let short = folder.lines("short.jsonl", &[serde_json::json!({ "text": "" })]);
    let options = options
        .with_validation(Validation::Files(vec![short]))
        .with_end_of_text(false);
    let error = folder.open(&good, &options).expect_err("no validation");
    assert!(
        matches!(
            error,
            DataError::NoRows {
                part: "validation",
                ..
            }
        ),
        "{error}"
    );
}

#[cfg(unix)]
#[test]
fn only_regular_files_are_read() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("data")).expect("made");
    // A link back to the folder would never end.
    std::os::unix::fs::symlink(folder.path("data"), folder.path("data/again")).expect("a link");
    let options = DatasetOptions::new(8);
    let error = folder
        .open(&folder.path("data"), &options)
        .expect_err("a link");
    assert!(
        error.to_string().contains("again: it is a directory"),
        "{error}"
    );
    std::fs::remove_file(folder.path("data/again")).expect("removed");
    std::os::unix::fs::symlink("/dev/zero", folder.path("data/zero.txt")).expect("a link");
    let error = folder
        .open(&folder.path("data"), &options)
        .expect_err("a device");
    assert!(
        error.to_string().contains("zero.txt: it is a device"),
        "{error}"
    );
}

#[test]
fn options_are_checked() {
    let folder = Folder::new();
    let file = folder.write("a.txt", "abba");
    let good = DatasetOptions::new(8);
    let share = |share| good.clone().with_validation(Validation::Share(share));
    let cases = [
        (DatasetOptions::new(0), "context"),
        (DatasetOptions::new(1), "context"),
        (share(1.), "validation"),
        (share(-0.1), "validation"),
        (share(f64::NAN), "validation"),
        (
            good.clone().with_validation(Validation::Files(vec![])),
            "validation",
        ),
    ];
    for (options, name) in cases {
        let error = folder.open(&file, &options).expect_err("refused");
        assert!(
            matches!(&error, DataError::Option { option, .. } if *option == name),
            "{error}"
        );
    }
    let truncating = folder.tokenizer.clone().with_max_tokens(99).expect("room");
    let error = Dataset::open(&[file], &truncating, &good).expect_err("refused");
    assert!(
        error.to_string().contains("number of tokens is 99"),
        "{error}"
    );
}

#[test]
fn a_byte_order_mark_is_not_text() {
    let folder = Folder::new();
    let options = DatasetOptions::new(8);
    for (name, content) in [("a.txt", "abba"), ("a.jsonl", r#"{"text": "abba"}"#)] {
        let plain = folder.write(name, content);
        let plain = folder.open(&plain, &options).expect("data").fingerprint();
        let marked = folder.write(name, format!("\u{feff}{content}"));
        assert_eq!(
            folder.open(&marked, &options).expect("data").fingerprint(),
            plain
        );
    }
}
