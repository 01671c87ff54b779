//! The model of `train_gpt`: what is served from its file is what was calibrated.

#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/gpt/mod.rs"]
mod gpt;
#[allow(dead_code, reason = "scaled_mnist uses the rest")]
#[path = "../../examples/shared/parameters.rs"]
mod parameters;

use crate::net::{dir, json_of};
use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::RecipeName;
use fp8::load::var_builder;
use fp8::{
    Autocast, ExportOptions, PrepareOptions, fp8_autocast, prepare_fp8, save_calibrated_with,
};
use fp8_test_support::{assert_differ, assert_same, assert_text, device};
use gpt::attention::Operands;
use gpt::{Gpt, GptConfig, initial};
use parameters::set_plain;

fn config(attention: Operands) -> GptConfig {
    GptConfig {
        vocab_size: 256,
        hidden_size: 128,
        num_layers: 2,
        num_heads: 2,
        context: 40,
        attention: Some(attention),
        ..GptConfig::default()
    }
}

fn model(config: &GptConfig) -> Gpt {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let gpt = Gpt::new(config, vb).unwrap();
    let mut initial = initial(config, 3);
    set_plain(&vars, |name, shape| {
        // Ten times the usual spread, so that attention is far from uniform.
        let value = initial(name, shape)?;
        Ok(value.map(|value| value * 10.).transpose()?)
    })
    .unwrap();
    gpt
}

fn tokens(seed: u32) -> Tensor {
    let ids: Vec<u32> = (0..2 * 40)
        .map(|i| (i * i * 7 + i * 31 + seed * 101) % 256)
        .collect();
    Tensor::from_vec(ids, (2, 40), &device()).unwrap()
}

fn logits(model: &Gpt, autocast: Option<Autocast>) -> Tensor {
    let guard = autocast.map(|autocast| fp8_autocast(autocast).unwrap());
    let y = model.forward(&tokens(9)).unwrap();
    if let Some(guard) = guard {
        guard.close().unwrap();
    }
    y
}

#[test]
fn what_is_served_is_what_was_calibrated_to_the_bit() {
    for attention in [Operands::F32, Operands::Bf16] {
        for name in RecipeName::ALL {
            let case = format!("{name}, {attention:?}");
            let config = config(attention);
            let model = model(&config);
            prepare_fp8(&model, &PrepareOptions::default()).unwrap();
            let guard = fp8_autocast(Autocast::new(name).calibrating(true)).unwrap();
            for seed in 0..2 {
                model.forward::<Tensor>(&tokens(seed)).unwrap();
            }
            guard.close().unwrap();
            let calibrated = logits(&model, Some(Autocast::new(name).training(false)));

            let dir = dir();
            let entries = serde_json::to_value(&config).unwrap().as_object().cloned();
            let options = ExportOptions::new()
                .with_config(entries.unwrap())
                .with_power_of_two_inputs(true);
            let report = match (name, save_calibrated_with(&model, dir.path(), &options)) {
                (RecipeName::Direct, report) => {
                    // The files hold E4M3.
                    assert_text(
                        &case,
                        report.unwrap_err(),
                        &["blocks.0.attention.query", "e5m2"],
                    );
                    continue;
                }
                (_, report) => report.unwrap_or_else(|error| panic!("{case}: {error}")),
            };
            let config: GptConfig = serde_json::from_value(json_of(&report.config)).unwrap();
            let vb = var_builder(&[&report.model], DType::F32, &device()).unwrap();
            let served = logits(&Gpt::new(&config, vb).unwrap(), None);
            match name {
                // In training one input scale is computed from the tensor itself; the file has the calibrated scale.
                RecipeName::Tensorwise | RecipeName::Current | RecipeName::Hybrid => {
                    assert_differ(&case, &served, &calibrated);
                }
                _ => assert_same(&case, &served, &calibrated),
            }
        }
    }
}
