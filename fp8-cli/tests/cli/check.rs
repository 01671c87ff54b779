//! `fp8 check`: exit codes, text and JSON.

use crate::support::{Dir, copy, edit, fp8, golden, json_output, output, refusal, text};
use serde_json::{Value, json};

#[test]
fn a_sound_folder_has_no_faults() {
    for family in ["ct_static_tensor", "modelopt_fp8_kv", "hf_block_f32"] {
        let all = output(&["check", &golden(family), "--weights", "--deny-warnings"]);
        assert!(all.contains("14 FP8 layers; no faults"), "{all}");
    }
    let report = json_output(&["check", &golden("ct_block128"), "--json", "--scales-only"]);
    assert_eq!(report["family"], "compressed-tensors");
    assert_eq!(
        (&report["errors"], &report["fp8_layers"]),
        (&json!(0), &json!(14))
    );
}

#[test]
fn all_faults_are_listed_and_errors_end_with_code_1() {
    let dir = Dir::new();
    let model = copy("ct_static_tensor", &dir.join("model"));
    edit(&format!("{model}/config.json"), |config| {
        config["quantization_config"]["ignore"] = json!(["lm_head", "model.layers.0.mlp.up_proj"]);
        config["num_hidden_layers"] = json!(4);
    });
    let ended = fp8(&["check", &model]);
    assert_eq!(ended.status.code(), Some(1));
    let shown = text(&ended.stdout);
    for part in [
        "error[ignored-layer-quantized]",
        "model.layers.0.mlp.up_proj.weight: FP8 codes",
        "error[layers-missing]",
        "model.layers.3: 2 of 4; expected `num_hidden_layers` 4",
        "Remove it from the list",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let report: Value = serde_json::from_slice(&fp8(&["check", &model, "--json"]).stdout).unwrap();
    assert_eq!(report["errors"], 2);
    let finding = &report["findings"][1];
    assert_eq!(
        (&finding["code"], &finding["count"]),
        (&json!("layers-missing"), &json!(2))
    );
    assert_eq!(finding["places"][0]["subject"], "model.layers.2");
}

#[test]
fn three_tensors_of_a_fault_are_named_or_all() {
    let dir = Dir::new();
    let model = copy("ct_static_tensor", &dir.join("model"));
    edit(&format!("{model}/config.json"), |config| {
        // It has 2.
        config["num_hidden_layers"] = json!(8);
    });
    let shown = |more: &[&str]| {
        let line = [&["check", &model][..], more].concat();
        let found = text(&fp8(&line).stdout);
        let json: Value =
            serde_json::from_slice(&fp8(&[&line[..], &["--json"]].concat()).stdout).unwrap();
        let places = json["findings"][0]["places"].as_array().unwrap().len();
        (
            found.matches("expected `num_hidden_layers`").count(),
            places,
            found,
        )
    };
    let (lines, places, found) = shown(&[]);
    assert_eq!((lines, places), (3, 3), "{found}");
    assert!(
        found.contains(".. and 3 more (--all names them)"),
        "{found}"
    );
    let (lines, places, found) = shown(&["--all"]);
    assert_eq!((lines, places), (6, 6), "{found}");
    assert!(!found.contains("more"), "{found}");
}

#[test]
fn warnings_end_with_code_0_unless_they_are_denied() {
    let dir = Dir::new();
    let model = copy("ct_static_tensor", &dir.join("model"));
    edit(&format!("{model}/config.json"), |config| {
        config["quantization_config"]["ignore"] = json!(["lm_head", "model.layers.7.mlp.up_proj"]);
    });
    let shown = output(&["check", &model]);
    assert!(shown.contains("warning[ignore-matches-nothing]"), "{shown}");
    assert_eq!(
        fp8(&["check", &model, "--deny-warnings"]).status.code(),
        Some(1)
    );
}

#[test]
fn invalid_arguments_end_with_code_2() {
    for (model, part) in [("/no/such/model", "/no/such/model"), ("hf://a/../b", "")] {
        let (code, line) = refusal(&["check", model]);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(part), "{line}");
    }
    assert_eq!(refusal(&["check"]).0, 2);
}
