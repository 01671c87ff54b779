//! GGUF files that are written: their tensors by llama.cpp's names, their blocks by llama.cpp's rule.

use super::{Outcome, convert};
use crate::real::real_model;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{D, DType, Device, Tensor};
use fp8::load::Checkpoint;
use fp8::models::gguf::{GgufFile, GgufOptions, GgufReport, GgufSource, GgufType, write_gguf};
use fp8::models::{ModelOptions, Tokenizer, open};
use fp8::rewrite;
use fp8_test_support::{golden, sqnr};
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fs::{self, File};
use std::path::Path;

pub(super) type Tensors = HashMap<String, Tensor>;

/// A byte-level tokenizer of six tokens.
pub(super) fn tokenizer() -> Json {
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": byte_level, "post_processor": null,
        "added_tokens": [{
            "id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true
        }],
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [{ "type": "Digits", "individual_digits": true }, byte_level] },
        "model": { "type": "BPE", "vocab": { "<s>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4 }, "merges": [["a", "b"]] },
    })
}

/// The tokenizer of an encoder.
fn word_pieces() -> Json {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "decoder": null, "post_processor": null,
        "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": { "[UNK]": 0, "a": 1, "##b": 2 },
        },
    })
}

pub(super) fn write_model(dir: &Path, config: &Json, tensors: &Tensors) -> Outcome {
    let tokenizer = match config["model_type"] == "bert" {
        true => word_pieces(),
        false => tokenizer(),
    };
    fs::write(dir.join("config.json"), config.to_string())?;
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string())?;
    let special = json!({ "bos_token": "<s>", "chat_template": "{{ messages }}" });
    fs::write(dir.join("tokenizer_config.json"), special.to_string())?;
    candle_core::safetensors::save(tensors, dir.join("model.safetensors"))?;
    Ok(())
}

pub(super) fn write(dir: &Path, options: &GgufOptions) -> Result<GgufReport, fp8::models::Error> {
    let model = Checkpoint::open_dir(dir)?;
    write_gguf(&model, dir.join("m.gguf"), options, &mut rewrite::quiet)
}

/// The configuration and tensors of a tiny model that transformers made.
pub(super) fn model(family: &str) -> Result<(Json, Tensors), Box<dyn Error>> {
    let path = golden("models.safetensors");
    let bytes = fs::read(&path)?;
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes)?;
    let configs = header.metadata().clone().ok_or("configurations")?;
    let prefix = format!("{family}.");
    let all = candle_core::safetensors::load(&path, &Device::Cpu)?.into_iter();
    let own =
        all.filter_map(|(name, tensor)| Some((name.strip_prefix(&prefix)?.to_string(), tensor)));
    let own = own.filter(|(name, _)| name != "output");
    Ok((serde_json::from_str(&configs[family])?, own.collect()))
}

/// What the file must hold, by the names in it: tensors in the order that llama.cpp has.
fn expected(
    family: &str,
    config: &Json,
    tensors: &Tensors,
) -> Result<BTreeMap<String, Tensor>, Box<dyn Error>> {
    let names: BTreeMap<String, BTreeMap<String, String>> =
        serde_json::from_slice(&fs::read(golden("gguf_names.json"))?)?;
    let mut expected = BTreeMap::new();
    for (name, stored) in &names[family] {
        let mut tensor = tensors[name].to_dtype(DType::F32)?;
        let heads = match name {
            _ if !matches!(family, "llama" | "mistral" | "mixtral") => None,
            name if name.contains("q_proj") => config["num_attention_heads"].as_u64(),
            name if name.contains("k_proj") => config["num_key_value_heads"].as_u64(),
            _ => None,
        };
        if let Some(heads) = heads {
            // The two halves of a head become neighbours: row i of each half in turn.
            let (rows, half) = (tensor.dim(0)?, tensor.dim(0)? / heads as usize / 2);
            let from = |row: usize| {
                let (head, inner) = (row / (2 * half), row % (2 * half));
                (head * 2 * half + inner % 2 * half + inner / 2) as u32
            };
            let order: Vec<u32> = (0..rows).map(from).collect();
            tensor = tensor.index_select(&Tensor::new(order, &Device::Cpu)?, 0)?;
        }
        expected.insert(stored.clone(), tensor);
    }
    for layer in 0..2 {
        for part in ["gate", "up", "down"] {
            let expert = |e| format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight");
            let mixtral = match part {
                "gate" => "w1",
                "up" => "w3",
                _ => "w2",
            };
            let old =
                |e| format!("model.layers.{layer}.block_sparse_moe.experts.{e}.{mixtral}.weight");
            let find = |e| tensors.get(&expert(e)).or_else(|| tensors.get(&old(e)));
            let all: Vec<Tensor> = (0..4).map_while(|e| find(e).cloned()).collect();
            if !all.is_empty() {
                let joined = Tensor::stack(&all, 0)?.to_dtype(DType::F32)?;
                expected.insert(format!("blk.{layer}.ffn_{part}_exps.weight"), joined);
            }
        }
    }
    Ok(expected)
}

