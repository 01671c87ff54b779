//! Damaged and malicious files: impossible scales, ambiguous headers, sizes that overflow, and paths that are not
//! regular files.

use candle_core::DType;
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{resume_training, training_meta};
use fp8::load::{Checkpoint, var_builder};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::read::{MAX_CONFIG, open_regular, read_bytes, read_text, read_text_if_present};
use fp8::{Error, FilesError, nn};
use fp8_test_support::files::{codes, f32s, raw, write, write_with};
use fp8_test_support::{Mlp, assert_text, device, skipped};
use safetensors::Dtype;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn dir() -> tempfile::TempDir {
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
