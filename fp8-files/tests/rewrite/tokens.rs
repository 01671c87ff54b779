//! Python's `NaN`, `Infinity` and `-Infinity` in `config.json`.

use crate::helpers::*;
use candle_core::DType;
use fp8_files::Error;
use fp8_files::load::Checkpoint;
use fp8_files::python_json::parse;
use fp8_files::rewrite::{
    self, Classifier, QuantizeOptions, Scheme, Source, Spelling, WriteOptions,
};
use std::fs;
use std::path::Path;

/// As Python's `json.dump` writes it.
const CONFIG: &str = r#"{
  "architectures": ["Mamba2ForCausalLM"],
  "hidden_size": 64,
  "id2label": {"0": "NaN", "1": "Infinity"},
  "text_config": {"clip": [NaN, -Infinity]},
  "tie_word_embeddings": false,
  "time_step_limit": [0.0, Infinity]
}
"#;

fn model(dir: &Path, config: &str) {
    plain_model(dir, (64, 128), false, DType::BF16);
    fs::write(dir.join("config.json"), config).unwrap();
}

/// Checks that the configuration in `folder` has the entries of [`CONFIG`].
fn check(case: &str, folder: &Path) {
    let text = fs::read_to_string(folder.join("config.json")).unwrap();
    let (found, expected) = (parse(&text).unwrap(), parse(CONFIG).unwrap());
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&found[key], value, "{case}: {key}");
    }
    // What Python reads: the tokens themselves, and texts as texts.
    for part in [
        "0.0,\n    Infinity\n",
        "NaN,\n      -Infinity\n",
        "\"0\": \"NaN\"",
    ] {
        assert!(text.contains(part), "{case}: {part} in {text}");
    }
}

#[test]
fn every_rewrite_keeps_them() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    model(&at("plain"), CONFIG);
    let plain = open(at("plain"));
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    rewrite::quantize(&plain, at("fp8"), &options, &mut rewrite::quiet).unwrap();
    check("quantize", &at("fp8"));
    let fp8 = open(at("fp8"));
    let (spelling, write) = (Spelling::ModelOpt, WriteOptions::new());
    let to = at("modelopt");
    rewrite::convert(&fp8, &to, spelling, &write, &mut rewrite::quiet).unwrap();
    check("convert", &to);
    let (converted, to) = (open(&to), at("back"));
    rewrite::dequantize(&converted, &to, None, &write, &mut rewrite::quiet).unwrap();
    check("dequantize", &to);
    // A source that edits the configuration.
    let classifier = Classifier::new(&plain, &["bad".into()]);
    let limits = &classifier.config().unwrap()["time_step_limit"];
    assert_eq!(limits, &parse("[0.0, Infinity]").unwrap());
}

/// No default takes the place of such a number.
#[test]
fn a_number_that_is_needed_is_an_error_with_its_name() {
    let dir = dir();
    for token in ["NaN", "Infinity", "-Infinity"] {
        let method = r#""quant_method": "fbgemm_fp8", "modules_to_not_convert": []"#;
        let bound = format!(r#""activation_scale_ub": {token}"#);
        let config = format!(r#"{{"quantization_config": {{{method}, {bound}}}}}"#);
        model(dir.path(), &config);
        let error = Checkpoint::open_dir(dir.path()).unwrap_err();
        let key = "quantization_config.activation_scale_ub";
        assert!(
            matches!(&error, Error::UnsupportedScheme { key: at, value, .. } if at == key && value == token),
            "{error}"
        );
    }
    // What is no token of Python stays an error.
    for text in ["{\"a\": nan}", "{\"a\": -NaN}", "{NaN: 1}", "{\"a\": NaN"] {
        model(dir.path(), text);
        let error = Checkpoint::open_dir(dir.path()).unwrap_err();
        assert!(
            matches!(&error, Error::Json { path, .. } if path.ends_with("config.json")),
            "{text}: {error}"
        );
    }
}
