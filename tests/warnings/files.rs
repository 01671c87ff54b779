//! Warnings of files: settings without an effect, damaged lines, and layers that other programs do not read.

use crate::said;
use candle_core::{DType, Device, Module};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::LayerFilter;
use fp8::models::{self, GenerationOptions, ModelOptions};
use fp8::nn::{self, Linear};
use fp8::rewrite::Spelling;
use fp8::training::{Metrics, trim_stats};
use fp8::{Autocast, ExportOptions, Fp8Module, fp8_autocast, prepare_fp8, save_calibrated_with};
use fp8_test_support::golden_models::write_model;
use fp8_test_support::{delayed, device, tensor};

#[test]
fn entries_of_a_generation_configuration_without_effect_are_named_once() {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str, entries: &str| {
        let folder = dir.path().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("generation_config.json"), entries).unwrap();
        GenerationOptions::from_dir(&folder).unwrap();
    };
    let texts = || said("no effect here, so texts");
    read(
        "none",
        r#"{"do_sample": false, "min_p": 0.1, "suppress_tokens": []}"#,
    );
    assert_eq!(texts(), 0);
    for _ in 0..2 {
        read(
            "one",
            r#"{"do_sample": true, "min_p": 0.1, "no_repeat_ngram_size": 3}"#,
        );
        assert_eq!(texts(), 1);
    }
    assert_eq!(
        said("generation_config.json: min_p, no_repeat_ngram_size have no effect"),
        1
    );
}

#[test]
fn a_tensor_that_a_model_does_not_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    write_model("llama", dir.path());
    let open = || models::open(dir.path(), &ModelOptions::new()).unwrap();
    let texts = || said("does not read 1 of the tensors in its files (first score.weight)");
    open();
    assert_eq!(texts(), 0);
    let file = dir.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    tensors.insert(
        "score.weight".into(),
        tensor(1, &[2, 32]).to_device(&Device::Cpu).unwrap(),
    );
    candle_core::safetensors::save(&tensors, &file).unwrap();
    open();
    assert_eq!(texts(), 1);
}

/// A last line that a kill has cut short is no damage.
#[test]
fn the_first_unreadable_line_of_a_run_is_named_once() {
    let dir = tempfile::tempdir().unwrap();
    let step = |step| format!("{{\"recipe\":\"run\",\"step\":{step},\"val_loss\":2.5}}\n");
    let (metrics, stats) = (
        dir.path().join("metrics.jsonl"),
        dir.path().join("stats.jsonl"),
    );
    let open = |text: String| {
        for path in [&metrics, &stats] {
            std::fs::write(path, &text).unwrap();
        }
        trim_stats(&stats, |_, step| step < 9).unwrap();
        let kept = Metrics::open(dir.path(), |line| line.step() < 9).unwrap();
        let stats = std::fs::read_to_string(&stats).unwrap();
        assert_eq!(kept.lines().len(), stats.lines().count());
        kept.lines().len()
    };
    let warned = |name: &str| said(&format!("{name}.jsonl, line "));

    assert_eq!(open(step(1) + &step(9) + "{\"recipe\":\"ru"), 1);
    assert_eq!((warned("metrics"), warned("stats")), (0, 0));

    let damaged = step(1) + "{\"recipe\":\"run\",\"st\n" + &step(2) + "\n{}\n" + &step(3);
    assert_eq!(open(damaged), 3);
    for name in ["metrics", "stats"] {
        assert_eq!(warned(name), 1, "{name}");
        let first = dir
            .path()
            .join(format!("{name}.jsonl"))
            .display()
            .to_string();
        assert_eq!(
            said(&format!("{first}, line 2 cannot be read")),
            1,
            "{name}"
        );
        assert_eq!(
            said(&format!(
                "{name}.jsonl, line 2 cannot be read (EOF while parsing"
            )),
            1
        );
    }
    assert_eq!(said("nor can 2 others"), 2);

    // What was dropped is gone.
    Metrics::open(dir.path(), |_| true).unwrap();
    assert_eq!(warned("metrics"), 1);
}

/// vLLM looks for the path of an excluded layer anywhere in the paths of the others.
#[test]
fn exported_layers_that_vllm_does_not_read_are_named() {
    #[derive(Fp8Module)]
    struct Model {
        fc: Linear,
        fc2: Linear,
    }
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let model = Model {
        fc: nn::linear(16, 16, vb.pp("fc")).unwrap(),
        fc2: nn::linear(16, 16, vb.pp("fc2")).unwrap(),
    };
    let filter = LayerFilter::new().with_custom(|path, _, _| path != "fc");
    prepare_fp8(&model, &filter.into()).unwrap();
    let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
    model.fc2.forward(&tensor(3, &[4, 16])).unwrap();
    guard.close().unwrap();
    let text = "vLLM does not read 1 of the exported layers as FP8 in this spelling (first fc2)";
    assert_eq!(said(text), 0);
    for (spelling, unread) in [
        (Spelling::CompressedTensors, vec![]),
        (Spelling::ModelOpt, vec!["fc2"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let options = ExportOptions::new().with_spelling(spelling);
        let report = save_calibrated_with(&model, dir.path(), &options).unwrap();
        assert_eq!(report.quantized, ["fc2"], "{spelling}");
        assert_eq!(report.unread_by_vllm, unread, "{spelling}");
        assert_eq!(said(text), unread.len(), "{spelling}");
    }
}
