//! Texts in rows: packing, targets, order, validation.

use crate::plain::{self, Marked};
use crate::support::{END, Folder, RowOf, epoch, rows_of, validation};
use fp8::training::{DatasetOptions, IGNORED, Task, Validation};
use proptest::prelude::*;
use serde_json::json;
use std::path::PathBuf;

/// Texts over few letters: of no token, of one, of many rows.
fn texts() -> impl Strategy<Value = Vec<String>> {
    let text = prop_oneof![
        4 => "[ab \n]{0,40}",
        1 => "[a-e .\n]{0,300}",
        2 => "[ab]{0,2}",
    ];
    proptest::collection::vec(text, 1..60)
}

fn options() -> impl Strategy<Value = DatasetOptions> {
    (2usize..50, any::<bool>(), any::<u64>()).prop_map(|(context, packing, seed)| {
        DatasetOptions::new(context)
            .with_packing(packing)
            .with_seed(seed)
    })
}

/// The documents' tokens, all to be predicted.
fn documents(folder: &Folder, texts: &[String]) -> Vec<Vec<Marked>> {
    let document = |text: &String| {
        let ids = std::iter::once(0).chain(folder.encode(text)).chain([END]);
        ids.map(|id| (id, true)).collect()
    };
    texts.iter().map(document).collect()
}

/// The rows that these texts make.
fn expected(folder: &Folder, texts: &[String], options: &DatasetOptions) -> Vec<RowOf> {
    let documents = documents(folder, texts);
    let pieces = documents
        .iter()
        .flat_map(|document| plain::pieces(document, options.context));
    let rows = match options.packing {
        true => plain::packed(pieces.collect(), options.context),
        false => pieces.map(|piece| vec![piece]).collect(),
    };
    let row = |pieces: &Vec<_>| plain::row(pieces, options.context, END);
    rows.iter().map(row).collect()
}

/// Texts as lines of JSON, or as files of a folder whose order is the texts'.
fn write(folder: &Folder, name: &str, texts: &[String], as_files: bool) -> PathBuf {
    if !as_files {
        let values: Vec<_> = texts
            .iter()
            .map(|text| json!({ "text": text, "id": 3 }))
            .collect();
        return folder.lines(&format!("{name}.jsonl"), &values);
    }
    for (at, text) in texts.iter().enumerate() {
        // Some in a folder of the folder.
        let inner = if at % 3 == 0 { "/inner" } else { "" };
        folder.write(&format!("{name}/{at:03}{inner}.txt"), text);
    }
    folder.path(name)
}

