//! Damaged and malicious files: impossible scales, ambiguous headers, sizes that overflow, and paths that are not
//! regular files.

use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::atomic::write_safetensors_atomic;
use fp8::checkpoint::{TrainingMeta, resume_training, save_training, training_meta};
use fp8::config::Recipe;
use fp8::load::{Checkpoint, var_builder};
use fp8::optim::{AdamW, AdamWConfig, OptimError};
use fp8::read::{MAX_CONFIG, open_regular, read_bytes, read_text, read_text_if_present};
use fp8::{Error, FilesError, fp8_autocast, nn};
use fp8_test_support::files::{codes, f32s, raw, write, write_with};
use fp8_test_support::{
    Mlp, assert_text, delayed, device, fill, flat, of, prepare, skipped, tensor,
};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Numbers that cannot be a scale, and what the message calls them.
const BAD_SCALES: [(f32, &str); 7] = [
    (f32::NAN, "NaN"),
    (f32::INFINITY, "inf"),
    (f32::NEG_INFINITY, "-inf"),
    (0., "0e0"),
    (-0.5, "-5e-1"),
    (1e-40, "e-41"),
    (3e38, "e38"),
];

#[test]
fn invalid_scales_are_refused_with_their_name_and_value() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let codes = codes(24);
    for (bad, text) in BAD_SCALES {
        for name in ["fc.weight_scale", "fc.input_scale"] {
            let scale = |own: &str| f32s(&[if own == name { bad } else { 0.01 }]);
            let (weight_scale, input_scale) = (scale("fc.weight_scale"), scale("fc.input_scale"));
            write(
                &path,
                &[
                    ("fc.weight", Dtype::F8_E4M3, &[4, 6], &codes),
                    ("fc.weight_scale", Dtype::F32, &[1], &weight_scale),
                    ("fc.input_scale", Dtype::F32, &[], &input_scale),
                ],
            );
            // SAFETY: nothing changes the file while the test reads it.
            let candles =
                unsafe { VarBuilder::from_mmaped_safetensors(&[&path], DType::F32, &device()) };
            let ours = var_builder(&[&path], DType::F32, &device()).unwrap();
            for vb in [ours, candles.unwrap()] {
                let error = nn::linear_no_bias(6, 4, vb.pp("fc")).unwrap_err();
                assert_text(&format!("{name} {bad}"), error, &[name, text, "index 0"]);
            }
        }
    }
    // Stock layers cannot load such a weight either.
    let rows = f32s(&[0.1, 0.1, f32::NAN, 0.1]);
    write(
        &path,
        &[
            ("fc.weight", Dtype::F8_E4M3, &[4, 6], &codes),
            ("fc.weight_scale", Dtype::F32, &[4, 1], &rows),
        ],
    );
    let vb = var_builder(&[&path], DType::F32, &device()).unwrap();
    let error = candle_nn::linear_no_bias(6, 4, vb.pp("fc")).unwrap_err();
    assert_text("stock", error, &["`fc.weight_scale`", "NaN", "index 2"]);
}

#[test]
fn integer_scales_are_refused_when_the_file_is_opened() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let (codes, float, int) = (codes(24), f32s(&[0.01]), 1i32.to_le_bytes());
    for name in ["fc.weight_scale", "fc.input_scale"] {
        let scale = |own| match own == name {
            true => (own, Dtype::I32, &[1][..], &int[..]),
            false => (own, Dtype::F32, &[1][..], &float[..]),
        };
        let weight = ("fc.weight", Dtype::F8_E4M3, &[4, 6][..], &codes[..]);
        write(
            &path,
            &[weight, scale("fc.weight_scale"), scale("fc.input_scale")],
        );
        let error = Checkpoint::open(&[&path]).unwrap_err();
        assert!(
            matches!(&error, FilesError::TensorDType { .. }),
            "{error:?}"
        );
        assert_text(name, error, &[name, "I32", "F32"]);
    }
}

