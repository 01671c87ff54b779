//! `fp8 generate`.

use crate::support::{
    Dir, edit, failure, fp8, json_output, logits, output, refusal, speaking, text, words,
    write_tokenizer,
};
use serde_json::{Value, json};

/// Tokens of the only output.
fn tokens(report: &Value) -> Vec<u64> {
    let tokens = report["outputs"][0]["tokens"].as_array().unwrap();
    tokens.iter().map(|id| id.as_u64().unwrap()).collect()
}

fn likeliest(logits: &[f32]) -> u64 {
    let best = |best: usize, id: usize| if logits[id] > logits[best] { id } else { best };
    (0..logits.len()).fold(0, best) as u64
}

#[test]
fn each_token_is_the_likeliest_after_those_before() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    // Inputs are not cast, so logits with a cache equal those of the whole row.
    let args = ["generate", &model, "--prompt", "w3 w4 w5", "--weight-only"];
    let args = [&args[..], &["--max-tokens", "6"]].concat();
    let report = json_output(&[&args[..], &["--json"]].concat());
    let output_of = &report["outputs"][0];
    assert_eq!(output_of["prompt"], "w3 w4 w5");
    assert_eq!(output_of["prompt_tokens"], json!([3, 4, 5]));
    assert_eq!(output_of["finish"], "length");
    let new = tokens(&report);
    assert_eq!(new.len(), 6);
    assert_eq!(output_of["text"], words(&new));
    let row = [&[3, 4, 5], &new[..]].concat();
    let rows = logits(&dir, &model, &row[..row.len() - 1], &["--weight-only"]);
    let expected: Vec<u64> = rows[2..].iter().map(|row| likeliest(row)).collect();
    assert_eq!(new, expected);
    for key in [
        "seconds_to_first_token",
        "seconds",
        "decode_tokens_per_second",
    ] {
        assert!(report[key].as_f64().unwrap() > 0., "{key}: {report}");
    }
    // As text, token by token.
    assert_eq!(output(&args), format!("{}\n", words(&new)));
    let spoken = fp8(&[&args[..], &["--stats"]].concat());
    let stats = text(&spoken.stderr);
    assert_eq!(text(&spoken.stdout), format!("{}\n", words(&new)));
    assert!(
        stats.contains("3 tokens read") && stats.contains("6 tokens written"),
        "{stats}"
    );
}

#[test]
fn several_prompts_continue_as_each_does_alone() {
    let dir = Dir::new();
    let model = speaking("hf_block_f32", &dir.join("model"));
    let prompts = ["w3 w4 w5", "w9", "w100 w7 w8"];
    let args = ["generate", &model, "--weight-only", "--max-tokens", "5"];
    let alone = prompts.map(|prompt| output(&[&args[..], &["--prompt", prompt]].concat()));
    let [a, b, c] = prompts;
    let all = ["--prompt", a, "--prompt", b, "--prompt", c];
    let expected: String = prompts
        .iter()
        .zip(&alone)
        .map(|(prompt, text)| format!("> {prompt}\n{text}"))
        .collect();
    assert_eq!(output(&[&args[..], &all].concat()), expected);
}

#[test]
fn texts_and_tokens_end_an_answer() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let args = [
        "generate",
        &model,
        "--prompt",
        "w9",
        "--json",
        "--max-tokens",
        "6",
    ];
    let new = tokens(&json_output(&args));
    let first = |id: u64| new.iter().position(|&token| token == id).unwrap();
    let end = *new.iter().find(|&&id| id != new[0]).unwrap();
    let before = words(&new[..first(end)]);
    let stop = format!(" w{end}");
    let report = json_output(&[&args[..], &["--stop", &stop]].concat());
    assert_eq!(report["outputs"][0]["finish"], "stop_string");
    assert_eq!(report["outputs"][0]["text"], before);
    // Settings from the model's files apply where no argument is given.
    let settings = json!({ "eos_token_id": end, "max_new_tokens": 2 });
    std::fs::write(
        format!("{model}/generation_config.json"),
        settings.to_string(),
    )
    .unwrap();
    let report = json_output(&args);
    assert_eq!(report["outputs"][0]["finish"], "stop_token");
    assert_eq!(tokens(&report), new[..=first(end)]);
    let short = ["generate", &model, "--prompt", "w9", "--json"];
    assert_eq!(tokens(&json_output(&short)), new[..2]);
}

#[test]
fn draws_follow_the_seed() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let draw = |seed: &str| {
        let args = [
            "generate",
            &model,
            "--prompt",
            "w3 w4",
            "--max-tokens",
            "12",
        ];
        output(&[&args[..], &["--temperature", "1.5", "--seed", seed]].concat())
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
    // With the likeliest token alone, the seed does not matter.
    let greedy = output(&[
        "generate",
        &model,
        "--prompt",
        "w3 w4",
        "--max-tokens",
        "12",
    ]);
    let args = [
        "generate",
        &model,
        "--prompt",
        "w3 w4",
        "--max-tokens",
        "12",
    ];
    let top = output(&[&args[..], &["--temperature", "1.5", "--top-k", "1"]].concat());
    assert_eq!(top, greedy);
}

