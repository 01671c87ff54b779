//! Unmodified models of candle-transformers on FP8 files: they get dequantized weights.

use super::{Result, decibels, expected, folder, same_db};
use candle_core::{DType, Device, Tensor};
use candle_transformers::models::{bert, llama};
use fp8::models::{ModelOptions, open};
use fp8::rewrite::{QuantizeOptions, Scheme, Spelling, convert, quantize, quiet};
use std::path::Path;

fn config<T: serde::de::DeserializeOwned>(dir: &Path) -> Result<T> {
    let text = std::fs::read_to_string(dir.join("config.json"))?;
    Ok(serde_json::from_str(&text)?)
}

#[test]
fn a_stock_llama_runs_from_every_family() -> Result<()> {
    for name in [
        "autofp8_static",
        "ct_block128",
        "ct_channel_token_bf16",
        "hf_block_f32",
        "hf_per_tensor_static",
        "modelopt_fp8_kv",
        "torchao_row",
        "torchao_tensor",
    ] {
        let dir = folder(name);
        let config: llama::LlamaConfig = config(&dir)?;
        let config = config.into_config(false);
        let vb = fp8::load::open_dir(&dir, DType::F32, &Device::Cpu)?;
        let model = llama::Llama::load(vb, &config)?;
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
        let ids = expected(&dir, "input_ids")?.to_dtype(DType::U32)?;
        let logits = model.forward(&ids, 0, &mut cache)?;
        let last = ids.dim(1)? - 1;
        let expected = expected(&dir, "logits_weight_only")?.narrow(1, last, 1)?;
        let db = decibels(&expected.squeeze(1)?, &logits)?;
        println!("stock Llama, {name}: {db:.1} dB");
        assert!(db >= same_db(), "{name}: {db:.1} dB");
    }
    Ok(())
}

/// A BERT with pseudo-random weights in high precision.
fn write_bert(dir: &Path) -> Result<()> {
    let (d, inner, vocab) = (256, 384, 50);
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("embeddings.word_embeddings.weight".into(), vec![vocab, d]),
        ("embeddings.position_embeddings.weight".into(), vec![32, d]),
        ("embeddings.token_type_embeddings.weight".into(), vec![2, d]),
        ("embeddings.LayerNorm.weight".into(), vec![d]),
        ("embeddings.LayerNorm.bias".into(), vec![d]),
    ];
    for layer in 0..2 {
        let layer = format!("encoder.layer.{layer}");
        for (name, rows, cols) in [
            ("attention.self.query", d, d),
            ("attention.self.key", d, d),
            ("attention.self.value", d, d),
            ("attention.output.dense", d, d),
            ("intermediate.dense", inner, d),
            ("output.dense", d, inner),
        ] {
            shapes.push((format!("{layer}.{name}.weight"), vec![rows, cols]));
            shapes.push((format!("{layer}.{name}.bias"), vec![rows]));
        }
        for name in ["attention.output.LayerNorm", "output.LayerNorm"] {
            shapes.push((format!("{layer}.{name}.weight"), vec![d]));
            shapes.push((format!("{layer}.{name}.bias"), vec![d]));
        }
    }
    let tensors = shapes.into_iter().enumerate().map(|(seed, (name, shape))| {
        let count: usize = shape.iter().product();
        let value = |i: usize| (((i + 3) * (2 * seed + 7)) as f64 * 12.9898).sin() as f32;
        let base = if name.ends_with("LayerNorm.weight") {
            1.
        } else {
            0.
        };
        let values: Vec<f32> = (0..count).map(|i| base + 0.1 * value(i)).collect();
        Ok((name, Tensor::from_vec(values, shape, &Device::Cpu)?))
    });
    let tensors = tensors.collect::<Result<std::collections::HashMap<_, _>>>()?;
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors"))?;
    let config = serde_json::json!({
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": vocab,
        "hidden_size": d, "intermediate_size": inner, "num_hidden_layers": 2,
        "num_attention_heads": 4, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "max_position_embeddings": 32, "type_vocab_size": 2, "initializer_range": 0.02,
        "layer_norm_eps": 1e-12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "use_cache": true,
    });
    Ok(std::fs::write(dir.join("config.json"), config.to_string())?)
}