#[test]
fn one_name_twice_in_a_header_is_an_error() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let later = r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#;
    for (header, name) in [
        (format!(r#"{{"a":{entry},"b":{later},"a":{later}}}"#), "a"),
        (format!(r#"{{"a":{entry},"\u0061":{later}}}"#), "a"),
        (
            format!(r#"{{"__metadata__":{{"k":"1","k":"2"}},"a":{entry},"b":{later}}}"#),
            "k",
        ),
        (
            format!(r#"{{"__metadata__":{{}},"a":{entry},"b":{later},"__metadata__":{{}}}}"#),
            "__metadata__",
        ),
    ] {
        raw(&path, &header, &[0; 8]);
        let error = Checkpoint::open(&[&path]).unwrap_err();
        assert!(
            matches!(&error, FilesError::RepeatedName { name: got, .. } if got == name),
            "{error:?}"
        );
        assert_text(&header, error, &["model.safetensors", &format!("`{name}`")]);
    }
}

#[test]
fn sizes_whose_product_overflows_are_an_error() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let half = (1usize << 63).to_string();
    let most = usize::MAX.to_string();
    for (shape, dtype) in [
        (format!("[{half},2]"), "U8"),
        (format!("[0,{most},{most}]"), "F32"),
        (format!("[{most},0,{most}]"), "F32"),
        (format!("[{most},{most},0]"), "F32"),
        (format!("[{most}]"), "F8_E4M3"),
        (format!("[0,{half}]"), "U8"),
        ("[4294967296,4294967296]".to_string(), "U8"),
    ] {
        let header =
            format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,0]}}}}"#);
        raw(&path, &header, &[]);
        let error = Checkpoint::open(&[&path]).unwrap_err();
        assert!(
            matches!(&error, FilesError::TensorShape { tensor, .. } if tensor == "x"),
            "{shape}: {error:?}"
        );
        assert_text(&shape, error, &["`x`", "memory"]);
    }
    // Empty tensors of ordinary sizes are accepted.
    write(&path, &[("x", Dtype::F32, &[0, 4096, 3], &[])]);
    let file = Checkpoint::open(&[&path]).unwrap();
    assert_eq!(file.tensor("x", &device()).unwrap().dims(), [0, 4096, 3]);
}

#[test]
fn metadata_about_missing_tensors_ties_nothing() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let one = f32s(&[1.]);
    let metadata = [("b", "a"), ("c", "absent"), ("d", "b"), ("a", "a")]
        .map(|(k, v)| (k.to_string(), v.to_string()));
    let metadata = HashMap::from(metadata);
    write_with(&path, &[("a", Dtype::F32, &[1], &one)], Some(metadata));
    let vb = var_builder(&[&path], DType::F32, &device()).unwrap();
    assert!(vb.get(1, "a").is_ok() && vb.get(1, "b").is_ok());
    for name in ["c", "d"] {
        assert_text(name, vb.get(1, name).unwrap_err(), &[&format!("`{name}`")]);
    }
}

/// The errors of everything that reads the file at `path`.
fn read(path: &Path) -> Vec<Error> {
    let vars = VarMap::new();
    let model = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
    vec![
        Checkpoint::open(&[path]).unwrap_err().into(),
        training_meta(path).unwrap_err(),
        resume_training(path, &model, &vars, &mut optimizer, None).unwrap_err(),
        open_regular(path).unwrap_err().into(),
        read_text(path, 100).unwrap_err().into(),
        read_text_if_present(path, 100).unwrap_err().into(),
        read_bytes(path, 100).unwrap_err().into(),
    ]
}

