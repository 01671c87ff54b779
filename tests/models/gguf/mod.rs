//! GGUF files: a small one made here, broken ones, and a real one.

mod metadata;
mod refused;
mod unwritten;
mod written;

use crate::real::real_model;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result as CandleResult, Tensor};
use fp8::models::gguf::{self, GgufFile, GgufSource};
use fp8::models::{GenerationOptions, Tokenizer};
use fp8::rewrite::{self, WriteOptions};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

type Outcome = std::result::Result<(), Box<dyn std::error::Error>>;
const HIDDEN: usize = 32;
const HEADS: usize = 4;

/// The content of a file, which a test can change before it is written.
struct Content {
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, QTensor>,
}

fn texts(texts: &[&str]) -> Value {
    Value::Array(
        texts
            .iter()
            .map(|text| Value::String((*text).to_string()))
            .collect(),
    )
}

/// A model with one layer, whose vocabulary is a few letters.
fn small(architecture: &str) -> CandleResult<Content> {
    let mut metadata = BTreeMap::new();
    let mut set = |key: &str, value| metadata.insert(key.to_string(), value);
    let key = |name: &str| format!("{architecture}.{name}");
    set(
        "general.architecture",
        Value::String(architecture.to_string()),
    );
    for (name, value) in [
        ("block_count", 1),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", 64),
        ("attention.head_count", HEADS as u32),
        ("attention.head_count_kv", 2),
        ("context_length", 128),
    ] {
        set(&key(name), Value::U32(value));
    }
    set(&key("attention.layer_norm_rms_epsilon"), Value::F32(1e-5));
    set(&key("rope.freq_base"), Value::F32(1e4));
    let tokens = ["<s>", "</s>", "a", "b", "ab", "Ġ", "1", "2"];
    set("tokenizer.ggml.model", Value::String("gpt2".to_string()));
    set("tokenizer.ggml.pre", Value::String("smollm".to_string()));
    set("tokenizer.ggml.tokens", texts(&tokens));
    set("tokenizer.ggml.merges", texts(&["a b"]));
    let kinds = [3, 3, 1, 1, 1, 1, 1, 1].map(Value::I32).to_vec();
    set("tokenizer.ggml.token_type", Value::Array(kinds));
    set("tokenizer.ggml.bos_token_id", Value::U32(0));
    set("tokenizer.ggml.eos_token_id", Value::U32(1));

    let mut tensors = BTreeMap::new();
    let mut add = |name: &str, shape: &[usize], dtype| -> CandleResult<()> {
        let seed = name.bytes().map(f32::from).sum::<f32>();
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?;
        tensors.insert(name.to_string(), QTensor::quantize(&tensor, dtype)?);
        Ok(())
    };
    add("token_embd.weight", &[8, HIDDEN], GgmlDType::Q8_0)?;
    add("output_norm.weight", &[HIDDEN], GgmlDType::F32)?;
    for (part, shape) in [
        ("attn_norm", &[HIDDEN][..]),
        ("attn_q", &[HIDDEN, HIDDEN]),
        ("attn_k", &[16, HIDDEN]),
        ("attn_v", &[16, HIDDEN]),
        ("attn_output", &[HIDDEN, HIDDEN]),
        ("ffn_norm", &[HIDDEN]),
        ("ffn_gate", &[64, HIDDEN]),
        ("ffn_up", &[64, HIDDEN]),
        ("ffn_down", &[HIDDEN, 64]),
    ] {
        add(&format!("blk.0.{part}.weight"), shape, GgmlDType::F32)?;
    }
    Ok(Content { metadata, tensors })
}

fn write(content: &Content, dir: &Path) -> CandleResult<PathBuf> {
    let path = dir.join("m.gguf");
    let mut file = File::create(&path)?;
    let metadata: Vec<_> = content
        .metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v))
        .collect();
    let tensors: Vec<_> = content
        .tensors
        .iter()
        .map(|(k, v)| (k.as_str(), v))
        .collect();
    gguf_file::write(&mut file, &metadata, &tensors)?;
    Ok(path)
}

/// A model directory made from a GGUF file.
fn convert(path: &Path, out: &Path, dtype: DType) -> Outcome {
    let source = GgufSource::new(GgufFile::open(path)?)?;
    rewrite::dequantize(
        &source,
        out,
        dtype,
        &WriteOptions::new(),
        &mut rewrite::quiet,
    )?;
    Ok(())
}