/// More rows than stay open: later pieces fill those with the most room.
#[test]
fn of_many_open_rows_the_fullest_ones_close() {
    let folder = Folder::new();
    let options = DatasetOptions::new(40).with_packing(true);
    // With their ends, more than half a row each; then pieces for the rest of a row.
    let halves = (0..80).map(|i| "a".repeat(20 + i * 7 % 9));
    let rests = (0..80).map(|i| "a".repeat(1 + i * 5 % 17));
    let texts: Vec<String> = halves.chain(rests).collect();
    let rows = expected(&folder, &texts, &options);
    assert!(
        rows.len() > 80 && rows.iter().any(|row| row.padding > 0),
        "{}",
        rows.len()
    );
    let file = write(&folder, "data", &texts, false);
    let checked = options.with_validation(Validation::Files(vec![file.clone()]));
    let data = folder.open(&file, &checked).expect("data");
    assert_eq!(validation(&data), rows);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn rows_are_those_of_the_plain_definition(texts in texts(), options in options(), as_files: bool) {
        let folder = Folder::new();
        // A file without text is an error.
        let texts: Vec<String> = texts.into_iter().filter(|text| !as_files || !text.trim().is_empty()).collect();
        prop_assume!(!texts.is_empty());
        let rows = expected(&folder, &texts, &options);
        let file = write(&folder, "data", &texts, as_files);

        // As validation, rows come in the order of the files.
        let checked = options.clone().with_validation(Validation::Files(vec![file.clone()]));
        let data = folder.open(&file, &checked).expect("data");
        prop_assert_eq!(&validation(&data), &rows);
        prop_assert_eq!(data.rows(), rows.len());
        for number in [0, 1, 7] {
            prop_assert_eq!(epoch(&data, number), plain::shuffled(&rows, options.seed, number));
        }

        // The summary counts what the rows have.
        let summary = data.summary();
        let padding: usize = rows.iter().map(|row| row.padding).sum();
        let predicted = rows.iter().flat_map(|row| &row.targets).filter(|&&target| target != IGNORED).count();
        prop_assert_eq!(summary.documents, 2 * texts.len());
        prop_assert_eq!([summary.rows, summary.padding, summary.predicted], [rows.len(), padding, predicted]);
        prop_assert_eq!(summary.tokens, rows.len() * options.context - padding);
        let all: usize = documents(&folder, &texts).iter().map(Vec::len).sum();
        prop_assert_eq!(2 * all, summary.tokens + summary.validation_tokens + summary.unused_tokens);
        prop_assert_eq!(summary.truncated, 0);
    }

    /// Properties that need no second implementation.
    #[test]
    fn every_token_is_in_one_segment_of_an_epoch(texts in texts(), options in options()) {
        let folder = Folder::new();
        let file = write(&folder, "data", &texts, false);
        let data = folder.open(&file, &options.clone().with_validation(Validation::None)).expect("data");
        let mut found = vec![];
        for row in epoch(&data, 3) {
            prop_assert_eq!(row.segments.iter().sum::<usize>(), options.context);
            prop_assert!(row.targets.iter().any(|&target| target != IGNORED));
            let documents = row.segments.len() - usize::from(row.padding > 0);
            prop_assert!(options.packing || documents == 1);
            let mut start = 0;
            for &len in &row.segments[..documents] {
                let (tokens, targets) = (&row.tokens[start..start + len], &row.targets[start..start + len]);
                prop_assert_eq!(&tokens[1..], &targets[..len - 1]);
                prop_assert_eq!(targets[len - 1], IGNORED);
                found.push(tokens.to_vec());
                start += len;
            }
            prop_assert_eq!(options.context - start, row.padding);
            prop_assert!(row.targets[start..].iter().all(|&target| target == IGNORED));
        }
        let whole = documents(&folder, &texts);
        let mut pieces: Vec<Vec<u32>> = vec![];
        for document in &whole {
            let ids: Vec<u32> = document.iter().map(|(id, _)| *id).collect();
            // No document is cut into more pieces than its length needs.
            pieces.extend(ids.chunks(options.context).filter(|piece| piece.len() > 1).map(<[u32]>::to_vec));
        }
        found.sort();
        pieces.sort();
        prop_assert_eq!(found, pieces);
    }

    #[test]
    fn batches_cut_one_endless_stream(texts in texts(), options in options(), steps in proptest::collection::vec((0u64..40, 0usize..9), 1..8)) {
        let folder = Folder::new();
        let file = write(&folder, "data", &texts, false);
        let options = options.with_validation(Validation::None);
        let (data, again) = (folder.open(&file, &options).expect("data"), folder.open(&file, &options).expect("data"));
        prop_assert_eq!(data.fingerprint(), again.fingerprint());
        let stream: Vec<RowOf> = (0..400).flat_map(|step| rows_of(&data.train_batch(step, 1))).collect();
        let epochs = stream.chunks_exact(data.rows()).enumerate();
        for (number, rows) in epochs.take(20) {
            prop_assert_eq!(rows, epoch(&data, number as u64));
        }
        for (step, rows) in steps {
            let start = step as usize * rows;
            // A dataset that has been asked for other steps before, and one that has not.
            prop_assert_eq!(rows_of(&data.train_batch(step, rows)), &stream[start..start + rows]);
            prop_assert_eq!(rows_of(&again.train_batch(step, rows)), &stream[start..start + rows]);
        }
    }

    #[test]
    fn a_share_is_held_out_whatever_the_seed(texts in texts(), options in options(), share in 0f64..1., as_files: bool) {
        let folder = Folder::new();
        let texts: Vec<String> = texts.into_iter().filter(|text| !as_files || !text.trim().is_empty()).collect();
        prop_assume!(!texts.is_empty());
        let file = write(&folder, "data", &texts, as_files);
        let options = options.with_packing(false).with_validation(Validation::Share(share));
        let data = folder.open(&file, &options).expect("data");
        let held = validation(&data);
        let other = folder.open(&file, &options.clone().with_seed(options.seed ^ 1)).expect("data");
        prop_assert_eq!(&validation(&other), &held);
        prop_assert_ne!(data.fingerprint(), other.fingerprint());

        // Both parts together are the whole, and validation is in the order of the files.
        let rows = expected(&folder, &texts, &options);
        let mut both = [epoch(&data, 0), held.clone()].concat();
        both.sort();
        let mut whole = rows.clone();
        whole.sort();
        prop_assert_eq!(both, whole);
        let mut rest = rows.iter();
        prop_assert!(held.iter().all(|held| rest.any(|row| row == held)));

        // Pieces of text files, documents of others.
        let documents = documents(&folder, &texts);
        let pieces = documents.iter().map(|document| plain::pieces(document, options.context).len());
        let units = if as_files { pieces.sum() } else { pieces.filter(|&pieces| pieces > 0).count() };
        let number = match units {
            0 | 1 => 0,
            _ if share == 0. => 0,
            _ => ((share * units as f64).round() as usize).clamp(1, units - 1),
        };
        if as_files {
            prop_assert_eq!(held.len(), number);
        } else {
            let documents = held.iter().filter(|row| row.tokens[0] == 0).count();
            prop_assert_eq!(documents, number);
        }
    }
}