#[test]
fn pipes_devices_and_directories_are_refused_at_once() {
    let dir = dir();
    let pipe = dir.path().join("pipe.safetensors");
    let made = Command::new("mkfifo").arg(&pipe).status();
    let mut cases = vec![(dir.path().to_path_buf(), "directory")];
    if made.is_ok_and(|status| status.success()) {
        let link = dir.path().join("link.safetensors");
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        cases.extend([(pipe, "named pipe"), (link, "named pipe")]);
    }
    for device in ["/dev/zero", "/dev/null", "/dev/stdin"] {
        if fs::metadata(device).is_ok_and(|m| !m.is_file()) {
            let kind = match device {
                "/dev/stdin" => "",
                _ => "device",
            };
            cases.push((PathBuf::from(device), kind));
        }
    }
    for (path, kind) in cases {
        for error in read(&path) {
            assert!(
                matches!(&error, Error::Files(FilesError::NotARegularFile { .. })),
                "{path:?}: {error:?}"
            );
            assert_text("no file", error, &[&path.display().to_string(), kind]);
        }
    }
}

#[test]
fn a_pipe_in_place_of_the_configuration_is_refused() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    write(&path, &[("a", Dtype::F32, &[1], &f32s(&[1.]))]);
    let pipe = dir.path().join("config.json");
    if !Command::new("mkfifo")
        .arg(&pipe)
        .status()
        .is_ok_and(|status| status.success())
    {
        skipped("no named pipes here");
        return;
    }
    let error = Checkpoint::open(&[&path]).unwrap_err();
    assert_text("config", error, &["config.json", "named pipe"]);
}

#[test]
fn texts_are_read_up_to_a_limit() {
    let dir = dir();
    let path = dir.path().join("metrics.jsonl");
    fs::write(&path, "0123456789").unwrap();
    assert_eq!(read_text(&path, 10).unwrap(), "0123456789");
    let error = read_text(&path, 9).unwrap_err();
    assert!(
        matches!(error, FilesError::TooLarge { limit: 9, .. }),
        "{error:?}"
    );
    fs::write(&path, [0xFF, 0xFE]).unwrap();
    assert!(matches!(read_text(&path, 9), Err(FilesError::Read { .. })));
    assert_eq!(read_bytes(&path, 2).unwrap(), [0xFF, 0xFE]);
    assert!(matches!(
        read_bytes(&path, 1),
        Err(FilesError::TooLarge { limit: 1, .. })
    ));
    fs::remove_file(&path).unwrap();
    assert_eq!(read_text_if_present(&path, 9).unwrap(), None);
}

/// Parsed, 60 MB of JSON took 1.2 GB.
#[test]
fn a_configuration_above_the_size_limit_is_refused() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    write(&path, &[("a", Dtype::F32, &[1], &f32s(&[1.]))]);
    let config = dir.path().join("config.json");
    let file = fs::File::create(&config).unwrap();
    file.set_len(MAX_CONFIG + 1).unwrap();
    let error = Checkpoint::open(&[&path]).unwrap_err();
    assert!(
        matches!(&error, FilesError::TooLarge { path, limit: MAX_CONFIG } if *path == config),
        "{error:?}"
    );
}

/// A trained model and its optimizer.
fn trained() -> (VarMap, Mlp, AdamW) {
    let vars = VarMap::new();
    let mut model = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, 3);
    prepare(&mut model);
    let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
    for seed in 0..3 {
        let guard = fp8_autocast(delayed(4)).unwrap();
        let x = tensor(seed, &[5, Mlp::IN]);
        let y = candle_core::Module::forward(&model, &x).unwrap();
        guard.close().unwrap();
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(!optimizer.apply(&grads).unwrap().skipped().unwrap());
    }
    (vars, model, optimizer)
}

