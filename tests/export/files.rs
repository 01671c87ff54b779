//! Parameters that a model does not show, where the files go, and that both files change together.

use candle_core::{DType, Module};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::RecipeName;
use fp8::load::Checkpoint;
use fp8::nn::{self, Linear, NamedTensor};
use fp8::{Error, ExportOptions, Fp8Module, save_calibrated, save_calibrated_with};
use fp8_test_support::calibrated::{HIDDEN, IN, Net, calibrate, fresh, quantization, x};
use fp8_test_support::child::{child, from_parent};
use fp8_test_support::{assert_text, delayed, device, fill, prepare, skipped};
use serde_json::json;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

#[derive(Fp8Module)]
struct Hiding {
    fc: Linear,
    #[fp8(skip)]
    gain: NamedTensor,
    #[fp8(skip)]
    gate: Linear,
}

struct Showing(Hiding);
impl fp8::Fp8Module for Showing {
    fn visit(&self, visitor: &mut dyn fp8::Visitor) {
        self.0.fc.visit(visitor);
        self.0.gain.visit(visitor);
        self.0.gate.visit(visitor);
    }
}

fn hiding(vb: VarBuilder<'_>) -> Hiding {
    Hiding {
        fc: nn::linear(IN, IN, vb.pp("fc")).unwrap(),
        gain: NamedTensor::new("gain", vb.get(IN, "gain").unwrap()),
        gate: nn::linear_no_bias(IN, IN, vb.pp("gate")).unwrap(),
    }
}

