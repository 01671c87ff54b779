//! Folders without a fault: no finding.

use crate::families::{all, modelopt};
use crate::support::{Model, golden, layers};
use fp8_files::audit::{AuditOptions, Codes, Fault, Report, audit_dir};
use fp8_files::load::Checkpoint;
use fp8_files::rewrite::{self, QuantizeOptions, Scheme, Spelling, WriteOptions};
use serde_json::{Value, json};
use std::path::Path;

#[track_caller]
fn assert_clean(dir: &Path) -> Report {
    for codes in [Codes::None, Codes::Samples, Codes::All] {
        let report = audit_dir(dir, &AuditOptions::default().with_codes(codes));
        let found: Vec<String> = report
            .findings
            .iter()
            .map(|f| {
                format!(
                    "{} `{}`: {}; expected {}",
                    f.fault, f.subject, f.found, f.expected
                )
            })
            .collect();
        assert!(
            found.is_empty(),
            "{} ({codes:?}):\n{}",
            dir.display(),
            found.join("\n")
        );
    }
    audit_dir(dir, &AuditOptions::default())
}

/// Checks that there are findings of this kind and no others.
#[track_caller]
fn assert_only(dir: &Path, fault: Fault) -> Report {
    let report = audit_dir(dir, &AuditOptions::default());
    let kinds: Vec<Fault> = report.groups().into_keys().collect();
    assert_eq!(kinds, [fault], "{}", dir.display());
    report
}

#[test]
fn models_before_a_fault() {
    for (name, model) in all() {
        for sharded in [false, true] {
            let mut model = model();
            model.sharded = sharded;
            let dir = model.write();
            let report = assert_clean(dir.path());
            assert_eq!(report.layers > 0, name != "plain", "{name}");
        }
    }
}

/// A mixture of ModelOpt, whose layers are listed in one of its files or in both.
#[test]
fn lists_of_a_mixture_in_either_file() {
    let entry = json!({ "quant_algo": "FP8" });
    let listed = layers().into_iter().map(|(path, ..)| (path, entry.clone()));
    let listed = Value::Object(listed.collect());
    for both in [false, true] {
        let mut model = modelopt();
        model.quantization()["quant_algo"] = json!("MIXED_PRECISION");
        if both {
            model.quantization()["quantized_layers"] = listed.clone();
        }
        let second = json!({ "producer": { "name": "modelopt" }, "quantization": {
            "quant_algo": "mixed_precision", "quantized_layers": listed, "exclude_modules": ["lm_head"] } });
        model.then(move |dir| {
            std::fs::write(dir.join("hf_quant_config.json"), second.to_string()).unwrap();
        });
        let dir = model.write();
        assert_eq!(assert_clean(dir.path()).layers, layers().len());
    }
}

#[test]
fn folders_of_other_libraries() {
    let mut count = 0;
    for kind in ["families", "checkpoints"] {
        for entry in std::fs::read_dir(golden(kind)).unwrap() {
            let dir = entry.unwrap().path();
            if dir.is_dir() {
                assert_clean(&dir);
                count += 1;
            }
        }
    }
    assert!(count >= 16, "{count}");
}

#[test]
fn folders_of_our_own_in_every_scheme_and_spelling() {
    let plain = Model::plain().write();
    let source = Checkpoint::open_dir(plain.path()).unwrap();
    let schemes = [
        "static-tensor",
        "dynamic-tensor",
        "tensor-token",
        "channel-token",
        "block128",
        "mxfp8",
    ];
    let weight_only = [
        "weight-only",
        "weight-only:tensorwise",
        "weight-only:blockwise:128x128",
        "weight-only:mx",
    ];
    let amaxes = layers()
        .into_iter()
        .map(|(path, ..)| (path, 5.))
        .chain([("lm_head".to_string(), 5.)]);
    let amaxes: std::collections::BTreeMap<String, f32> = amaxes.collect();
    let mut written = 0;
    for name in schemes.iter().chain(&weight_only) {
        let scheme: Scheme = name.parse().unwrap();
        for spelling in Spelling::ALL {
            for (shard_bytes, head) in [(1 << 30, false), (100_000, false), (1 << 30, true)] {
                let dir = tempfile::tempdir().unwrap();
                let out = dir.path().join("out");
                let options = QuantizeOptions::new(scheme)
                    .with_spelling(spelling)
                    .with_head(head)
                    .with_input_amaxes(amaxes.clone())
                    .with_write(WriteOptions::new().with_shard_bytes(shard_bytes));
                // Not every spelling can hold every scheme.
                if rewrite::quantize(&source, &out, &options, &mut rewrite::quiet).is_ok() {
                    let report = match head && spelling == Spelling::Fp8Blocks {
                        // vLLM reads this head in high precision.
                        true => assert_only(&out, Fault::HeadQuantized),
                        false => assert_clean(&out),
                    };
                    assert_eq!(
                        report.layers,
                        layers().len() + usize::from(head),
                        "{name} {spelling}"
                    );
                    written += 1;
                }
            }
        }
    }
    assert!(written >= 30, "{written}");
}

#[test]
fn golden_folders_in_high_precision_again_and_converted() {
    for name in [
        "ct_static_tensor",
        "modelopt_fp8_kv",
        "mixtral_hf5",
        "qwen3_moe_hf5",
    ] {
        let source = Checkpoint::open_dir(golden("families").join(name)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("plain");
        let write = WriteOptions::new();
        rewrite::dequantize(
            &source,
            &out,
            candle_core::DType::BF16,
            &write,
            &mut rewrite::quiet,
        )
        .unwrap();
        assert_eq!(assert_clean(&out).layers, 0);
        for spelling in Spelling::ALL {
            let out = dir.path().join(spelling.to_string());
            let write = write
                .clone()
                .with_drop_kv_scales(spelling == Spelling::AutoFp8);
            if rewrite::convert(&source, &out, spelling, &write, &mut rewrite::quiet).is_ok() {
                assert!(assert_clean(&out).layers > 0);
            }
        }
    }
}
