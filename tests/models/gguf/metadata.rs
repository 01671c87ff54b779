//! Entries of the metadata that change what a model computes: in its `config.json`, or refused by name.

use super::*;

/// The configuration of a small Llama with these entries.
fn config(entries: &[(&str, Value)]) -> Result<serde_json::Value, gguf::GgufError> {
    let dir = tempfile::tempdir().expect("a folder");
    let mut content = small("llama").expect("a model");
    for (key, value) in entries {
        let key = format!("llama.{key}");
        content.metadata.insert(key, value.clone());
    }
    let path = write(&content, dir.path()).expect("written");
    GgufFile::open(path)?.config()
}

/// llama.cpp ends a text at tokens that end a turn or a message, too.
#[test]
fn every_token_that_ends_a_text_does() -> Outcome {
    let dir = tempfile::tempdir()?;
    let mut content = small("llama")?;
    for (name, id) in [("eot", 3), ("eom", 1)] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        content.metadata.insert(key, Value::U32(id));
    }
    let path = write(&content, dir.path())?;
    let file = GgufFile::open(&path)?;
    assert_eq!(file.config()?["eos_token_id"], serde_json::json!([1, 3]));
    assert_eq!(Tokenizer::from_gguf(&file)?.eos(), [1, 3]);
    let files = rewrite::Source::files(&GgufSource::new(GgufFile::open(&path)?)?)?;
    let generation = &files["generation_config.json"];
    assert_eq!(generation["eos_token_id"], serde_json::json!([1, 3]));
    Ok(())
}

/// As in llama.cpp, which has an older name for it too.
#[test]
fn a_factor_alone_divides_positions() -> Outcome {
    let linear = serde_json::json!({ "rope_type": "linear", "factor": 4.0 });
    for key in ["rope.scaling.factor", "rope.scale_linear"] {
        let factor = (key, Value::F32(4.0));
        let scaled = config(std::slice::from_ref(&factor))?;
        assert_eq!(scaled["rope_scaling"], linear, "{key}");
        let none = ("rope.scaling.type", Value::String("none".to_string()));
        let plain = config(&[factor, none])?;
        assert!(plain.get("rope_scaling").is_none(), "{key}");
    }
    // What llama.cpp takes for no entry.
    let plain = config(&[("rope.scaling.factor", Value::F32(0.0))])?;
    assert!(plain.get("rope_scaling").is_none(), "{plain}");
    Ok(())
}

#[test]
fn the_ramp_of_yarn_is_that_of_the_file() -> Outcome {
    let yarn = config(&[
        ("rope.scaling.type", Value::String("yarn".to_string())),
        ("rope.scaling.factor", Value::F32(4.0)),
        ("rope.scaling.original_context_length", Value::U32(64)),
        ("rope.scaling.yarn_beta_fast", Value::F32(16.0)),
        ("rope.scaling.yarn_beta_slow", Value::F32(2.0)),
        ("rope.scaling.attn_factor", Value::F32(1.0)),
    ])?;
    let expected = serde_json::json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
    });
    assert_eq!(yarn["rope_scaling"], expected);
    Ok(())
}

#[test]
fn what_a_configuration_has_no_place_for_is_refused() -> Outcome {
    for (key, value) in [
        ("rope.scaling.attn_factor", Value::F32(1.5)),
        ("rope.scaling.yarn_attn_factor", Value::F32(1.5)),
        ("rope.scaling.yarn_ext_factor", Value::F32(0.5)),
        ("rope.scaling.yarn_log_multiplier", Value::F32(0.1)),
        ("logit_scale", Value::F32(8.0)),
        ("residual_scale", Value::F32(0.25)),
        ("embedding_scale", Value::F32(12.0)),
        ("attn_logit_softcapping", Value::F32(50.0)),
        ("final_logit_softcapping", Value::F32(30.0)),
        ("attention.clamp_kqv", Value::F32(8.0)),
        ("attention.scale", Value::F32(0.5)),
        ("attention.temperature_scale", Value::F32(0.1)),
        ("attention.causal", Value::Bool(false)),
    ] {
        let error = config(&[(key, value)]).expect_err(key);
        let named = format!("llama.{key}");
        let is_named = matches!(&error, gguf::GgufError::Metadata { key, .. } if *key == named);
        assert!(is_named, "{error}");
    }
    // Without effect: heads have 8 features.
    config(&[
        ("logit_scale", Value::F32(1.0)),
        ("attention.scale", Value::F32(0.35355338)),
        ("attention.causal", Value::Bool(true)),
    ])?;
    Ok(())
}

#[test]
fn a_bias_without_those_beside_it_is_refused() -> Outcome {
    // Where the first layer has none, no other layer may have one.
    for (layer, part) in [
        (0, "attn_output"),
        (0, "attn_k"),
        (0, "attn_v"),
        (0, "ffn_up"),
        (0, "ffn_down"),
        (1, "attn_q"),
        (1, "attn_output"),
        (1, "ffn_gate"),
    ] {
        let dir = tempfile::tempdir()?;
        let mut content = small("llama")?;
        if layer == 1 {
            let blocks = Value::U32(2);
            content.metadata.insert("llama.block_count".into(), blocks);
            let first = content.tensors.iter();
            let first =
                first.filter_map(|(name, tensor)| Some((name.strip_prefix("blk.0.")?, tensor)));
            let copies = first.map(|(name, tensor)| {
                let values = tensor.dequantize(&Device::Cpu)?;
                let copy = QTensor::quantize(&values, tensor.dtype())?;
                Ok((format!("blk.1.{name}"), copy))
            });
            let copies: Vec<_> = copies.collect::<CandleResult<_>>()?;
            content.tensors.extend(copies);
        }
        let name = format!("blk.{layer}.{part}.bias");
        let weight = &content.tensors[&format!("blk.{layer}.{part}.weight")];
        let bias = Tensor::zeros(weight.shape().dims()[0], DType::F32, &Device::Cpu)?;
        let bias = QTensor::quantize(&bias, GgmlDType::F32)?;
        content.tensors.insert(name.clone(), bias);
        let file = GgufFile::open(write(&content, dir.path())?)?;
        let error = file.config().expect_err(part).to_string();
        assert!(error.contains(&name), "{error}");
    }
    Ok(())
}
