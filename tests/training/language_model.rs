//! Packed documents, recomputed layers and a loss by parts.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use fp8::models::{Llama, LlamaConfig};
use fp8::nn::loss::cross_entropy;
use fp8_test_support::language_model;
use std::collections::BTreeMap;

fn ids(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + 11) % 90).collect()
}

fn gradients(vars: &VarMap, loss: &Tensor) -> BTreeMap<String, Vec<f32>> {
    let grads = fp8::backward(loss).expect("gradients");
    let vars = vars.data().lock().expect("a lock");
    let of = |(name, var): (&String, &candle_core::Var)| {
        let grad = grads.get(var).expect(name).flatten_all().expect("flat");
        (name.clone(), grad.to_vec1().expect("values"))
    };
    vars.iter().map(of).collect()
}

fn assert_close(what: &str, a: &[f32], b: &[f32], bound: f32) {
    assert_eq!(a.len(), b.len(), "{what}");
    let largest = b.iter().fold(0f32, |m, x| m.max(x.abs()));
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            (a - b).abs() <= bound * largest,
            "{what}: element {i}: {a} against {b}"
        );
    }
}

/// Places and targets of the tokens of documents: each predicts the next of its document.
fn predictions(tokens: &[u32], lengths: &[usize]) -> (Vec<u32>, Vec<u32>) {
    let mut start = 0;
    let mut pairs = vec![];
    for length in lengths {
        let own = start..start + length - 1;
        pairs.extend(own.map(|place| (place as u32, tokens[place + 1])));
        start += length;
    }
    pairs.into_iter().unzip()
}

/// Features and gradients of documents in packed rows are those of each document alone. The order of sums may differ.
#[test]
fn packed_documents_do_not_see_each_other() -> Outcome {
    let (model, vars) = model(VOCAB);
    let (rows, context) = (2, 12);
    let tokens = ids(rows * context);
    let packed = [vec![5, 7], vec![3, 1, 8]];
    let row = Tensor::from_slice(&tokens, (rows, context), &Device::Cpu)?;
    let features = model.features(&row, &packed)?;
    let lengths: Vec<usize> = packed.concat();
    let (places, targets) = predictions(&tokens, &lengths);
    let loss = model.loss(&features, &places, &targets)?;
    let together = gradients(&vars, &loss);

    let flat = features.flatten_to(1)?;
    let (mut start, mut sum) = (0, None::<Tensor>);
    for &length in &lengths {
        let own = Tensor::from_slice(&tokens[start..start + length], (1, length), &Device::Cpu)?;
        let logits = model.forward(&own)?;
        let alone = model.features(&own, &[vec![length]])?;
        let part = flat
            .narrow(0, start, length)?
            .flatten_all()?
            .to_vec1::<f32>()?;
        let alone = alone.flatten_all()?.to_vec1::<f32>()?;
        assert_eq!(part, alone, "features");
        if length > 1 {
            let logits = logits.squeeze(0)?.narrow(0, 0, length - 1)?;
            let targets =
                Tensor::from_slice(&tokens[start + 1..start + length], length - 1, &Device::Cpu)?;
            let part = (cross_entropy(&logits, &targets)? * (length - 1) as f64)?;
            sum = Some(match sum {
                None => part,
                Some(sum) => (sum + part)?,
            });
        }
        start += length;
    }
    let alone = (sum.ok_or("no document")? / places.len() as f64)?;
    assert_close("loss", &[loss.to_scalar()?], &[alone.to_scalar()?], 1e-5);
    for (name, expected) in gradients(&vars, &alone) {
        assert_close(&name, &together[&name], &expected, 2e-4);
    }
    Ok(())
}

#[test]
fn documents_must_fill_their_rows() -> Outcome {
    let (model, _) = model(VOCAB);
    let row = Tensor::from_slice(&ids(6), (1, 6), &Device::Cpu)?;
    for documents in [vec![vec![5]], vec![vec![6], vec![6]], vec![]] {
        let error = model
            .features(&row, &documents)
            .expect_err("an error")
            .to_string();
        assert!(error.contains("do not fill 1 rows of 6 tokens"), "{error}");
    }
    let features = model.features(&row, &[vec![6]])?;
    for (places, targets) in [(vec![], vec![]), (vec![1], vec![1, 2])] {
        let error = model
            .loss(&features, &places, &targets)
            .expect_err("an error");
        assert!(error.to_string().contains("places"), "{error}");
    }
    Ok(())
}