#[test]
fn a_directory_has_what_the_file_has() -> Outcome {
    for (architecture, permuted) in [("llama", true), ("qwen2", false)] {
        let dir = tempfile::tempdir()?;
        let content = small(architecture)?;
        let path = write(&content, dir.path())?;
        // The ending of a directory's name has no meaning.
        let out = dir.path().join("out.gguf");
        convert(&path, &out, DType::F32)?;
        assert!(gguf::is_gguf(&path) && !gguf::is_gguf(&out));

        let tensors = candle_core::safetensors::load(out.join("model.safetensors"), &Device::Cpu)?;
        assert_eq!(tensors.len(), content.tensors.len());
        let vb = GgufFile::open(&path)?.var_builder(DType::F32, &Device::Cpu);
        for (name, tensor) in &tensors {
            let direct = vb.get(tensor.dims(), name)?;
            assert_eq!(
                direct.flatten_all()?.to_vec1::<f32>()?,
                tensor.flatten_all()?.to_vec1::<f32>()?
            );
        }
        // Rows of queries, by hand.
        let stored = content.tensors["blk.0.attn_q.weight"].dequantize(&Device::Cpu)?;
        let stored = stored.to_vec2::<f32>()?;
        let q = tensors["model.layers.0.self_attn.q_proj.weight"].to_vec2::<f32>()?;
        let head_dim = HIDDEN / HEADS;
        for (row, values) in q.iter().enumerate() {
            let (head, inner) = (row / head_dim, row % head_dim);
            let (half, i) = (inner / (head_dim / 2), inner % (head_dim / 2));
            let from = match permuted {
                true => head * head_dim + 2 * i + half,
                false => row,
            };
            assert_eq!(*values, stored[from], "{architecture}, row {row}");
        }

        let config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(out.join("config.json"))?)?;
        assert_eq!(config["model_type"], architecture);
        assert_eq!(config["rms_norm_eps"], 1e-5);
        assert_eq!(config["head_dim"], 8);
        assert_eq!(config["vocab_size"], 8);
        assert_eq!(config["tie_word_embeddings"], true);

        let tokenizer = Tokenizer::open(&out)?;
        assert_eq!(tokenizer.encode("ab a12</s>", true)?, [4, 5, 2, 6, 7, 1]);
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(0), &[1][..]));
        assert_eq!(GenerationOptions::from_dir(&out)?.stop_tokens, [1]);

        // Existing files are never overwritten.
        let again = convert(&path, &out, DType::F32).expect_err("not empty");
        assert!(again.to_string().contains("out.gguf"), "{again}");
    }
    Ok(())
}

#[test]
fn the_table_of_llama_3_becomes_its_settings() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut content = small("llama")?;
    content
        .metadata
        .insert("llama.rope.freq_base".to_string(), Value::F32(5e5));
    // Heads of 8 elements, base 500000: wavelengths 6.3, 167, 4443 and 118 thousand. 8192 / 4443 lies between 1 and 4.
    let middle = 8192.0 / (5e5f64.powf(0.5) * std::f64::consts::TAU);
    let smooth = (middle - 1.0) / 3.0;
    let factor = 1.0 / ((1.0 - smooth) / 8.0 + smooth);
    let table = Tensor::new(&[1f32, 1.0, factor as f32, 8.0], &Device::Cpu)?;
    let mut add = |table: &Tensor| -> CandleResult<PathBuf> {
        let table = QTensor::quantize(table, GgmlDType::F32)?;
        content
            .tensors
            .insert("rope_freqs.weight".to_string(), table);
        write(&content, dir.path())
    };
    let config = GgufFile::open(add(&table)?)?.config()?;
    assert_eq!(config["rope_scaling"]["rope_type"], "llama3");
    assert_eq!(config["rope_scaling"]["factor"], 8.0);
    let other = GgufFile::open(add(&(table * 1.5)?)?)?
        .config()
        .expect_err("another table");
    assert!(other.to_string().contains("rope_freqs"), "{other}");
    Ok(())
}

/// A real file. `tools/check_gguf.py` compares it with transformers.
#[test]
fn smollm2_is_read() -> Outcome {
    let Some(path) = real_model("smollm2", "gguf") else {
        return Ok(());
    };
    let file = GgufFile::open(&path)?;
    let config = file.config()?;
    assert_eq!(config["num_hidden_layers"], 30);
    assert_eq!(config["rope_theta"], 100000.0);
    assert_eq!(file.names().count(), 272);
    let dir = tempfile::tempdir()?;
    let out = dir.path().join("smollm2");
    convert(&path, &out, DType::BF16)?;
    let tokenizer = Tokenizer::open(&out)?;
    let ids = tokenizer.encode(
        "In the beginning God created the heaven, 1611.<|im_end|>",
        false,
    )?;
    assert_eq!(
        tokenizer.decode(&ids, true)?,
        "In the beginning God created the heaven, 1611."
    );
    assert_eq!(ids.last(), Some(&2));
    let chat = tokenizer.chat(&[fp8::models::ChatMessage::new("user", "Hi")])?;
    assert!(
        chat.ends_with("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        "{chat}"
    );
    Ok(())
}
