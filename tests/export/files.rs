//! Exports of tied weights and of parameters that a model does not show; where the files go, and that both of them
//! come into sight together.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::RecipeName;
use fp8::load::Checkpoint;
use fp8::nn::{self, Linear, Parameter};
use fp8::{Error, ExportOptions, Fp8Module, save_calibrated, save_calibrated_with};
use fp8_test_support::calibrated::{HIDDEN, IN, Net, calibrate, eval, fresh, quantization, x};
use fp8_test_support::{assert_same, assert_text, delayed, device, fill, prepare};
use serde_json::json;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

#[derive(Fp8Module)]
struct Tied {
    embed: nn::Embedding,
    fc: Linear,
    head: Linear,
}

impl Tied {
    fn new(vb: VarBuilder<'_>, ties: bool) -> Self {
        let embed = nn::embedding(24, IN, vb.pp("embed")).unwrap();
        let head = match ties {
            true => Linear::new(embed.embeddings().clone(), None).with_path("head"),
            false => nn::linear_no_bias(IN, 24, vb.pp("head")).unwrap(),
        };
        let fc = nn::linear_no_bias(IN, IN, vb.pp("fc")).unwrap();
        Self { embed, fc, head }
    }
}

impl Module for Tied {
    fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        self.head
            .forward(&self.fc.forward(&self.embed.forward(ids)?)?)
    }
}

#[test]
fn a_tied_head_is_reported_exported_and_served_in_high_precision() {
    let (vars, dir) = (VarMap::new(), tempfile::tempdir().unwrap());
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let mut model = Tied::new(vb, true);
    fill(&vars, 9);
    let report = prepare(&mut model);
    assert_eq!((report.converted(), report.skipped()), (1, 1), "{report}");
    assert!(report.to_string().contains("`embed.weight`"), "{report}");
    let ids = Tensor::arange(0u32, 24, &device()).unwrap();
    calibrate(&model, delayed(4), &ids);
    let report = save_calibrated(&model, dir.path()).unwrap();
    assert_eq!(report.quantized, ["fc"]);
    assert_eq!(report.ignored, ["head"]);
    assert_eq!(report.tied["head.weight"], "embed.weight");
    let open = || Checkpoint::open(&[&report.model]).unwrap();
    assert!(open().dtype("head.weight").is_none(), "stored once");
    assert_eq!(open().metadata("head.weight"), Some("embed.weight"));
    assert_eq!(quantization(dir.path())["ignore"], json!(["head"]));

    let expected = eval(&model, delayed(4), &ids);
    for ties in [true, false] {
        let vb = open().var_builder(DType::F32, &device()).unwrap();
        let served = Tied::new(vb, ties).forward(&ids).unwrap();
        assert_same(&format!("served, ties itself: {ties}"), &served, &expected);
    }
}

#[derive(Fp8Module)]
struct Hiding {
    fc: Linear,
    #[fp8(skip)]
    gain: Parameter,
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
        gain: Parameter::new("gain", vb.get(IN, "gain").unwrap()),
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
        matches!(&error, Error::MissedParameters { names } if *names == ["gain", "gate.weight"]),
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

    // What is loaded knows the names itself.
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
fn missing_directories_are_made_and_other_names_refused() {
    let (net, dir) = (fresh(2), tempfile::tempdir().unwrap());
    calibrate(&net, delayed(4), &x());
    let at = |path: &str| dir.path().join(path);
    for (path, model) in [
        ("absent", "absent/model.safetensors"),
        ("a/b/c", "a/b/c/model.safetensors"),
        ("v1.2/", "v1.2/model.safetensors"),
        ("v1.2", "v1.2/model.safetensors"),
        ("d/e/mine.safetensors", "d/e/mine.safetensors"),
        ("absent", "absent/model.safetensors"),
    ] {
        let report = save_calibrated(&net, at(path)).unwrap();
        assert_eq!(report.model, at(model), "{path}");
        assert!(at(model).is_file() && report.config.is_file(), "{path}");
        assert_eq!(report.config, at(model).with_file_name("config.json"));
    }
    fs::write(at("config.json"), "{\"mine\": 1}").unwrap();
    for name in ["config.json", "model.bin", "new/model.pt", "v1.3"] {
        let error = save_calibrated(&net, at(name)).unwrap_err();
        assert!(matches!(&error, Error::ExportPath { .. }), "{error:?}");
        assert_text(name, error, &[name, ".safetensors"]);
    }
    assert_eq!(
        fs::read_to_string(at("config.json")).unwrap(),
        "{\"mine\": 1}"
    );
    assert!(!at("new").exists());
}

#[test]
fn a_given_configuration_takes_the_place_of_the_old_entries() {
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

#[test]
fn what_is_no_file_is_not_replaced() {
    let net = fresh(2);
    calibrate(&net, delayed(4), &x());
    for name in ["model.safetensors", "config.json"] {
        let dir = tempfile::tempdir().unwrap();
        save_calibrated(&net, dir.path()).unwrap();
        fs::remove_file(dir.path().join(name)).unwrap();
        let pipe = Command::new("mkfifo").arg(dir.path().join(name)).status();
        if !pipe.is_ok_and(|status| status.success()) {
            println!("skipped: no named pipes here");
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

/// Saves two models of different strategies over each other until it is killed.
#[test]
fn child_that_saves_for_ever() {
    let Ok(dir) = std::env::var(CHILD) else {
        return;
    };
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
fn a_kill_leaves_a_model_and_the_configuration_that_belongs_to_it() {
    let dir = tempfile::tempdir().unwrap();
    for kills in 0..20 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "files::child_that_saves_for_ever", "--nocapture"])
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
        // The next save is under way, somewhere.
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
