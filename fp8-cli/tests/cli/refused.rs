//! Errors that all commands report alike.

use crate::support::{Dir, copy, edit, failure, golden, output, refusal, speaking, write_ids};
use candle_core::{Device, Tensor};
use fp8_test_support::skipped;
use serde_json::json;

/// Each command that takes a model, with all its other arguments. They write to `out`.
fn commands<'a>(model: &'a str, data: &'a str, ids: &'a str, out: &'a str) -> Vec<Vec<&'a str>> {
    vec![
        vec!["inspect", model],
        vec!["quantize", model, "--out", out],
        vec!["convert", model, "--to", "autofp8", "--out", out],
        vec!["dequantize", model, "--out", out],
        vec!["diff", model, model],
        vec!["generate", model, "--prompt", "w3"],
        vec!["eval", model, "--data", data],
        vec!["embed", model, "w3"],
        vec!["logits", model, "--ids", ids, "--out", out],
        vec!["bench", model, "--prefill", "1", "--decode", "1"],
    ]
}

/// A text and ids that any command takes.
fn inputs(dir: &Dir) -> (String, String) {
    let (data, ids) = (dir.join("text.txt"), dir.join("ids.safetensors"));
    std::fs::write(&data, "w3 w4 w5").unwrap();
    write_ids(&ids, Tensor::new(&[[3u32, 4]], &Device::Cpu).unwrap());
    (data, ids)
}

#[test]
fn every_command_names_an_unsupported_format() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    edit(&format!("{model}/config.json"), |config| {
        let quantization = &mut config["quantization_config"];
        quantization["format"] = json!("mxfp6-pack-quantized");
        let group = &mut quantization["config_groups"]["group_0"];
        group["weights"]["num_bits"] = json!(6);
    });
    let (data, ids) = inputs(&dir);
    let out = dir.join("out");
    for args in commands(&model, &data, &ids, &out) {
        let line = failure(&args).to_lowercase();
        assert!(line.contains("mxfp6"), "{args:?}: {line}");
    }
    assert_eq!(dir.names(), ["ids.safetensors", "model", "text.txt"]);
}

/// Before anything is written.
#[test]
fn a_device_that_is_not_there_is_named() {
    if candle_core::utils::cuda_is_available() && Device::new_cuda(0).is_ok() {
        skipped("there is a CUDA device");
        return;
    }
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let (data, ids) = inputs(&dir);
    let (out, run) = (dir.join("out"), dir.join("run"));
    let mut with_device = commands(&model, &data, &ids, &out);
    with_device.retain(|args| ["generate", "eval", "embed", "logits", "bench"].contains(&args[0]));
    assert_eq!(with_device.len(), 5);
    with_device.push(vec!["train", &model, "--data", &data, "--out", &run]);
    for mut args in with_device {
        args.extend(["--device", "cuda"]);
        let line = failure(&args);
        let expected = "--device cuda takes an NVIDIA GPU and a build with `--features cuda`";
        assert!(line.contains(expected), "{args:?}: {line}");
    }
    assert_eq!(dir.names(), ["ids.safetensors", "model", "text.txt"]);
}

#[test]
fn every_command_names_a_missing_model() {
    let dir = Dir::new();
    let (data, ids) = inputs(&dir);
    let out = dir.join("out");
    for args in commands("/no/such/model", &data, &ids, &out) {
        let line = failure(&args);
        assert!(line.contains("/no/such/model"), "{args:?}: {line}");
    }
    // A file that is not a model.
    for args in commands(&data, &data, &ids, &out) {
        let line = failure(&args);
        assert!(line.contains("text.txt"), "{args:?}: {line}");
        assert!(!line.contains("text.txt/"), "{args:?}: {line}");
    }
    assert_eq!(dir.names(), ["ids.safetensors", "text.txt"]);
}

#[test]
fn text_needs_a_tokenizer() {
    let dir = Dir::new();
    let model = copy("ct_static_tensor", &dir.join("model"));
    let (data, _) = inputs(&dir);
    let out = dir.join("out");
    let calibrated = [
        "--scheme",
        "static-tensor",
        "--calibrate",
        &data,
        "--out",
        &out,
    ];
    for args in [
        vec!["generate", &model, "--prompt", "w3"],
        vec!["eval", &model, "--data", &data],
        [&["quantize", &model][..], &calibrated].concat(),
    ] {
        let line = failure(&args);
        assert!(line.contains("model/tokenizer.json"), "{args:?}: {line}");
    }
    // An empty text calibrates nothing.
    let model = speaking("ct_static_tensor", &dir.join("speaking"));
    std::fs::write(&data, "").unwrap();
    let line = failure(&[&["quantize", &model][..], &calibrated].concat());
    assert!(
        line.contains("text.txt: no token to run the model on"),
        "{line}"
    );
    std::fs::write(&data, "w3 w4").unwrap();
    let none = [&["quantize", &model][..], &calibrated, &["--samples", "0"]].concat();
    let line = failure(&none);
    assert!(line.contains("--samples is 0"), "{line}");
}