#[test]
fn parameters_that_are_not_shown_are_named() {
    let (vars, dir) = (VarMap::new(), tempfile::tempdir().unwrap());
    let mut model = hiding(VarBuilder::from_varmap(&vars, DType::F32, &device()));
    fill(&vars, 1);
    prepare(&mut model);
    calibrate(&model.fc, delayed(4), &x());
    let options = ExportOptions::new().with_vars(&vars);
    let error = save_calibrated_with(&model, dir.path(), &options).unwrap_err();
    assert!(
        matches!(&error, Error::Export(fp8::ExportError::MissedParameters { names }) if *names == ["gain", "gate.weight"]),
        "{error:?}"
    );
    assert_text("missed", error, &["gain, gate.weight", "skip"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let options = ExportOptions::new().with_names(["fc.weight", "other"]);
    let error = save_calibrated_with(&model, dir.path(), &options).unwrap_err();
    assert_text("by name", error, &["other"]);
    let model = Showing(model);
    let options = ExportOptions::new().with_vars(&vars);
    let report = save_calibrated_with(&model, dir.path(), &options).unwrap();

    // A loaded model knows the names of its tensors.
    let checkpoint = Checkpoint::open(&[report.model]).unwrap();
    let loaded = checkpoint.loaded_names();
    let model = hiding(checkpoint.var_builder(DType::F32, &device()).unwrap());
    let names = [
        "fc.bias",
        "fc.input_scale",
        "fc.weight",
        "fc.weight_scale",
        "gain",
        "gate.weight",
    ];
    assert_eq!(loaded.names(), names);
    let options = ExportOptions::new().with_loaded(&loaded);
    let error = save_calibrated_with(&model, dir.path(), &options).unwrap_err();
    assert_text("loaded", error, &["gain, gate.weight"]);
    save_calibrated_with(&Showing(model), dir.path(), &options).unwrap();
}

#[test]
fn missing_directories_are_created_and_files_of_other_kinds_stay() {
    let (net, dir) = (fresh(2), tempfile::tempdir().unwrap());
    calibrate(&net, delayed(4), &x());
    let at = |path: &str| dir.path().join(path);
    for (path, model) in [
        ("absent", "absent/model.safetensors"),
        ("a/b/c", "a/b/c/model.safetensors"),
        ("v1.2/", "v1.2/model.safetensors"),
        ("v1.2", "v1.2/model.safetensors"),
        ("Llama-3.2-x", "Llama-3.2-x/model.safetensors"),
        (
            "new/v1.3.safetensors/",
            "new/v1.3.safetensors/model.safetensors",
        ),
        ("d/e/mine.safetensors", "d/e/mine.safetensors"),
        ("absent", "absent/model.safetensors"),
    ] {
        let report = save_calibrated(&net, at(path)).unwrap();
        assert_eq!(report.model, at(model), "{path}");
        assert!(at(model).is_file() && report.config.is_file(), "{path}");
        assert_eq!(report.config, at(model).with_file_name("config.json"));
    }
    fs::write(at("config.json"), "{\"mine\": 1}").unwrap();
    fs::write(at("model.bin"), "mine").unwrap();
    for name in ["config.json", "model.bin"] {
        let error = save_calibrated(&net, at(name)).unwrap_err();
        assert!(
            matches!(&error, Error::Export(fp8::ExportError::Target { .. })),
            "{error:?}"
        );
        assert_text(name, error, &[name, ".safetensors"]);
    }
    assert_eq!(
        fs::read_to_string(at("config.json")).unwrap(),
        "{\"mine\": 1}"
    );
}

#[test]
fn a_given_configuration_replaces_the_old_one() {
    let (net, dir) = (fresh(2), tempfile::tempdir().unwrap());
    calibrate(&net, delayed(4), &x());
    fs::write(dir.path().join("config.json"), "{\"old\": 1}").unwrap();
    let entries = json!({"hidden_size": 64, "quantization_config": 1});
    let options = ExportOptions::new().with_config(entries.as_object().unwrap().clone());
    let report = save_calibrated_with(&net, dir.path(), &options).unwrap();
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(report.config).unwrap()).unwrap();
    assert_eq!(config["hidden_size"], 64);
    assert_eq!(config["old"], serde_json::Value::Null);
    assert_eq!(config["quantization_config"]["format"], "float-quantized");
}

/// The numbers that Python writes and JSON does not have.
#[test]
fn the_tokens_of_an_old_configuration_stay() {
    let (net, dir) = (fresh(2), tempfile::tempdir().unwrap());
    calibrate(&net, delayed(4), &x());
    let old = "{\"limits\": [0.0, Infinity], \"name\": \"NaN\"}";
    fs::write(dir.path().join("config.json"), old).unwrap();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let text = fs::read_to_string(report.config).unwrap();
    for part in ["0.0,\n    Infinity\n", "\"name\": \"NaN\""] {
        assert!(text.contains(part), "{text}");
    }
    Checkpoint::open(&[report.model]).unwrap();
}

/// Whoever opens the directory would read the shards.
#[test]
fn a_directory_with_an_index_of_shards_is_refused() {
    let (net, dir) = (fresh(2), tempfile::tempdir().unwrap());
    calibrate(&net, delayed(4), &x());
    let index = dir.path().join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map": {}}"#).unwrap();
    for path in [dir.path().to_path_buf(), dir.path().join("x.safetensors")] {
        let error = save_calibrated(&net, path).unwrap_err();
        assert!(
            matches!(&error, Error::Export(fp8::ExportError::Sharded { index: found }) if *found == index),
            "{error:?}"
        );
        assert_text("sharded", error, &["index.json", "another directory"]);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn paths_that_are_not_regular_files_are_not_replaced() {
    let net = fresh(2);
    calibrate(&net, delayed(4), &x());
    for name in ["model.safetensors", "config.json"] {
        let dir = tempfile::tempdir().unwrap();
        save_calibrated(&net, dir.path()).unwrap();
        fs::remove_file(dir.path().join(name)).unwrap();
        let pipe = Command::new("mkfifo").arg(dir.path().join(name)).status();
        if !pipe.is_ok_and(|status| status.success()) {
            skipped("no named pipes here");
            return;
        }
        let error = save_calibrated(&net, dir.path()).unwrap_err();
        assert_text("a pipe", error, &[name, "not a regular file"]);
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            2,
            "nothing is left"
        );
    }
}

const CHILD: &str = "FP8_TEST_EXPORT_DIRECTORY";

/// Saves two models with different strategies over each other until the process is killed.
#[test]
#[ignore = "run by after_a_kill_the_model_and_its_configuration_belong_together in a child process"]
fn saves_forever() {
    let dir = from_parent(CHILD);
    let models = [RecipeName::Tensorwise, RecipeName::Rowwise].map(|recipe| {
        let net = fresh(4);
        calibrate(&net, recipe, &x());
        net
    });
    loop {
        for model in &models {
            save_calibrated(model, &dir).unwrap();
            println!("saved");
        }
    }
}

#[test]
fn after_a_kill_the_model_and_its_configuration_belong_together() {
    let dir = tempfile::tempdir().unwrap();
    for kills in 0..20 {
        let mut child = child("files::saves_forever")
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let mut saves = out
            .lines()
            .map_while(Result::ok)
            .filter(|line| line.contains("saved"));
        assert!(saves.nth(kills % 3).is_some(), "the child saves");
        // By now the next save is under way.
        std::thread::sleep(std::time::Duration::from_micros(kills as u64 * 150));
        child.kill().unwrap();
        child.wait().unwrap();

        let file = Checkpoint::open(&[dir.path().join("model.safetensors")]).unwrap();
        let group = &quantization(dir.path())["config_groups"]["group_0"];
        let rows = match group["weights"]["strategy"].as_str() {
            Some("tensor") => &[1][..],
            Some("channel") => &[HIDDEN, 1],
            other => panic!("strategy {other:?}"),
        };
        assert_eq!(file.shape("up.weight_scale"), Some(rows), "kill {kills}");
        Net::load(dir.path()).forward(&x()).unwrap();
    }
    let net = fresh(4);
    calibrate(&net, RecipeName::Rowwise, &x());
    save_calibrated(&net, dir.path()).unwrap();
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        2,
        "nothing is left behind"
    );
}
