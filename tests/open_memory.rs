//! What opening, auditing, searching a model and writing it for llama.cpp hold in memory. One test, since it counts the allocations of
//! the whole process.

use candle_core::{DType, Device, Tensor};
use fp8::audit::{AuditOptions, Codes, Severity, audit_dir};
use fp8::load::Checkpoint;
use fp8::models::gguf::{GgufOptions, GgufType, write_gguf};
use fp8::models::{ModelOptions, find_codes, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme};
use fp8_files::search::SearchOptions;
use fp8_test_support::memory::{Counting, held, peak};
use fp8_test_support::tokenizer::write_byte_tokenizer;
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Features of tokens and within MLPs, and tokens.
struct Sizes {
    hidden: usize,
    inner: usize,
    vocab: usize,
}

const LARGE: Sizes = Sizes {
    hidden: 512,
    inner: 1024,
    vocab: 2048,
};

const MEDIUM: Sizes = Sizes {
    hidden: 256,
    inner: 512,
    vocab: 2048,
};

/// A search takes more time for a weight than anything else.
const SMALL: Sizes = Sizes {
    hidden: 64,
    inner: 128,
    vocab: 256,
};

impl Sizes {
    /// Weights of a layer.
    const fn layer(&self) -> usize {
        4 * self.hidden * self.hidden + 3 * self.hidden * self.inner
    }
}

/// Writes a model in bf16.
fn write(dir: &Path, sizes: &Sizes, layers: usize) -> candle_core::Result<()> {
    let &Sizes {
        hidden,
        inner,
        vocab,
    } = sizes;
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let value = Tensor::randn(0f32, 0.02, shape, &Device::Cpu)?.to_dtype(DType::BF16)?;
        tensors.insert(name, value);
        Ok::<_, candle_core::Error>(())
    };
    add("model.embed_tokens.weight".into(), &[vocab, hidden])?;
    add("model.norm.weight".into(), &[hidden])?;
    for layer in 0..layers {
        for (name, shape) in [
            ("input_layernorm", [hidden].as_slice()),
            ("post_attention_layernorm", &[hidden]),
            ("self_attn.q_proj", &[hidden, hidden]),
            ("self_attn.k_proj", &[hidden, hidden]),
            ("self_attn.v_proj", &[hidden, hidden]),
            ("self_attn.o_proj", &[hidden, hidden]),
            ("mlp.gate_proj", &[inner, hidden]),
            ("mlp.up_proj", &[inner, hidden]),
            ("mlp.down_proj", &[hidden, inner]),
        ] {
            add(format!("model.layers.{layer}.{name}.weight"), shape)?;
        }
    }
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors"))?;
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 64, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
    });
    std::fs::write(dir.join("config.json"), config.to_string())?;
    Ok(())
}

#[test]
fn memory_does_not_grow_with_the_model() -> Outcome {
    opening_and_auditing_hold_little_beside_the_codes()?;
    a_gguf_file_is_written_a_tensor_at_a_time()?;
    a_search_keeps_the_codes_alone()
}