#[test]
fn an_existing_directory_is_replaced_only_with_overwrite() {
    let dir = Dir::new();
    let (model, out) = (golden("ct_static_tensor"), dir.join("out"));
    let writing = [
        vec!["quantize", &model, "--out", &out],
        vec!["convert", &model, "--to", "autofp8", "--out", &out],
        vec!["dequantize", &model, "--out", &out],
    ];
    // An empty directory counts as missing.
    std::fs::create_dir(&out).unwrap();
    for args in &writing {
        output(args);
        let config = std::fs::read_to_string(format!("{out}/config.json")).unwrap();
        let line = failure(args);
        assert!(
            line.contains(&out) && line.contains("--overwrite"),
            "{args:?}: {line}"
        );
        let unchanged = std::fs::read_to_string(format!("{out}/config.json")).unwrap();
        assert_eq!(config, unchanged);
        std::fs::write(format!("{out}/old.txt"), "old").unwrap();
        output(&[args.as_slice(), &["--overwrite"]].concat());
        assert!(!std::fs::exists(format!("{out}/old.txt")).unwrap());
        std::fs::remove_dir_all(&out).unwrap();
    }
    std::fs::write(&out, "mine").unwrap();
    for args in &writing {
        let line = failure(&[args.as_slice(), &["--overwrite"]].concat());
        assert!(line.contains("not a directory"), "{args:?}: {line}");
    }
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "mine");
    assert_eq!(dir.names(), ["out"]);
}

#[test]
fn flags_without_effect_are_refused() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let (data, _) = inputs(&dir);
    let out = dir.join("out");
    let cases: [(&[&str], &str); 6] = [
        (
            &["quantize", &model, "--out", &out, "--calibrate", &data],
            "--calibrate is for static inputs, and --scheme is channel-token",
        ),
        (
            &["quantize", &model, "--out", &out, "--amaxes", &data],
            "--amaxes is for static inputs, and --scheme is channel-token",
        ),
        (
            &["quantize", &model, "--out", &out, "--samples", "2"],
            "--samples needs --calibrate or --search",
        ),
        (
            &[
                "convert",
                &model,
                "--to",
                "gguf",
                "--out",
                &out,
                "--power-of-two-inputs",
            ],
            "--power-of-two-inputs is for FP8",
        ),
        (&["bench", &model, "--layers", "--decode", "2"], "--decode"),
        (
            &["eval", &model, "--data", &data, "--batch", "2"],
            "--batch is for encoders",
        ),
    ];
    for (args, part) in cases {
        let (code, line) = refusal(args);
        assert_eq!(code, 2, "{args:?}: {line}");
        assert!(line.contains(part), "{args:?}: {line}");
    }
    assert!(!std::fs::exists(&out).unwrap());
}

#[test]
fn invalid_arguments_exit_with_code_2_and_a_suggestion() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let out = dir.join("out");
    let quantize = ["quantize", &model, "--out", &out];
    let cases: [(&[&str], &str); 16] = [
        (&[], "a command is missing"),
        (
            &["convert", &model, "--out", &out, "--to", "model-opt"],
            "or modelopt, or gguf; did you mean modelopt?",
        ),
        (&["quantise"], "did you mean quantize?"),
        (
            &["quantize", &model, "--overwrit"],
            "did you mean --overwrite?",
        ),
        (&["--scheme", "chanel-token"], "did you mean channel-token?"),
        (&["--scheme", "weight-only:rowise"], "did you mean rowwise?"),
        (&["--scheme", "static-tensor"], "--calibrate TEXT"),
        (&["--to", "model-opt"], "did you mean modelopt?"),
        (
            &["dequantize", &model, "--dtype", "bf61"],
            "did you mean bf16?",
        ),
        (&["generate", &model], "--prompt"),
        (
            &["generate", &model, "--prompt", "a", "--temperature", "-1"],
            "--temperature is -1: expected",
        ),
        (
            &["generate", &model, "--prompt", "a", "--top-p", "-0.5"],
            "--top-p is -0.5: expected",
        ),
        (
            &["generate", &model, "--prompt", "a", "--max-tokens", "-1"],
            "--max-tokens is -1",
        ),
        (
            &["bench", &model, "--decode", "0"],
            "--decode is 0: expected",
        ),
        (
            &["eval", &model, "--data", "text", "--window", "1"],
            "--window is 1: expected",
        ),
        (
            &["inspect", &model, "--groups", "0"],
            "--groups is 0: expected",
        ),
    ];
    for (args, part) in cases {
        let whole = match args.first() {
            Some(first) if first.starts_with("--") => [&quantize, args].concat(),
            _ => args.to_vec(),
        };
        let (code, line) = refusal(&whole);
        assert_eq!(code, 2, "{args:?}: {line}");
        assert!(line.contains(part), "{args:?}: {line}");
    }
    let (code, _) = refusal(&["inspect", "/no/such/model"]);
    assert_eq!(code, 1);
    let help = output(&["quantize", "--help"]);
    for granularity in ["tensorwise", "rowwise", "blockwise:ROWSxCOLS", "mx"] {
        assert!(help.contains(granularity), "{help}");
    }
}

#[cfg(unix)]
#[test]
fn texts_are_regular_files() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let out = dir.join("out");
    let fifo = dir.join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let calibrate = ["--scheme", "static-tensor", "--out", &out, "--calibrate"];
    for (path, kind) in [("/dev/zero", "device"), (&*fifo, "named pipe")] {
        for args in [
            vec!["eval", &model, "--data", path],
            vec!["embed", &model, "--data", path],
            [&["quantize", &model], &calibrate[..], &[path]].concat(),
        ] {
            let line = failure(&args);
            assert!(
                line.contains(path) && line.contains(kind),
                "{args:?}: {line}"
            );
        }
    }
}