#[test]
fn a_stock_bert_runs_from_three_families() -> Result<()> {
    let root = tempfile::tempdir()?;
    let plain = root.path().join("plain");
    std::fs::create_dir(&plain)?;
    write_bert(&plain)?;
    let source = fp8::load::Checkpoint::open_dir(&plain)?;
    let quantized = |scheme, spelling| -> Result<_> {
        let out = root.path().join(format!("{spelling}"));
        let options = QuantizeOptions::new(scheme).with_spelling(spelling);
        quantize(&source, &out, &options, &mut quiet)?;
        Ok(out)
    };
    let ids = Tensor::new(&[[5u32, 6, 7, 9], [5, 8, 0, 0]], &Device::Cpu)?;
    let mask = Tensor::new(&[[1u32, 1, 1, 1], [1, 1, 0, 0]], &Device::Cpu)?;
    for dir in [
        quantized(Scheme::ChannelToken, Spelling::CompressedTensors)?,
        quantized(Scheme::ChannelToken, Spelling::ModelOpt)?,
        quantized(Scheme::Block128, Spelling::Fp8Blocks)?,
    ] {
        let vb = fp8::load::open_dir(&dir, DType::F32, &Device::Cpu)?;
        let stock = bert::BertModel::load(vb, &config(&dir)?)?;
        let expected = stock.forward(&ids, &ids.zeros_like()?, Some(&mask))?;
        // Ours with the same weights and untouched inputs.
        let inputs = fp8::load::OpenOptions::new().with_inputs(fp8::load::Inputs::WeightOnly);
        let ours = open(&dir, &ModelOptions::new().with_checkpoint(inputs))?;
        let Some(ours) = ours.bert() else {
            anyhow::bail!("a BERT is expected");
        };
        // Positions without a token have no meaning, so they are not compared.
        let keep = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
        let y = ours.forward(&ids, &mask)?.broadcast_mul(&keep)?;
        let db = decibels(&expected.broadcast_mul(&keep)?, &y)?;
        println!("stock BERT, {}: {db:.1} dB", dir.display());
        assert!(db >= same_db(), "{}: {db:.1} dB", dir.display());
    }
    Ok(())
}

/// One model in every spelling that can express it gives the same logits to the bit.
#[test]
fn other_spellings_give_the_same_bits() -> Result<()> {
    let root = tempfile::tempdir()?;
    let mut same = 0;
    for name in [
        "autofp8_static",
        "ct_block128",
        "ct_channel_token_bf16",
        "ct_static_tensor",
        "hf_block_f32",
        "hf_per_tensor_static",
        "modelopt_fp8_kv",
        "modelopt_pb_wo",
        "torchao_row",
        "torchao_tensor",
    ] {
        let dir = folder(name);
        let ids = expected(&dir, "input_ids")?;
        let logits = super::model(&dir)?.forward(&ids)?;
        let bits = |x: &Tensor| -> Result<Vec<u32>> {
            let values = x.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.into_iter().map(f32::to_bits).collect())
        };
        let source = fp8::load::Checkpoint::open_dir(&dir)?;
        for spelling in [
            Spelling::CompressedTensors,
            Spelling::Fp8Blocks,
            Spelling::AutoFp8,
            Spelling::ModelOpt,
        ] {
            let out = root.path().join(format!("{name}-{spelling}"));
            let options = fp8::rewrite::WriteOptions::new().with_drop_kv_scales(true);
            match convert(&source, &out, spelling, &options, &mut quiet) {
                Ok(_) => {
                    let again = super::model(&out)?.forward(&ids)?;
                    assert_eq!(bits(&logits)?, bits(&again)?, "{name} as {spelling}");
                    same += 1;
                }
                Err(fp8::FilesError::Inexpressible { .. }) => assert!(!out.exists()),
                Err(error) => return Err(error.into()),
            }
        }
    }
    println!("{same} rewritten models");
    assert!(same >= 20, "{same}");
    Ok(())
}
