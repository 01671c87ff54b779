//! What opening and auditing a model hold in memory. One test, since it counts the allocations of the whole process.

use candle_core::{DType, Device, Tensor};
use fp8::audit::{AuditOptions, Codes, Severity, audit_dir};
use fp8::load::Checkpoint;
use fp8::models::{ModelOptions, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme};
use fp8_test_support::memory::{Counting, held, peak};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HIDDEN: usize = 512;
const INNER: usize = 1024;
const VOCAB: usize = 2048;

/// Weights of a layer.
const LAYER: usize = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER;

/// Writes a model in bf16.
fn write(dir: &Path, layers: usize) -> candle_core::Result<()> {
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let value = Tensor::randn(0f32, 0.02, shape, &Device::Cpu)?.to_dtype(DType::BF16)?;
        tensors.insert(name, value);
        Ok::<_, candle_core::Error>(())
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN])?;
    add("model.norm.weight".into(), &[HIDDEN])?;
    for layer in 0..layers {
        for (name, shape) in [
            ("input_layernorm", [HIDDEN].as_slice()),
            ("post_attention_layernorm", &[HIDDEN]),
            ("self_attn.q_proj", &[HIDDEN, HIDDEN]),
            ("self_attn.k_proj", &[HIDDEN, HIDDEN]),
            ("self_attn.v_proj", &[HIDDEN, HIDDEN]),
            ("self_attn.o_proj", &[HIDDEN, HIDDEN]),
            ("mlp.gate_proj", &[INNER, HIDDEN]),
            ("mlp.up_proj", &[INNER, HIDDEN]),
            ("mlp.down_proj", &[HIDDEN, INNER]),
        ] {
            add(format!("model.layers.{layer}.{name}.weight"), shape)?;
        }
    }
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors"))?;
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 64, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
    });
    std::fs::write(dir.join("config.json"), config.to_string())?;
    Ok(())
}

#[test]
fn opening_and_auditing_hold_little_beside_the_codes() -> Result<(), Box<dyn std::error::Error>> {
    for scheme in [Scheme::ChannelToken, Scheme::Block128, Scheme::Mxfp8] {
        for layers in [2, 6] {
            let dir = tempfile::tempdir()?;
            let (plain, fp8) = (dir.path().join("plain"), dir.path().join("fp8"));
            std::fs::create_dir(&plain)?;
            write(&plain, layers)?;
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
            let expected = (codes + codes / 32 * 4 + 2 * VOCAB * HIDDEN) as isize;
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
        }
    }
    Ok(())
}
