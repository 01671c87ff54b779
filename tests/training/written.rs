//! The trained model as a file.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use fp8::models::{Model, ModelOptions, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme, Source, WriteOptions};
use fp8::training::{TrainableModel, Trained, Trainer};

fn logits(model: &Model) -> Vec<f32> {
    let ids = Tensor::new(&[[5u32, 9, 40, 41, 7]], &Device::Cpu).expect("ids");
    let logits = model.forward(&ids).expect("logits");
    logits.flatten_all().expect("flat").to_vec1().expect("f32")
}

/// High precision keeps the logits to the bit; FP8 is what `fp8 quantize` makes of that file.
#[test]
fn a_trained_model_is_written_in_high_precision_and_in_fp8() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let TrainableModel {
        model,
        vars,
        source,
    } = TrainableModel::open(dir, DType::F32, &Device::Cpu)?;
    let before = logits(&model);
    let mut run = Trainer::new("run", model, vars, objective(dir), settings("f32", 1))?;
    steps(&mut run, 3)?;
    let after = logits(run.model());
    assert!(after != before);

    let trained = Trained::new(&*source, run.vars())?;
    let out = dir.join("trained");
    rewrite::dequantize(
        &trained,
        &out,
        None,
        &WriteOptions::new(),
        &mut rewrite::quiet,
    )?;
    let again = TrainableModel::open(&out, DType::F32, &Device::Cpu)?;
    assert!(logits(&again.model) == after);
    let served = logits(&open(&out, &ModelOptions::new())?);
    assert!(served == after);
    assert!(out.join("tokenizer.json").exists());

    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let [direct, again] = ["direct", "again"].map(|name| dir.join(name));
    rewrite::quantize(&trained, &direct, &options, &mut rewrite::quiet)?;
    let file = fp8::load::Checkpoint::open_dir(&out)?;
    rewrite::quantize(&file, &again, &options, &mut rewrite::quiet)?;
    let [direct, again] = [direct, again].map(|dir| std::fs::read(dir.join("model.safetensors")));
    assert!(direct? == again?);
    Ok(())
}

/// An FP8 file is trained as what it means.
#[test]
fn training_begins_with_the_values_of_an_fp8_file() -> Outcome {
    let dir = folder();
    let dir = dir.path();
    let fp8_dir = dir.join("fp8");
    let file = fp8::load::Checkpoint::open_dir(dir)?;
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    rewrite::quantize(&file, &fp8_dir, &options, &mut rewrite::quiet)?;
    let base = TrainableModel::open(&fp8_dir, DType::F32, &Device::Cpu)?;
    let codes = fp8::load::Checkpoint::open_dir(&fp8_dir)?;
    let vars = base.vars.data().lock().expect("a lock");
    assert_eq!(
        vars.len(),
        2 + 2 * 9,
        "embedding, norm, and nine tensors of a layer"
    );
    for (name, var) in vars.iter() {
        let value = Source::value(&codes, name, DType::F32)?;
        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        assert_eq!(flat(var)?, flat(&value)?, "{name}");
    }
    Ok(())
}