fn opening_and_auditing_hold_little_beside_the_codes() -> Outcome {
    const LAYER: usize = LARGE.layer();
    for scheme in [Scheme::ChannelToken, Scheme::Block128, Scheme::Mxfp8] {
        for layers in [2, 6] {
            let dir = tempfile::tempdir()?;
            let (plain, fp8) = (dir.path().join("plain"), dir.path().join("fp8"));
            std::fs::create_dir(&plain)?;
            write(&plain, &LARGE, layers)?;
            let source = Checkpoint::open_dir(&plain)?;
            let options = QuantizeOptions::new(scheme);
            rewrite::quantize(&source, &fp8, &options, &mut rewrite::quiet)?;
            drop(source);

            let before = held();
            let (model, most) = peak(|| open(&fp8, &ModelOptions::new()));
            let model = model?;
            let kept = held() - before;
            // A byte for each weight, an f32 scale for 32 of them or more, and the embedding in its 16 bits.
            let codes = layers * LAYER;
            let expected = (codes + codes / 32 * 4 + 2 * LARGE.vocab * LARGE.hidden) as isize;
            let others = 200_000;
            println!("{scheme}, {layers} layers: {kept} bytes of {expected}, at most {most}");
            assert!(kept <= expected + others, "{scheme}: {kept} of {expected}");
            let beside = most - kept;
            assert!(beside <= LAYER as isize, "{scheme}: {beside}");
            drop(model);

            let audit = || audit_dir(&fp8, &AuditOptions::default().with_codes(Codes::All));
            let (report, most) = peak(audit);
            assert!(!report.has(Severity::Error), "{:?}", report.findings);
            println!("audit: at most {most}");
            // 4 MiB of codes at a time, here a whole weight, and its scales.
            assert!(most <= 4 << 20, "{scheme}: {most}");

            // All codes, a few tens of KiB of each of seven weights, or only the scales.
            let read = |codes| {
                let options = AuditOptions::default().with_codes(codes);
                audit_dir(&fp8, &options).bytes_read as usize
            };
            let [all, some, none] = [Codes::All, Codes::Samples, Codes::None].map(read);
            assert_eq!(all - none, codes, "{scheme}");
            assert!(some > none, "{scheme}: {some}");
            assert!(some - none <= layers * 7 * (64 << 10), "{scheme}: {some}");
        }
    }
    Ok(())
}

fn a_gguf_file_is_written_a_tensor_at_a_time() -> Outcome {
    let mut peaks = HashMap::new();
    for layers in [1, 6] {
        let dir = tempfile::tempdir()?;
        let (plain, fp8) = (dir.path().join("plain"), dir.path().join("fp8"));
        std::fs::create_dir(&plain)?;
        write(&plain, &MEDIUM, layers)?;
        write_byte_tokenizer(&plain, "abc");
        let options = QuantizeOptions::new(Scheme::ChannelToken);
        let source = Checkpoint::open_dir(&plain)?;
        rewrite::quantize(&source, &fp8, &options, &mut rewrite::quiet)?;
        drop(source);
        let source = Checkpoint::open_dir(&fp8)?;
        for kind in [GgufType::Q8_0, GgufType::BF16] {
            let (file, options) = (dir.path().join(kind.to_string()), GgufOptions::new(kind));
            let written = || write_gguf(&source, &file, &options, &mut rewrite::quiet);
            let (report, most) = peak(written);
            let bytes = report?.bytes;
            println!("{kind}, {layers} layers: {bytes} bytes, at most {most}");
            // The largest tensor: 16-bit values become f64 twice for a check. Beside it, the file's buffer.
            let largest = MEDIUM.vocab * MEDIUM.hidden;
            assert!(most <= (24 * largest) as isize, "{kind}: {most}");
            let before = *peaks.entry(kind.to_string()).or_insert(most);
            // Five more layers have 3.5 MB in the smaller type.
            assert!(most - before <= 1 << 20, "{kind}: {most}, {before}");
        }
    }
    Ok(())
}

/// Products, factors and samples are those of one layer at a time: only codes remain of each.
fn a_search_keeps_the_codes_alone() -> Outcome {
    let samples: Vec<Vec<u32>> = (0..4u32)
        .map(|sample| (0..32).map(|at| (sample * 97 + at * 31) % 256).collect())
        .collect();
    let mut peaks = vec![];
    let counts = [2, 12];
    for layers in counts {
        let dir = tempfile::tempdir()?;
        write(dir.path(), &SMALL, layers)?;
        let model = open(dir.path(), &ModelOptions::new())?;
        let source = Checkpoint::open_dir(dir.path())?;
        let options = QuantizeOptions::new(Scheme::ChannelToken);
        let search = SearchOptions::new();
        let (found, most) = peak(|| {
            let quiet = &mut rewrite::quiet;
            find_codes(&model, &source, &samples, &options, &search, quiet)
        });
        assert_eq!(found?.chosen.codes.len(), 7 * layers);
        println!("a search of {layers} layers: at most {most} bytes");
        peaks.push(most);
    }
    // In f32 the weights of these layers would have four times as many bytes as their codes.
    let codes = ((counts[1] - counts[0]) * SMALL.layer()) as isize;
    let grown = peaks[1] - peaks[0];
    assert!(grown <= 2 * codes, "{grown} bytes for {codes} codes");
    Ok(())
}
