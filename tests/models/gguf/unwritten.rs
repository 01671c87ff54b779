//! What is not written, and what is left behind.

use super::Outcome;
use super::written::{Tensors, model, tokenizer, write, write_model};
use candle_core::DType;
use fp8::load::Checkpoint;
use fp8::models::gguf::{GgufFile, GgufOptions, GgufType, write_gguf};
use fp8::rewrite;
use serde_json::{Value as Json, json};
use std::fs;
use std::ops::ControlFlow;

#[test]
fn what_llama_cpp_cannot_compute_is_refused() -> Outcome {
    let (config, mut tensors) = model("llama")?;
    tensors.remove("ids");
    let refused = |case: &str, change: &dyn Fn(&mut Json, &mut Tensors, &mut Json)| -> Outcome {
        let dir = tempfile::tempdir()?;
        let (mut config, mut tensors, mut tokens) = (config.clone(), tensors.clone(), tokenizer());
        change(&mut config, &mut tensors, &mut tokens);
        write_model(dir.path(), &config, &tensors)?;
        fs::write(dir.path().join("tokenizer.json"), tokens.to_string())?;
        let error = write(dir.path(), &GgufOptions::new(GgufType::F16)).expect_err(case);
        assert!(error.to_string().contains(case), "{case}: {error}");
        let names = fs::read_dir(dir.path())?.count();
        assert_eq!(names, 4, "{case}: nothing is left");
        Ok(())
    };
    refused("dynamic", &|config, _, _| {
        config["rope_parameters"] = json!({ "rope_type": "dynamic", "factor": 2.0 });
    })?;
    refused("gpt_neox", &|config, _, _| {
        config["model_type"] = json!("gpt_neox")
    })?;
    refused("model.extra.weight", &|_, tensors, _| {
        let extra = tensors["model.norm.weight"].clone();
        tensors.insert("model.extra.weight".to_string(), extra);
    })?;
    refused("model.layers.1.mlp.up_proj.weight", &|_, tensors, _| {
        let name = "model.layers.1.mlp.up_proj.weight";
        let large = tensors[name].to_dtype(DType::F32).and_then(|x| x * 1e6);
        tensors.insert(name.to_string(), large.expect("a product"));
    })?;
    refused("--pre", &|_, _, tokens| {
        tokens["pre_tokenizer"]["pretokenizers"][0] =
            json!({ "type": "Digits", "individual_digits": false });
    })?;
    refused("Unigram", &|_, _, tokens| {
        tokens["model"] =
            json!({ "type": "Unigram", "unk_id": 0, "vocab": [["<s>", 0.0], ["a", -1.0]] });
    })?;
    refused("not below 48", &|_, _, tokens| {
        tokens["model"]["vocab"]["x"] = json!(48)
    })
}

#[test]
fn a_mixture_that_does_not_normalize_its_weights_is_refused() -> Outcome {
    let (mut config, mut tensors) = model("qwen3_moe")?;
    tensors.remove("ids");
    config["norm_topk_prob"] = json!(false);
    let dir = tempfile::tempdir()?;
    write_model(dir.path(), &config, &tensors)?;
    fs::write(dir.path().join("tokenizer.json"), tokenizer().to_string())?;
    let error = write(dir.path(), &GgufOptions::new(GgufType::F16)).expect_err("refused");
    assert!(
        error
            .to_string()
            .contains("norm_topk_prob is false, expected true"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_file_appears_whole_or_not_at_all() -> Outcome {
    let (config, mut tensors) = model("qwen3")?;
    tensors.remove("ids");
    let dir = tempfile::tempdir()?;
    write_model(dir.path(), &config, &tensors)?;
    let checkpoint = Checkpoint::open_dir(dir.path())?;
    let path = dir.path().join("m.gguf");
    let options = GgufOptions::default();
    let mut told = vec![];
    let mut stop = |progress: rewrite::Progress<'_>| {
        told.push((progress.name.to_string(), progress.done));
        match told.len() {
            8 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    };
    let error = write_gguf(&checkpoint, &path, &options, &mut stop).expect_err("cancelled");
    assert!(error.to_string().contains("cancelled"), "{error}");
    assert_eq!(told[0], ("model.embed_tokens.weight".to_string(), 0));
    assert!(
        told.windows(2).all(|pair| pair[0].1 < pair[1].1),
        "{told:?}"
    );
    assert_eq!(fs::read_dir(dir.path())?.count(), 4);

    fs::write(&path, "mine")?;
    let error = write_gguf(&checkpoint, &path, &options, &mut rewrite::quiet).expect_err("there");
    assert!(error.to_string().contains("m.gguf exists"), "{error}");
    assert_eq!(fs::read(&path)?, b"mine");
    write_gguf(
        &checkpoint,
        &path,
        &options.with_overwrite(true),
        &mut rewrite::quiet,
    )?;
    GgufFile::open(&path)?;
    Ok(())
}
