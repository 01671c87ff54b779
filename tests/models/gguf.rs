//! GGUF files: a small one made here, broken ones, and a real one.

use crate::real::real_model;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result as CandleResult, Tensor};
use fp8::models::gguf::{self, GgufError, GgufFile};
use fp8::models::{GenerationOptions, Tokenizer};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

type Outcome = std::result::Result<(), Box<dyn std::error::Error>>;

const HIDDEN: usize = 32;
const HEADS: usize = 4;

/// What a file holds, to be changed before it is written.
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

#[test]
fn a_directory_has_what_the_file_has() -> Outcome {
    for (architecture, permuted) in [("llama", true), ("qwen2", false)] {
        let dir = tempfile::tempdir()?;
        let content = small(architecture)?;
        let path = write(&content, dir.path())?;
        let out = dir.path().join("out");
        gguf::convert(&path, &out, DType::F32)?;

        let tensors = candle_core::safetensors::load(out.join("model.safetensors"), &Device::Cpu)?;
        assert_eq!(tensors.len(), content.tensors.len());
        let vb = gguf::var_builder(&path, DType::F32, &Device::Cpu)?;
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

        // Never over files that are there.
        let again = gguf::convert(&path, &out, DType::F32).expect_err("not empty");
        assert!(matches!(again, GgufError::NotEmpty { .. }), "{again}");
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

type Change = fn(&mut Content) -> CandleResult<()>;

#[test]
fn what_is_not_known_is_refused_by_name() -> Outcome {
    fn set(content: &mut Content, key: &str, value: Value) {
        content.metadata.insert(key.to_string(), value);
    }
    fn tensor(content: &mut Content, name: &str, shape: &[usize]) -> CandleResult<()> {
        let tensor = Tensor::zeros(shape, DType::F32, &Device::Cpu)?;
        let tensor = QTensor::quantize(&tensor, GgmlDType::F32)?;
        content.tensors.insert(name.to_string(), tensor);
        Ok(())
    }
    let cases: [(&str, Change); 18] = [
        ("`gpt-j`", |c| {
            set(
                c,
                "general.architecture",
                Value::String("gpt-j".to_string()),
            );
            Ok(())
        }),
        ("`unknown`", |c| {
            c.metadata.remove("general.architecture");
            Ok(())
        }),
        ("llama.block_count", |c| {
            c.metadata.remove("llama.block_count");
            Ok(())
        }),
        ("llama.block_count", |c| {
            set(c, "llama.block_count", Value::I32(-1));
            Ok(())
        }),
        ("head_count_kv", |c| {
            set(c, "llama.attention.head_count_kv", Value::U32(3));
            Ok(())
        }),
        ("turned by their position", |c| {
            set(c, "llama.rope.dimension_count", Value::U32(4));
            Ok(())
        }),
        ("8 experts", |c| {
            set(c, "llama.expert_count", Value::U32(8));
            Ok(())
        }),
        ("layer_norm_rms_epsilon", |c| {
            set(
                c,
                "llama.attention.layer_norm_rms_epsilon",
                Value::F32(f32::NAN),
            );
            Ok(())
        }),
        ("`longrope`", |c| {
            set(
                c,
                "llama.rope.scaling.type",
                Value::String("longrope".to_string()),
            );
            set(c, "llama.rope.scaling.factor", Value::F32(2.0));
            Ok(())
        }),
        ("blk.0.attn_v.weight", |c| {
            c.tensors.remove("blk.0.attn_v.weight");
            Ok(())
        }),
        ("[16, 32]", |c| tensor(c, "blk.0.attn_k.weight", &[8, 32])),
        ("blk.1.attn_norm.weight", |c| {
            tensor(c, "blk.1.attn_norm.weight", &[32])
        }),
        ("blk.0.ffn_gate_inp.weight", |c| {
            tensor(c, "blk.0.ffn_gate_inp.weight", &[8, 32])
        }),
        ("gpt2 (byte-level BPE)", |c| {
            set(
                c,
                "tokenizer.ggml.model",
                Value::String("llama".to_string()),
            );
            Ok(())
        }),
        ("`jais`", |c| {
            set(c, "tokenizer.ggml.pre", Value::String("jais".to_string()));
            Ok(())
        }),
        ("merge `b b`", |c| {
            set(c, "tokenizer.ggml.merges", texts(&["a b", "b b"]));
            Ok(())
        }),
        ("tokens 2 and 3", |c| {
            set(
                c,
                "tokenizer.ggml.tokens",
                texts(&["<s>", "</s>", "a", "a"]),
            );
            Ok(())
        }),
        ("eos_token_id", |c| {
            set(c, "tokenizer.ggml.eos_token_id", Value::U32(8));
            Ok(())
        }),
    ];
    for (name, change) in cases {
        let dir = tempfile::tempdir()?;
        let mut content = small("llama")?;
        change(&mut content)?;
        let path = write(&content, dir.path())?;
        let out = dir.path().join("out");
        let error = gguf::convert(&path, &out, DType::F32)
            .expect_err(name)
            .to_string();
        assert!(
            error.contains(name) && error.contains("m.gguf"),
            "{name}: {error}"
        );
        assert_eq!(
            std::fs::read_dir(dir.path())?.count(),
            1,
            "{name}: files are left"
        );
    }
    Ok(())
}

/// Where `pattern` ends in `bytes`.
fn after(bytes: &[u8], pattern: &[u8]) -> usize {
    let start = bytes
        .windows(pattern.len())
        .position(|window| window == pattern);
    start.expect("the pattern") + pattern.len()
}

#[test]
fn broken_files_are_refused() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = write(&small("llama")?, dir.path())?;
    let whole = std::fs::read(&path)?;
    let open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("written");
        GgufFile::open(&path).map(drop)
    };
    open(&whole)?;
    // Cut anywhere before the padding at the end: an error, never a panic.
    for length in (0..whole.len() - 32).step_by(97) {
        assert!(open(&whole[..length]).is_err(), "{length} bytes");
    }
    let changed = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        open(&changed).expect_err("refused").to_string()
    };
    // After a tensor's name: rank, dimensions, type, offset.
    let norm = after(&whole, b"output_norm.weight");
    let iq = changed(norm + 12, &16u32.to_le_bytes());
    assert!(
        iq.contains("`output_norm.weight` is stored as IQ2_XXS (type 16)"),
        "{iq}"
    );
    let unknown = changed(norm + 12, &977u32.to_le_bytes());
    assert!(unknown.contains("type 977"), "{unknown}");
    let rank = changed(norm, &5u32.to_le_bytes());
    assert!(rank.contains("5 dimensions"), "{rank}");
    let size = changed(norm + 4, &(u64::MAX / 2).to_le_bytes());
    assert!(size.contains("output_norm.weight"), "{size}");
    let zero = changed(norm + 4, &0u64.to_le_bytes());
    assert!(zero.contains("output_norm.weight"), "{zero}");
    let offset = changed(norm + 16, &(u64::MAX - 31).to_le_bytes());
    assert!(offset.contains("within the file"), "{offset}");
    let embedding = after(&whole, b"token_embd.weight");
    let rows = changed(embedding + 4, &40u64.to_le_bytes());
    assert!(rows.contains("no multiple of 32"), "{rows}");
    let twice = changed(norm - b"output_norm.weight".len(), b"blk.0.ffn_up.weigh");
    assert!(!twice.is_empty());
    for (at, bytes) in [(0, [0u8; 8]), (4, [9; 8]), (8, [255; 8]), (16, [255; 8])] {
        assert!(changed(at, &bytes).contains("m.gguf"));
    }
    // Every single byte of the header, turned around: refused or read, never a panic.
    let header = after(&whole, b"token_embd.weight") + 24;
    for at in 0..header {
        let mut changed = whole.clone();
        changed[at] ^= 0xFF;
        let _ = open(&changed);
    }
    Ok(())
}

#[test]
fn an_alignment_of_zero_is_refused() -> Outcome {
    let dir = tempfile::tempdir()?;
    for alignment in [0, 3] {
        let mut content = small("llama")?;
        let value = Value::U32(alignment);
        content
            .metadata
            .insert("general.alignment".to_string(), value);
        let path = write(&content, dir.path())?;
        let error = GgufFile::open(path).expect_err("refused").to_string();
        assert!(error.contains("general.alignment"), "{error}");
    }
    Ok(())
}

/// A real file: what transformers makes of it is compared by `tools/check_gguf.py`.
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
    gguf::convert(&path, &out, DType::BF16)?;
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
