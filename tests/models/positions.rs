//! Rotary positions that depend on the length of a text: a prompt that is read in parts has those of the whole prompt.

use candle_core::{DType, Device, Tensor};
use fp8::models::{self, CausalLm, KvCache, Llama, Model, ModelOptions};
use fp8_test_support::bits;
use fp8_test_support::golden_models::{configs, write_model};
use serde_json::{Value, json};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Tokens up to which positions do not depend on the length.
const ORIGINAL: usize = 16;

/// A tiny Phi-3 without a window that was trained for `positions` tokens.
fn phi3(positions: usize, rope: Value) -> Llama {
    let dir = tempfile::tempdir().expect("a folder");
    write_model("phi3", dir.path());
    let mut config: Value = serde_json::from_str(&configs()["phi3"]).expect("a configuration");
    config["max_position_embeddings"] = json!(positions);
    config["original_max_position_embeddings"] = json!(ORIGINAL);
    config["rope_parameters"] = rope;
    config["sliding_window"] = Value::Null;
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
    let options = ModelOptions::new().with_dtype(DType::F32);
    match models::open(dir.path(), &options).expect("a model") {
        Model::Llama(model) => model,
        _ => panic!("it is a language model"),
    }
}

/// Phi-3 with a long context, and the same with dynamic scaling.
fn scaled() -> [(&'static str, Llama); 2] {
    let long = json!({
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.5, 2.0, 3.0, 4.0],
    });
    let dynamic = json!({ "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0 });
    [
        ("longrope", phi3(64, long)),
        ("dynamic", phi3(ORIGINAL, dynamic)),
    ]
}

fn tokens(count: usize) -> Tensor {
    let ids: Vec<u32> = (0..count as u32)
        .map(|i| (i * 7 + i * i / 5 + 11) % 48)
        .collect();
    Tensor::from_vec(ids, (1, count), &Device::Cpu).expect("ids")
}

/// Logits of `ids` in parts of at most these lengths, over a cache that is told of `prompt` tokens, and that cache.
fn in_parts(
    model: &Llama,
    ids: &Tensor,
    prompt: usize,
    parts: &[usize],
) -> Outcome<(Tensor, KvCache)> {
    let count = ids.dim(1)?;
    let mut cache = model.new_cache(1, 64)?;
    cache.set_prompt_tokens(prompt);
    let mut logits = vec![];
    for &part in parts {
        let part = part.min(count - cache.len());
        if part > 0 {
            let ids = ids.narrow(1, cache.len(), part)?;
            logits.push(model.forward_cached(&ids, &mut cache)?);
        }
    }
    assert_eq!(cache.len(), count);
    Ok((Tensor::cat(&logits, 1)?, cache))
}

#[test]
fn a_prompt_in_parts_has_the_positions_of_the_whole_prompt() -> Outcome {
    for (name, model) in scaled() {
        for count in [9, ORIGINAL, ORIGINAL + 1, 40] {
            let ids = tokens(count);
            let whole = bits(&model.forward(&ids)?);
            for parts in [vec![1; count], vec![7; count], vec![ORIGINAL, count]] {
                let (logits, _) = in_parts(&model, &ids, count, &parts)?;
                assert!(bits(&logits) == whole, "{name}: {count} tokens, {parts:?}");
            }
            // A cache that is told nothing gives each part the positions of the tokens up to its end.
            let (logits, _) = in_parts(&model, &ids, 0, &[7, count])?;
            let same = bits(&logits) == whole;
            assert_eq!(same, count <= ORIGINAL, "{name}: {count} tokens");
        }
    }
    Ok(())
}

/// Also where the text grows beyond the limit after the prompt.
#[test]
fn tokens_after_a_prompt_do_not_depend_on_its_parts() -> Outcome {
    for (name, model) in scaled() {
        for prompt in [10, 40] {
            let ids = tokens(prompt + 12);
            let start = ids.narrow(1, 0, prompt)?;
            let (_, mut whole) = in_parts(&model, &start, 0, &[prompt])?;
            let (_, mut parts) = in_parts(&model, &start, prompt, &[7, 1, prompt])?;
            for place in prompt..prompt + 12 {
                let id = ids.narrow(1, place, 1)?;
                let expected = bits(&model.last_logits(&id, &mut whole)?);
                let id = id.flatten_all()?.to_vec1::<u32>()?;
                let got = bits(&model.step(&id, &mut [&mut parts])?);
                assert!(got == expected, "{name}: token {place} after {prompt}");
            }
        }
    }
    Ok(())
}
