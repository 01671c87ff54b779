//! Prompts with completions.

use crate::plain;
use crate::support::{END, Folder, epoch};
use fp8::training::{DatasetOptions, Validation};
use proptest::prelude::*;
use serde_json::json;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// A token is learned if it has a byte of the completion, or ends the text.
    #[test]
    fn completions_are_learned_with_their_end(
        pairs in proptest::collection::vec(("[ab\n]{0,3}[ ab\n]{0,8}", "[ab \n]{0,8}"), 1..6),
        context in 3usize..40,
        end in any::<bool>(),
    ) {
        let folder = Folder::new();
        let values: Vec<_> = pairs.iter().map(|(prompt, completion)| json!({ "prompt": prompt, "completion": completion })).collect();
        let file = folder.lines("pairs.jsonl", &values);
        let mut rows = vec![];
        for (prompt, completion) in &pairs {
            // The token `<s>` is before the text.
            let (mut tokens, mut bytes) = (vec![(0, false)], 0);
            for id in folder.encode(&format!("{prompt}{completion}")) {
                bytes += folder.tokenizer.decode(&[id], false).expect("a text").len();
                tokens.push((id, bytes > prompt.len()));
            }
            if end {
                tokens.push((END, true));
            }
            tokens.truncate(context);
            if tokens[1..].iter().any(|(_, learned)| *learned) {
                rows.push(plain::row(&[tokens], context, END));
            }
        }
        let options = DatasetOptions::new(context).with_validation(Validation::None).with_packing(false).with_end_of_text(end);
        match folder.open(&file, &options) {
            Ok(data) => prop_assert_eq!(epoch(&data, 0), plain::shuffled(&rows, 0, 0)),
            Err(error) => prop_assert!(rows.is_empty(), "{}", error),
        }
    }
}