/// A head in FP8 computes logits in parts of 64 MiB, and again in the backward pass.
#[test]
fn a_loss_in_parts_is_the_loss() -> Outcome {
    // Two parts of 32 tokens: what a mean over a part is divided by changes no bit.
    let (vocab, tokens) = (270_000, 64);
    let mut json = language_model::config(vocab);
    json["tie_word_embeddings"] = false.into();
    let (model, vars) = model_of(&LlamaConfig::parse("config.json", &json)?);
    fp8::prepare_fp8(&model, &Default::default())?;
    let text = ids(tokens + 1);
    let (row, targets) = (&text[..tokens], &text[1..]);
    let row = Tensor::from_slice(row, (1, tokens), &Device::Cpu)?;
    let losses = [true, false].map(|in_parts| -> Outcome<_> {
        // Scales of rows do not depend on the other rows.
        let guard = fp8::fp8_autocast("rowwise_with_gw_hp")?;
        let features = model.features(&row, &[vec![tokens]])?;
        let places: Vec<u32> = (0..tokens as u32).collect();
        let loss = match in_parts {
            true => model.loss(&features, &places, targets)?,
            false => {
                let targets = Tensor::from_slice(targets, tokens, &Device::Cpu)?;
                cross_entropy(&model.forward(&row)?.squeeze(0)?, &targets)?
            }
        };
        let gradients = gradients(&vars, &loss);
        guard.close()?;
        Ok((loss.to_scalar::<f32>()?, gradients))
    });
    let [(parts, own), (whole, all)] = losses.map(|made| made.expect("a loss"));
    assert_close("loss", &[parts], &[whole], 1e-5);
    for (name, expected) in all {
        assert_close(&name, &own[&name], &expected, 1e-4);
    }
    Ok(())
}

#[test]
fn a_loss_of_some_tokens_is_that_of_their_logits() -> Outcome {
    let (model, vars) = model(VOCAB);
    let text = ids(41);
    let row = Tensor::from_slice(&text[..40], (1, 40), &Device::Cpu)?;
    for every in [1, 3] {
        let places: Vec<u32> = (0..40).step_by(every).collect();
        let targets: Vec<u32> = places.iter().map(|&i| text[i as usize + 1]).collect();
        let loss = model.loss(&model.features(&row, &[vec![40]])?, &places, &targets)?;
        let count = places.len();
        let [places, targets] =
            [places, targets].map(|ids| Tensor::from_vec(ids, count, &Device::Cpu));
        let logits = model.forward(&row)?.squeeze(0)?.index_select(&places?, 0)?;
        let whole = cross_entropy(&logits, &targets?)?;
        assert_close("loss", &[loss.to_scalar()?], &[whole.to_scalar()?], 1e-5);
        let own = gradients(&vars, &loss);
        for (name, expected) in gradients(&vars, &whole) {
            assert_close(&name, &own[&name], &expected, 1e-4);
        }
    }
    Ok(())
}

/// With operands as they are or in bf16.
#[test]
fn a_loss_alone_is_the_loss() -> Outcome {
    let (mut model, _) = model(30_000);
    let text = ids(61);
    let row = Tensor::from_slice(&text[..60], (1, 60), &Device::Cpu)?;
    let (places, targets): (Vec<u32>, Vec<u32>) = (0..60).zip(text[1..].iter().copied()).unzip();
    for operands in [None, Some(DType::BF16)] {
        model.set_operands(operands);
        let features = model.features(&row, &[vec![60]])?;
        let loss = model.loss(&features, &places, &targets)?;
        let alone = model.loss_value(&features, &places, &targets)?;
        assert!(!alone.track_op());
        let [loss, alone] = [loss, alone].map(|loss| loss.to_scalar::<f32>().expect("f32"));
        assert_close("loss", &[loss], &[alone], 1e-6);
    }
    Ok(())
}

/// The layers are computed again in the backward pass, with the same bits.
#[test]
fn recomputation_changes_no_bit() -> Outcome {
    let loss = |model: &Llama| -> fp8::models::Result<Tensor> {
        let tokens = ids(20);
        let row = Tensor::from_slice(&tokens, (2, 10), &Device::Cpu)?;
        let documents = [vec![4, 6], vec![10]];
        let features = model.features(&row, &documents)?;
        let (places, targets) = predictions(&tokens, &documents.concat());
        model.loss(&features, &places, &targets)
    };
    for recipe in [None, Some("delayed"), Some("rowwise")] {
        let results = [false, true].map(|recomputes| {
            let (mut model, vars) = model(VOCAB);
            model.set_recomputation(recomputes);
            let Some(recipe) = recipe else {
                let loss = loss(&model).expect("a loss");
                return (
                    loss.to_scalar::<f32>().expect("f32"),
                    gradients(&vars, &loss),
                );
            };
            fp8::prepare_fp8(&model, &Default::default()).expect("prepared");
            let guard = fp8::fp8_autocast(recipe).expect("a guard");
            let loss = loss(&model).expect("a loss");
            let grads = gradients(&vars, &loss);
            guard.close().expect("closed");
            (loss.to_scalar::<f32>().expect("f32"), grads)
        });
        assert_eq!(results[0], results[1], "{recipe:?}");
    }
    Ok(())
}