#[test]
fn threads_do_not_matter() {
    let folder = Folder::new();
    // Some of them are encoded in parts.
    let text = |at: usize| "the abbot and the baker \n".repeat(at * 250 + 1);
    let texts: Vec<String> = (0..20).map(text).collect();
    let file = write(&folder, "data", &texts, false);
    let made = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let data = pool
            .expect("threads")
            .install(|| folder.open(&file, &DatasetOptions::new(64)));
        let data = data.expect("data");
        (data.fingerprint(), epoch(&data, 0), validation(&data))
    });
    assert!(made[0].1.len() > 100);
    assert_eq!(made[0], made[1]);
    assert_eq!(made[0], made[2]);

    // One dataset used by many threads at once, at different epochs.
    let data = folder.open(&file, &DatasetOptions::new(64)).expect("data");
    let alone: Vec<RowOf> = (0..8)
        .flat_map(|step| rows_of(&data.train_batch(step * 500, 4)))
        .collect();
    let together = std::thread::scope(|scope| {
        let data = &data;
        let steps =
            (0..8).map(|step| scope.spawn(move || rows_of(&data.train_batch(step * 500, 4))));
        let steps: Vec<_> = steps.collect();
        let rows = steps
            .into_iter()
            .flat_map(|thread| thread.join().expect("rows"));
        rows.collect::<Vec<RowOf>>()
    });
    assert_eq!(alone, together);
}

#[test]
fn texts_with_labels_can_train_a_language_model() {
    let folder = Folder::new();
    let labelled = folder.lines("l.jsonl", &[json!({ "text": "ab ba", "label": 1 })]);
    let plain = folder.lines("p.jsonl", &[json!({ "text": "ab ba" })]);
    let options = DatasetOptions::new(16)
        .with_validation(Validation::None)
        .with_task(Task::LanguageModel);
    let [labelled, plain] =
        [labelled, plain].map(|file| folder.open(&file, &options).expect("data"));
    assert_eq!(labelled.fingerprint(), plain.fingerprint());
    assert_eq!(labelled.train_batch(0, 1), plain.train_batch(0, 1));
    assert_eq!(labelled.train_batch(0, 1).labels, None);
}

#[test]
fn the_fingerprint_sees_tokens_rows_and_what_is_learned() {
    let folder = Folder::new();
    let options = DatasetOptions::new(16).with_validation(Validation::None);
    let of = |values: &[serde_json::Value], options: &DatasetOptions| {
        let file = folder.lines("data.jsonl", values);
        folder.open(&file, options).expect("data").fingerprint()
    };
    let texts = [json!({ "text": "ab" }), json!({ "text": "abba" })];
    let mut all = vec![
        of(&texts, &options),
        of(&texts, &options.clone().with_packing(false)),
        of(&texts, &options.clone().with_seed(1)),
        of(&texts, &options.clone().with_end_of_text(false)),
        of(
            &texts,
            &DatasetOptions::new(17).with_validation(Validation::None),
        ),
        of(
            &texts,
            &options.clone().with_validation(Validation::Share(0.5)),
        ),
        of(&texts[..1], &options),
        of(&[texts[1].clone(), texts[0].clone()], &options),
        of(
            &[
                json!({ "prompt": "a", "completion": "b" }),
                json!({ "prompt": "ab", "completion": "ba" }),
            ],
            &options,
        ),
    ];
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
}

#[test]
fn names_that_begin_with_a_dot_are_skipped() {
    let folder = Folder::new();
    for name in ["plain", "with"] {
        folder.write(&format!("{name}/b.txt"), "the abbot");
        folder.write(&format!("{name}/a/c.txt"), "a baker");
    }
    // Neither text nor JSON: reading one of them would be an error or another row.
    folder.write("with/.DS_Store", [0xFFu8, 0xFE, 0]);
    folder.write("with/.notes.txt", "not this");
    folder.write("with/a/.hidden.jsonl", "no JSON");
    folder.write("with/.git/config", "nor this");
    let options = DatasetOptions::new(8).with_validation(Validation::None);
    let open = |name| folder.open(&folder.path(name), &options).expect("data");
    let (plain, with) = (open("plain"), open("with"));
    assert_eq!(epoch(&with, 0), epoch(&plain, 0));
    assert_eq!(with.rows(), plain.rows());
}
