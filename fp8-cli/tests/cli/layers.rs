//! `fp8 bench --layers`, and `--auto`. No test depends on what is faster.

use crate::support::{Dir, failure, fp8, golden, json_output, output, text};
use serde_json::Value;

/// Short measurements.
const QUICK: [&str; 3] = ["--layers", "--budget", "1"];

fn rows(args: &[&str]) -> Vec<Value> {
    let report = json_output(&[&["bench", "--json"][..], &QUICK, args].concat());
    report.as_array().unwrap().clone()
}

#[test]
fn shapes_are_timed_and_the_times_kept() {
    let dir = Dir::new();
    let file = dir.join("times.json");
    let args = [
        "--shapes",
        "16x8,32x64",
        "--tokens",
        "1,3",
        "--times",
        &file,
    ];
    let first = rows(&args);
    let named: Vec<_> = first
        .iter()
        .map(|row| ["out_features", "in_features", "tokens"].map(|key| row[key].as_u64().unwrap()))
        .collect();
    assert_eq!(named, [[16, 8, 1], [16, 8, 3], [32, 64, 1], [32, 64, 3]]);
    for row in &first {
        assert_eq!(row["computation"], "training under delayed");
        assert_eq!(row["dtype"], "f32");
        let number = |key: &str| row[key].as_f64().unwrap();
        let ratio = number("high_precision_ms") / number("fp8_ms");
        assert!((number("ratio") / ratio - 1.).abs() < 1e-6, "{row}");
        let faster = row["choice"] == "fp8";
        assert!(faster || row["choice"] == "high precision", "{row}");
        assert!(!faster || ratio >= 1.03, "{row}");
    }
    assert_eq!(rows(&args), first, "found in the file");
    assert_eq!(dir.names(), ["times.json", "times.json.lock"]);

    let text = output(&[&["bench"][..], &QUICK, &args].concat());
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5);
    assert!(
        lines[0].ends_with("choice") && lines[0].contains("f32 ms"),
        "{text}"
    );
    let ms = first[0]["fp8_ms"].as_f64().unwrap();
    assert!(lines[1].contains(&format!("{ms:.3}")), "{text}");

    let args = [
        "--shapes",
        "16x8",
        "--tokens",
        "2",
        "--dtype",
        "bf16",
        "--evaluation",
    ];
    let args = [&args[..], &["--recipe", "rowwise", "--fresh"]].concat();
    let row = &rows(&args)[0];
    assert_eq!(row["computation"], "evaluation under rowwise");
    assert_eq!(row["dtype"], "bf16");
}

#[test]
fn layers_of_a_model_are_timed_as_they_compute() {
    let model = golden("ct_static_tensor");
    let served = rows(&[&model, "--tokens", "2", "--fresh"]);
    // q and o; k and v; gate and up; down, in two layers.
    let counts: Vec<_> = served
        .iter()
        .map(|row| row["layers"].as_u64().unwrap())
        .collect();
    assert_eq!(counts, [4, 4, 4, 2]);
    for row in &served {
        let computation = row["computation"].as_str().unwrap();
        assert_eq!(
            computation,
            "served: tensorwise weights with static input scales"
        );
    }
    let dir = Dir::new();
    let high = dir.join("high");
    output(&["dequantize", &model, "--out", &high]);
    let trained = rows(&[&high, "--tokens", "2", "--fresh"]);
    assert_eq!(trained.len(), 5, "the head too: {trained:?}");
    assert_eq!(trained[0]["computation"], "training under delayed");
    // Shapes come after the layers, and are not those of the file.
    let both = rows(&[&model, "--shapes", "16x8", "--tokens", "2", "--fresh"]);
    assert_eq!(both.len(), 5, "{both:?}");
    assert_eq!(both[4]["computation"], "training under delayed");
    assert_eq!(both[4]["out_features"], 16);
}

/// A model in which layers were decoded computes nearly the same.
#[test]
fn layers_that_are_slower_in_fp8_are_decoded() {
    let model = golden("ct_static_tensor");
    let text = {
        let args = [
            "bench",
            &model,
            "--prefill",
            "2",
            "--decode",
            "1",
            "--repeats",
            "1",
        ];
        let done = fp8(&[&args[..], &["--auto", "3", "--json"]].concat());
        assert!(done.status.success(), "{}", text(&done.stderr));
        let report: Value = serde_json::from_slice(&done.stdout).unwrap();
        let share = report["linear_weight_bytes_over_f32"].as_f64().unwrap();
        let line = text(&done.stderr);
        let decoded: u32 = line.split(' ').next().unwrap().parse().unwrap();
        // As many bytes as f32 if all are decoded.
        assert_eq!(decoded == 14, share == 1., "{line}: {share}");
        assert_eq!(decoded == 0, share < 0.26, "{line}: {share}");
        line
    };
    let end = "of 14 FP8 layers are decoded to f32: they are no faster in FP8 with 3 tokens\n";
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn wrong_arguments_are_named() {
    let model = golden("ct_static_tensor");
    let cases: [(&[&str], &str); 12] = [
        (&["--layers"], "MODEL"),
        (
            &["--layers", "--shapes", "4x4", "--auto", "1"],
            "--auto is for the layers of a model",
        ),
        (
            &["--layers", "--shapes", "4x4", "--adapter", "a"],
            "--adapter is for the layers of a model",
        ),
        (
            &["--layers", "--shapes", "4x4", "--groups", "32"],
            "--groups is for the layers of a model",
        ),
        (
            &["--layers", "--shapes", "4x4", "--weight-only"],
            "--weight-only is for the layers of a model",
        ),
        (
            &["--layers", "--shapes", "16"],
            "expected outputs and inputs, as in 4096x1024",
        ),
        (&["--layers", "--shapes", "0x4"], "--shapes is 0x4"),
        (
            &["--layers", "--shapes", "4x4", "--tokens", "0"],
            "--tokens is 0",
        ),
        (
            &["--layers", "--shapes", "4x4", "--recipe", "fast"],
            "unknown recipe `fast`",
        ),
        (
            &["--layers", "--shapes", "4x4", "--fresh", "--times", "t"],
            "--times",
        ),
        (&["--shapes", "4x4"], "--layers"),
        (&[&model, "--auto", "0"], "--auto is 0"),
    ];
    for (args, part) in cases {
        let line = failure(&[&["bench"][..], args].concat());
        assert!(line.contains(part), "{args:?}: {line}");
    }
}