/// Nothing is drawn at a temperature of 0, and without a penalty there is nothing for a window.
#[test]
fn flags_without_effect_are_refused() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let args = ["generate", &model, "--prompt", "w3", "--max-tokens", "2"];
    let cases: [(&[&str], &str); 4] = [
        (&["--top-k", "3"], "--top-k: at a temperature of 0"),
        (&["--seed", "0", "--top-p", "0.5"], "--top-p: at a"),
        (
            &["--top-k", "3", "--top-p", "0.5"],
            "--top-k, --top-p: at a",
        ),
        (
            &["--repetition-window", "4"],
            "--repetition-window needs a --repetition-penalty other than 1",
        ),
    ];
    for (more, part) in cases {
        let (code, line) = refusal(&[&args[..], more].concat());
        assert_eq!(code, 2, "{more:?}: {line}");
        assert!(line.contains(part), "{more:?}: {line}");
    }
    let window = ["--repetition-window", "4", "--repetition-penalty", "1.5"];
    output(&[&args[..], &window].concat());
    // Scripts give a seed in any case.
    let greedy = output(&args);
    let seed = ["--temperature", "0", "--seed", "1"];
    assert_eq!(output(&[&args[..], &seed].concat()), greedy);
    // The model's own settings count: it is drawn, among as many as they say.
    let settings =
        json!({ "do_sample": true, "temperature": 0.8, "top_k": 3, "repetition_penalty": 1.1 });
    let file = format!("{model}/generation_config.json");
    std::fs::write(file, settings.to_string()).unwrap();
    for more in [
        ["--seed", "1"],
        ["--top-p", "0.5"],
        ["--repetition-window", "4"],
    ] {
        output(&[&args[..], &more].concat());
    }
    let cold = [&args[..], &["--temperature", "0"]].concat();
    output(&cold);
    let (code, line) = refusal(&[&cold[..], &["--top-k", "3"]].concat());
    assert_eq!(code, 2, "{line}");
}

#[test]
fn chats_use_the_models_template() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let args = ["generate", &model, "--chat", "--prompt", "w9", "--json"];
    let line = failure(&args);
    assert!(line.contains("no chat template"), "{line}");
    let template = "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}";
    std::fs::write(format!("{model}/chat_template.jinja"), template).unwrap();
    let report = json_output(&args);
    assert_eq!(report["outputs"][0]["prompt_tokens"], json!([1, 9, 2]));
}

#[test]
fn invalid_prompts_and_options_are_errors() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let cases: [(&[&str], &str); 6] = [
        (&["--prompt", ""], "no tokens"),
        (
            &["--prompt", "w3", "--temperature", "-1"],
            "--temperature is -1",
        ),
        (&["--prompt", "w3", "--top-p", "2"], "--top-p is 2"),
        (&["--prompt", "w3", "--groups", "0"], "--groups is 0"),
        (&["--prompt", "w3", "--dtype", "f64"], "f64"),
        (&[], "--prompt"),
    ];
    for (args, part) in cases {
        let line = failure(&[&["generate", &model][..], args].concat());
        assert!(line.contains(part), "{args:?}: {line}");
    }
    // The tokenizer of another model.
    write_tokenizer(&model, 0..200);
    let line = failure(&["generate", &model, "--prompt", "w3 w150"]);
    assert!(line.contains("150") && line.contains("128"), "{line}");
    edit(&format!("{model}/tokenizer.json"), |json| {
        json["model"]["type"] = json!("Abacus");
    });
    let line = failure(&["generate", &model, "--prompt", "w3"]);
    assert!(line.contains("tokenizer.json"), "{line}");
}

#[test]
fn a_text_ends_where_the_model_has_no_more_positions() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    edit(&format!("{model}/config.json"), |config| {
        config["max_position_embeddings"] = json!(6);
        config["eos_token_id"] = json!(null);
    });
    let args = ["generate", &model, "--prompt", "w3 w4 w5", "--json"];
    let output = fp8(&args);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(tokens(&report).len(), 3);
    assert_eq!(report["outputs"][0]["finish"], "positions");
    let said = text(&output.stderr);
    assert!(
        said.contains("warning") && said.contains("6 positions"),
        "{said}"
    );
    let long = failure(&["generate", &model, "--prompt", "w1 w2 w3 w4 w5 w6 w7"]);
    assert!(
        long.contains("7 tokens") && long.contains("6 positions"),
        "{long}"
    );
}

#[test]
fn layers_that_the_configuration_does_not_count_are_refused() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    edit(&format!("{model}/config.json"), |config| {
        config["num_hidden_layers"] = json!(1)
    });
    let line = failure(&["generate", &model, "--prompt", "w3"]);
    for part in [
        "config.json",
        "num_hidden_layers is 1",
        "at least 2",
        "model.layers.1.",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
}