#[test]
fn every_family_has_llama_cpps_names_and_order() -> Outcome {
    for family in [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "phi3",
        "bert",
    ] {
        let (mut config, mut tensors) = model(family)?;
        tensors.remove("ids");
        if family == "qwen2" {
            // llama.cpp has no windows in some layers.
            let dir = tempfile::tempdir()?;
            write_model(dir.path(), &config, &tensors)?;
            let error = write(dir.path(), &GgufOptions::default()).expect_err("windows");
            assert!(error.to_string().contains("sliding_window"), "{error}");
            config["use_sliding_window"] = json!(false);
            config["layer_types"] = Json::Null;
        }
        let mut expected = expected(family, &config, &tensors)?;
        if family == "llama" {
            // Heads of 8 elements, base 10000, factor 8, 32 tokens: wavelengths 6.3, 63, 628 and 6283. 32 / 6.3 is above 4, the others are below 1.
            let factors = Tensor::new(&[1f32, 8., 8., 8.], &Device::Cpu)?;
            expected.insert("rope_freqs.weight".to_string(), factors);
        }
        for kind in [GgufType::F32, GgufType::BF16, GgufType::F16, GgufType::Q8_0] {
            let dir = tempfile::tempdir()?;
            write_model(dir.path(), &config, &tensors)?;
            let report = write(dir.path(), &GgufOptions::new(kind).with_name("tiny"))?;
            let mut file = File::open(dir.path().join("m.gguf"))?;
            let content = Content::read(&mut file)?;
            assert_eq!(
                (content.tensor_infos.len(), report.tensors),
                (expected.len(), expected.len()),
                "{family}"
            );
            for (name, tensor) in &expected {
                let stored = content.tensor(&mut file, name, &Device::Cpu)?;
                let got = stored.dequantize(&Device::Cpu)?;
                assert_eq!(got.dims(), tensor.dims(), "{family} {name}");
                let f32_always = tensor.rank() == 1
                    || name.contains("gate_inp")
                    || name.contains("position_embd")
                    || name.contains("token_types");
                let close = sqnr(tensor, &got);
                // bf16 values are exact in f32 and bf16.
                let halves = !f32_always && matches!(kind, GgufType::F16 | GgufType::Q8_0);
                let rounded = match halves {
                    true => tensor.to_dtype(DType::F16)?.to_dtype(DType::F32)?,
                    false => tensor.clone(),
                };
                match kind == GgufType::Q8_0 && !f32_always && tensor.dim(D::Minus1)? % 32 == 0 {
                    true => assert!((40.0..60.).contains(&close), "{family} {name}: {close} dB"),
                    false => assert_eq!(
                        got.flatten_all()?.to_vec1::<f32>()?,
                        rounded.flatten_all()?.to_vec1::<f32>()?,
                        "{family} {name} {kind}"
                    ),
                }
                let in_blocks = format!("{:?}", stored.dtype()) == "Q8_0";
                assert_eq!(
                    in_blocks,
                    kind == GgufType::Q8_0 && !f32_always && !report.not_in_blocks.contains(name),
                    "{family} {name}"
                );
            }
            let text = |key: &str| content.metadata[key].to_string().cloned();
            assert_eq!(text("general.name")?, "tiny");
            let architecture = match family {
                "qwen3_moe" => "qwen3moe",
                "mistral" | "mixtral" => "llama",
                other => other,
            };
            assert_eq!(text("general.architecture")?, architecture);
            let count = |key: &str| content.metadata[&format!("{architecture}.{key}")].to_u32();
            assert_eq!((count("block_count")?, count("embedding_length")?), (2, 32));
            if family.contains("mo") || family == "mixtral" {
                assert_eq!(
                    (count("expert_count")?, count("expert_used_count")?),
                    (4, 2)
                );
            }
            let Value::Array(tokens) = &content.metadata["tokenizer.ggml.tokens"] else {
                return Err("no tokens".into());
            };
            assert_eq!(
                tokens.len(),
                48,
                "{family}: as many as the embedding has rows"
            );
        }
    }
    Ok(())
}

