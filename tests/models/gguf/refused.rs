//! Files that are damaged or hold unknown content.

use super::*;

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
        let error = convert(&path, &out, DType::F32)
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
    // A file cut anywhere before the final padding gives an error, never a panic.
    for length in (0..whole.len() - 32).step_by(97) {
        let error = open(&whole[..length]).expect_err("a cut file").to_string();
        assert!(error.contains("m.gguf"), "{length} bytes: {error}");
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
    // The offset of another tensor.
    let shared = changed(embedding + 24, &whole[norm + 16..norm + 24]);
    assert!(
        shared.contains("`token_embd.weight`") && shared.contains("within"),
        "{shared}"
    );
    let rows = changed(embedding + 4, &40u64.to_le_bytes());
    assert!(rows.contains("not a multiple of 32"), "{rows}");
    let twice = changed(norm - b"output_norm.weight".len(), b"blk.0.ffn_up.weigh");
    assert!(!twice.is_empty());
    for (at, bytes) in [(0, [0u8; 8]), (4, [9; 8]), (8, [255; 8]), (16, [255; 8])] {
        assert!(changed(at, &bytes).contains("m.gguf"));
    }
    // Every byte of the header inverted, one at a time: refused or read, never a panic.
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

/// Array values take some 30 bytes each in memory.
#[test]
fn arrays_beyond_any_vocabulary_are_refused() -> Outcome {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("m.gguf");
    let count = 5_000_000u64;
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend([0u64, 1, 1].map(u64::to_le_bytes).concat());
    bytes.push(b'k');
    // An array of bytes.
    bytes.extend([9u32, 0].map(u32::to_le_bytes).concat());
    bytes.extend(count.to_le_bytes());
    std::fs::write(&path, bytes)?;
    let file = std::fs::OpenOptions::new().write(true).open(&path)?;
    file.set_len(2 * count)?;
    let error = GgufFile::open(&path).expect_err("refused").to_string();
    assert!(error.contains("5000000 values"), "{error}");
    Ok(())
}

#[test]
#[cfg(unix)]
fn pipes_and_devices_are_refused_at_once() -> Outcome {
    let dir = tempfile::tempdir()?;
    let pipe = dir.path().join("m.gguf");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    if made.is_ok_and(|status| status.success()) {
        let error = GgufFile::open(&pipe).expect_err("refused").to_string();
        assert!(error.contains("named pipe"), "{error}");
    }
    let error = GgufFile::open("/dev/zero")
        .expect_err("refused")
        .to_string();
    assert!(error.contains("device"), "{error}");
    Ok(())
}
