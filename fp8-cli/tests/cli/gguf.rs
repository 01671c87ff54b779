//! GGUF files, which every command that runs a language model takes.

use crate::support::{Dir, failure, json_output, output, refusal, write_ids};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use serde_json::json;

/// A Llama of one layer with a vocabulary of a few letters.
fn write_model(dir: &Dir) -> String {
    let texts = |texts: &[&str]| {
        let texts = texts.iter().map(|text| Value::String(text.to_string()));
        Value::Array(texts.collect())
    };
    let kinds = [3, 3, 1, 1, 1, 1, 1, 1].map(Value::I32).to_vec();
    let metadata = [
        ("general.architecture", Value::String("llama".into())),
        ("llama.block_count", Value::U32(1)),
        ("llama.embedding_length", Value::U32(32)),
        ("llama.feed_forward_length", Value::U32(64)),
        ("llama.attention.head_count", Value::U32(4)),
        ("llama.attention.head_count_kv", Value::U32(2)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.context_length", Value::U32(64)),
        ("llama.rope.freq_base", Value::F32(1e4)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        (
            "tokenizer.ggml.tokens",
            texts(&["<s>", "</s>", "a", "b", "ab", "Ġ", "1", "2"]),
        ),
        ("tokenizer.ggml.merges", texts(&["a b"])),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.bos_token_id", Value::U32(0)),
        ("tokenizer.ggml.eos_token_id", Value::U32(1)),
    ];
    let tensors = [
        ("token_embd", &[8, 32][..]),
        ("output_norm", &[32]),
        ("blk.0.attn_norm", &[32]),
        ("blk.0.attn_q", &[32, 32]),
        ("blk.0.attn_k", &[16, 32]),
        ("blk.0.attn_v", &[16, 32]),
        ("blk.0.attn_output", &[32, 32]),
        ("blk.0.ffn_norm", &[32]),
        ("blk.0.ffn_gate", &[64, 32]),
        ("blk.0.ffn_up", &[64, 32]),
        ("blk.0.ffn_down", &[32, 64]),
    ];
    let tensors = tensors.map(|(name, shape)| {
        let count: usize = shape.iter().product();
        let start = name.len() as f32;
        let values: Vec<f32> = (0..count).map(|i| (start + i as f32 * 1.7).sin()).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, GgmlDType::F32).unwrap();
        (format!("{name}.weight"), tensor)
    });
    let path = dir.join("model.gguf");
    let mut file = std::fs::File::create(&path).unwrap();
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    let tensors: Vec<_> = tensors.collect();
    gguf_file::write(&mut file, &metadata, &tensors).unwrap();
    path
}

#[test]
fn a_gguf_file_and_its_conversions_run() {
    let dir = Dir::new();
    let model = write_model(&dir);
    let (text, ids) = (dir.join("text.txt"), dir.join("ids.safetensors"));
    std::fs::write(&text, "ab12ba a b21").unwrap();
    write_ids(&ids, Tensor::new(&[[0u32, 2, 7]], &Device::Cpu).unwrap());
    // Through FP8 and back, the logits are close.
    let (fp8, high) = (dir.join("fp8"), dir.join("high"));
    output(&["quantize", &model, "--out", &fp8]);
    output(&["dequantize", &fp8, "--dtype", "f32", "--out", &high]);

    // For llama.cpp, from FP8 and from the file itself.
    let (file, again) = (dir.join("fp8.gguf"), dir.join("again.gguf"));
    let args = [
        "convert", &fp8, "--to", "gguf", "--type", "f16", "--out", &file, "--json",
    ];
    let report = json_output(&args);
    assert_eq!(
        (&report["architecture"], &report["tensors"]),
        (&json!("llama"), &json!(11))
    );
    output(&[
        "convert", &model, "--to", "gguf", "--type", "f32", "--out", &again,
    ]);
    let line = failure(&["convert", &fp8, "--to", "gguf", "--out", &file]);
    assert!(line.contains("fp8.gguf exists"), "{line}");
    let line = failure(&[
        "convert", &fp8, "--to", "autofp8", "--type", "f16", "--out", &high,
    ]);
    assert!(line.contains("--type is for --to gguf"), "{line}");

    let generate = |model: &str| {
        let args = ["generate", model, "--prompt", "ab", "--max-tokens", "4"];
        json_output(&[&args[..], &["--json"]].concat())
    };
    let report = generate(&model);
    assert_eq!(report["outputs"][0]["prompt_tokens"], json!([4]));
    assert_eq!(generate(&fp8)["outputs"][0]["prompt_tokens"], json!([4]));

    let eval = |model: &str| {
        let report = json_output(&["eval", model, "--data", &text, "--json"]);
        report["perplexity"].as_f64().unwrap()
    };
    assert_eq!(eval(&model), eval(&again));
    assert!((eval(&file) / eval(&fp8) - 1.).abs() < 0.1);
    let (exact, rounded) = (eval(&model), eval(&high));
    assert!((rounded / exact - 1.).abs() < 0.1, "{rounded}, {exact}");

    let logits = |model: &str| {
        let out = dir.join("logits.safetensors");
        output(&["logits", model, "--ids", &ids, "--out", &out]);
        let tensors = candle_core::safetensors::load(&out, &Device::Cpu).unwrap();
        let logits = tensors["logits"].flatten_all().unwrap();
        logits.to_vec1::<f32>().unwrap()
    };
    let (exact, rounded) = (logits(&model), logits(&high));
    assert_eq!([exact.len(), rounded.len()], [3 * 8; 2]);
    let square = |x: f32| f64::from(x) * f64::from(x);
    let signal: f64 = exact.iter().map(|&x| square(x)).sum();
    let noise = exact.iter().zip(&rounded).map(|(a, b)| square(a - b));
    let noise: f64 = noise.sum();
    let db = 10. * (signal / noise).log10();
    assert!((15.0..60.).contains(&db), "{db} dB");

    let args = ["bench", &model, "--prefill", "4", "--decode", "2", "--json"];
    let report = json_output(&args);
    assert_eq!(report["linear_weight_bytes_over_f32"], 1.0);
    // q, o, k, v, gate, up and down in f32.
    let elements = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32;
    assert_eq!(report["linear_weight_bytes"], 4 * elements);
}

/// A GGUF file has no FP8 layers, whether it is read or written.
#[test]
fn flags_of_fp8_are_refused() {
    let dir = Dir::new();
    let model = write_model(&dir);
    let (out, fp8) = (dir.join("out.gguf"), dir.join("fp8"));
    let flags: [&[&str]; 4] = [
        &["--auto", "1"],
        &["--groups", "32"],
        &["--weight-only"],
        &["--allow-unscaled"],
    ];
    let generate = ["generate", &model, "--prompt", "ab", "--max-tokens", "1"];
    let convert = ["convert", &model, "--to", "gguf", "--out", &out];
    for flag in flags {
        let mut commands = vec![[&generate[..], flag].concat()];
        if flag[0] != "--auto" {
            commands.push([&convert[..], flag].concat());
        }
        for args in commands {
            let (code, line) = refusal(&args);
            assert_eq!(code, 2, "{args:?}: {line}");
            let expected = format!("{} is for FP8 layers, and {model} is a GGUF file", flag[0]);
            assert!(line.contains(&expected), "{args:?}: {line}");
        }
    }
    output(&["quantize", &model, "--out", &fp8]);
    let flags: [&[&str]; 5] = [
        &["--shard-bytes", "1000"],
        &["--drop-kv-scales"],
        &["--power-of-two-inputs"],
        &["--weight-only"],
        &["--groups", "32"],
    ];
    for flag in flags {
        let args = ["convert", &fp8, "--to", "gguf", "--out", &out];
        let (code, line) = refusal(&[&args[..], flag].concat());
        assert_eq!(code, 2, "{line}");
        let expected = format!("{} is for FP8 in a directory", flag[0]);
        assert!(line.contains(&expected), "{line}");
    }
    for flag in [
        &["--weight-only"][..],
        &["--groups", "32"],
        &["--drop-kv-scales"],
    ] {
        let args = ["dequantize", &fp8, "--out", &out];
        let (code, line) = refusal(&[&args[..], flag].concat());
        assert_eq!(code, 2, "{line}");
        let expected = format!("{} is for FP8 layers, and the output has none", flag[0]);
        assert!(line.contains(&expected), "{line}");
    }
    assert!(!std::fs::exists(&out).unwrap());
}

#[test]
fn a_malformed_gguf_file_is_named() {
    let dir = Dir::new();
    let path = dir.join("model.gguf");
    std::fs::write(&path, "no model at all").unwrap();
    let (text, out) = (dir.join("text.txt"), dir.join("out"));
    std::fs::write(&text, "ab").unwrap();
    for args in [
        vec!["generate", &path, "--prompt", "a"],
        vec!["eval", &path, "--data", &text],
        vec!["bench", &path],
        vec!["quantize", &path, "--out", &out],
    ] {
        let line = failure(&args);
        assert!(line.contains("model.gguf"), "{args:?}: {line}");
    }
    assert_eq!(dir.names(), ["model.gguf", "text.txt"]);
}

#[test]
fn commands_for_fp8_name_those_that_take_gguf() {
    let dir = Dir::new();
    let (model, out) = (write_model(&dir), dir.join("out"));
    for args in [
        vec!["inspect", &model],
        vec!["dequantize", &model, "--out", &out],
        vec!["convert", &model, "--to", "autofp8", "--out", &out],
    ] {
        let line = failure(&args);
        assert!(
            line.contains("GGUF") && line.contains("`fp8 quantize`"),
            "{args:?}: {line}"
        );
    }
}