#[test]
fn impossible_state_is_not_resumed() {
    let dir = dir();
    let path = dir.path().join("checkpoint.safetensors");
    let (vars, model, mut optimizer) = trained();
    let recipe = Recipe::from(delayed(4));
    let meta = TrainingMeta {
        step: 3,
        recipe: Some(recipe.clone()),
        random: Value::Null,
        extra: json!(1),
    };
    save_training(&path, &model, &vars, &optimizer, &meta).unwrap();
    let good = Checkpoint::open(&[&path]).unwrap();
    let metadata: HashMap<String, String> = ["fp8_training", "fp8_state"]
        .into_iter()
        .map(|key| (key.to_string(), good.metadata(key).unwrap().to_string()))
        .collect();
    let tensors: BTreeMap<String, Tensor> = good
        .names()
        .into_iter()
        .map(|name| (name.to_string(), good.tensor(name, &device()).unwrap()))
        .collect();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let scale = [nan, inf, 0., -1., 1e-40];
    // The last row of the table is that of `up.weight`; the index counts within the row.
    let cases: [(&str, &str, usize, &[f32]); 5] = [
        ("fp8/quant_scale", "up.weight.quant_scale", 0, &scale),
        (
            "fp8/kept_quant_scale",
            "up.weight.kept",
            0,
            &[nan, inf, -1.],
        ),
        (
            "fp8/amax_history",
            "up.weight.amax_history",
            3,
            &[nan, inf, -inf, -1.],
        ),
        (
            "optimizer/down.weight.exp_avg",
            "down.weight.exp_avg",
            119,
            &[nan, inf, -inf],
        ),
        (
            "optimizer/up.bias.exp_avg_sq",
            "up.bias.exp_avg_sq",
            19,
            &[nan, inf, -1e-9],
        ),
    ];
    for (name, own, at, values) in cases {
        for &bad in values {
            let mut changed = tensors.clone();
            let old = &tensors[name];
            let mut all = flat(old);
            let last = all.len() - 1;
            all[last] = bad;
            changed.insert(name.into(), of(&all, old.dims()));
            write_safetensors_atomic(&path, &changed, Some(&metadata)).unwrap();
            let error =
                resume_training(&path, &model, &vars, &mut optimizer, Some(&recipe)).unwrap_err();
            assert!(
                matches!(
                    &error,
                    Error::Files(FilesError::TensorValue { .. })
                        | Error::Optim(OptimError::StateValue { .. })
                ),
                "{error:?}"
            );
            let (value, at) = (format!("{:e}", f64::from(bad)), format!("index {at}"));
            assert_text(name, error, &[own, &value, &at]);
        }
    }
    write_safetensors_atomic(&path, &tensors, Some(&metadata)).unwrap();
    resume_training(&path, &model, &vars, &mut optimizer, Some(&recipe)).unwrap();
}

#[test]
fn invalid_learning_rates_are_refused() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let w = vb
        .get_with_hints(3, "w", candle_nn::Init::Const(1.))
        .unwrap();
    let grads = || w.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    for (bad, text) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (-1e-3, "-0.001")] {
        let config = AdamWConfig {
            lr: bad,
            ..AdamWConfig::default()
        };
        let error = AdamW::from_varmap(&vars, config.clone()).unwrap_err();
        assert_text("constructor", error, &["lr", text]);
        let error = <AdamW as candle_nn::Optimizer>::new(vars.all_vars(), config).unwrap_err();
        assert_text("candle's constructor", error, &["lr", text]);

        let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
        let error = optimizer.set_lr(bad).unwrap_err();
        assert!(
            matches!(&error, OptimError::InvalidHyperparameter { name: "lr", .. }),
            "{error:?}"
        );
        assert_text("set_lr", error, &["lr", text]);
        assert_eq!(optimizer.lr(), 1e-3, "the old one stays");
        assert!(!optimizer.apply(&grads()).unwrap().skipped().unwrap());

        // candle's interface has no way to refuse a learning rate, so the step does.
        candle_nn::Optimizer::set_learning_rate(&mut optimizer, bad);
        let before = flat(&w);
        let error = optimizer.apply(&grads()).unwrap_err();
        assert_text("the step", error, &["lr", text]);
        assert_eq!(flat(&w), before, "nothing moved");
        optimizer.set_lr(0.1).unwrap();
        assert!(!optimizer.apply(&grads()).unwrap().skipped().unwrap());
        assert!(flat(&w)[0] < before[0] - 0.05);
    }
}