/// What this library writes it reads: the same model and the same tokens.
#[test]
fn a_written_file_is_the_same_model() -> Outcome {
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let (mut config, mut tensors) = model(family)?;
        let ids = tensors.remove("ids").ok_or("ids")?;
        config["use_sliding_window"] = json!(false);
        config["layer_types"] = Json::Null;
        if family == "llama" {
            // The reader knows Meta's settings only.
            config["rope_parameters"]["original_max_position_embeddings"] = json!(8192);
            config["rope_parameters"]["rope_theta"] = json!(5e5);
        }
        let dir = tempfile::tempdir()?;
        write_model(dir.path(), &config, &tensors)?;
        write(dir.path(), &GgufOptions::new(GgufType::F32))?;
        let path = dir.path().join("m.gguf");
        let options = ModelOptions::new();
        let folder = open(dir.path(), &options)?.forward(&ids)?;
        let file = open(&path, &options)?.forward(&ids)?;
        let close = sqnr(&folder, &file);
        // Rotary factors are rounded to f32 in the file.
        let equal =
            folder.flatten_all()?.to_vec1::<f32>()? == file.flatten_all()?.to_vec1::<f32>()?;
        assert!(
            equal || (family == "llama" && close > 110.),
            "{family}: {close} dB"
        );

        let (theirs, ours) = (
            Tokenizer::open(dir.path())?,
            Tokenizer::from_gguf(&GgufFile::open(&path)?)?,
        );
        let text = "ab ba<s>aab";
        assert_eq!(ours.encode(text, true)?, theirs.encode(text, true)?);
        assert_eq!(ours.bos(), Some(0));
        assert!(ours.has_chat_template());

        // From the file to a folder and to a file again: the same bytes.
        let (again, second) = (dir.path().join("again"), dir.path().join("2.gguf"));
        convert(&path, &again, DType::F32)?;
        let model = Checkpoint::open_dir(&again)?;
        let options = GgufOptions::new(GgufType::F32);
        let of_file = GgufSource::new(GgufFile::open(&path)?)?;
        write_gguf(&of_file, &second, &options, &mut rewrite::quiet)?;
        let third = dir.path().join("again.gguf");
        write_gguf(&model, &third, &options.with_name("x"), &mut rewrite::quiet)?;
        let read = |path: &Path| -> Result<_, Box<dyn Error>> {
            let mut file = File::open(path)?;
            let content = Content::read(&mut file)?;
            let bits = |name: &String| {
                let tensor = content.tensor(&mut file, name, &Device::Cpu)?;
                tensor.data().map(|data| (name.clone(), data.to_vec()))
            };
            let tensors: Result<BTreeMap<_, _>, _> =
                content.tensor_infos.keys().map(bits).collect();
            Ok(tensors?)
        };
        assert_eq!(read(&path)?, read(&second)?);
        assert_eq!(read(&path)?, read(&third)?);
    }
    Ok(())
}

#[test]
fn blocks_are_llama_cpps() -> Outcome {
    let golden = candle_core::safetensors::load(golden("gguf_q8_0.safetensors"), &Device::Cpu)?;
    let (mut config, mut tensors) = model("llama")?;
    tensors.remove("ids");
    let rows = golden["values"].dim(0)?;
    config["vocab_size"] = json!(rows);
    tensors.insert(
        "model.embed_tokens.weight".to_string(),
        golden["values"].clone(),
    );
    let dir = tempfile::tempdir()?;
    write_model(dir.path(), &config, &tensors)?;
    write(dir.path(), &GgufOptions::new(GgufType::Q8_0))?;
    let mut file = File::open(dir.path().join("m.gguf"))?;
    let content = Content::read(&mut file)?;
    let stored = content.tensor(&mut file, "token_embd.weight", &Device::Cpu)?;
    let expected = golden["blocks"].to_vec2::<u8>()?;
    assert_eq!(stored.data()?.len(), 34 * expected.len());
    for (i, (block, expected)) in stored.data()?.chunks(34).zip(&expected).enumerate() {
        assert_eq!(block, expected, "block {i}");
    }
    let (got, theirs) = (stored.dequantize(&Device::Cpu)?, &golden["dequantized"]);
    assert_eq!(got.to_vec2::<f32>()?, theirs.to_vec2::<f32>()?);
    Ok(())
}

/// A real file. `tools/check_written_gguf.py` compares what is written with the gguf package and transformers.
#[test]
fn smollm2_comes_back() -> Outcome {
    let Some(path) = real_model("smollm2", "gguf") else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let (folder, file) = (dir.path().join("folder"), dir.path().join("m.gguf"));
    convert(&path, &folder, DType::F32)?;
    let checkpoint = Checkpoint::open_dir(&folder)?;
    let ids =
        Tokenizer::open(&folder)?.encode("In the beginning God created the heaven, 1611.", true)?;
    let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
    let logits = |path: &Path| open(path, &ModelOptions::new())?.forward(&ids);
    let reference = logits(&path)?;
    for (kind, least) in [
        (GgufType::F32, f64::INFINITY),
        (GgufType::F16, 60.),
        (GgufType::Q8_0, 25.),
    ] {
        let options = GgufOptions::new(kind).with_overwrite(true);
        write_gguf(&checkpoint, &file, &options, &mut rewrite::quiet)?;
        let close = sqnr(&reference, &logits(&file)?);
        assert!(close >= least, "{kind}: {close} dB");
    }
    let (theirs, ours) = (
        Tokenizer::open(&folder)?,
        Tokenizer::from_gguf(&GgufFile::open(&file)?)?,
    );
    let text = "naïve 你好 😀 don't  12345\n\n<|im_end|>";
    assert_eq!(ours.encode(text, true)?, theirs.encode(text, true)?);
    Ok(())
}
