//! Adapters that PEFT wrote.

use crate::support::*;
use candle_core::{DType, Device};
use candle_nn::VarMap;
use fp8::models::Targets;
use fp8_test_support::sqnr;
use serde_json::{Value, json};
use std::fs;

/// f32 has 24 bits, 144 dB; two layers lose a part of them.
const LEAST: f64 = 110.;

#[test]
fn models_with_them_give_the_outputs_of_peft() {
    for name in ADAPTERS {
        let base = Base::new(family(name));
        let mut model = base.open();
        let paths = model.load_adapter("tuned", adapter_dir(name)).expect(name);
        assert!(!paths.is_empty(), "{name}");
        let got = model.forward(base.ids()).expect("outputs");
        let (close, far) = (
            sqnr(&expected(name), &got),
            sqnr(&expected(name), &base.golden.output),
        );
        assert!(
            close >= LEAST,
            "{name}: {close} dB, the base alone has {far} dB"
        );
        assert!(
            far < 40.,
            "{name}: the adapter changes too little: {far} dB"
        );
    }
}

/// The tensors have PEFT's names, dtype aside, and the configuration has PEFT's values.
#[test]
fn they_are_written_as_peft_wrote_them() -> Outcome {
    for name in ADAPTERS {
        let base = Base::new(family(name));
        let mut model = base.open();
        let out = tempfile::tempdir()?;
        // Once as loaded, once as trained on.
        model.load_adapter("frozen", adapter_dir(name))?;
        model.load_trainable_adapter("trained", adapter_dir(name), &VarMap::new())?;
        for own in ["frozen", "trained"] {
            let dir = out.path().join(own);
            model.save_adapter(own, &dir)?;
            let read = |dir: &std::path::Path| {
                candle_core::safetensors::load(dir.join("adapter_model.safetensors"), &Device::Cpu)
            };
            let (got, mut expected) = (read(&dir)?, read(&adapter_dir(name))?);
            // Our BERT has no pooler.
            expected.retain(|tensor, _| !tensor.contains("pooler"));
            assert_eq!(got.len(), expected.len(), "{name}");
            for (tensor, expected) in expected {
                let got = got.get(&tensor).ok_or(format!("{name}: {tensor}"))?;
                assert_eq!(got.dims(), expected.dims(), "{name}: {tensor}");
                assert_eq!(
                    values(got),
                    values(&expected.to_dtype(DType::F32)?),
                    "{name}: {tensor}"
                );
            }
            let config = |dir: &std::path::Path| -> Result<Value, Box<dyn std::error::Error>> {
                let text = fs::read_to_string(dir.join("adapter_config.json"))?;
                Ok(serde_json::from_str(&text)?)
            };
            let (got, expected) = (config(&dir)?, config(&adapter_dir(name))?);
            for key in ["peft_type", "r", "lora_alpha", "target_modules"] {
                assert!(got.get(key).is_some(), "{name}: no {key}");
            }
            for (key, value) in got.as_object().ok_or("an object")? {
                // PEFT writes an empty list for a model with fused experts.
                let none = value.is_null() && expected[key] == json!([]);
                assert!(none || *value == expected[key], "{name}: {key}: {value}");
            }
        }
    }
    Ok(())
}

/// PEFT's own model may have more linear layers than ours, so the names are written, and they are those of PEFT's class.
#[test]
fn all_linear_is_written_as_names() -> Outcome {
    let base = Base::new("bert");
    let mut model = base.open();
    let config = fp8::models::AdapterConfig::new(2);
    add_random(&mut model, "new", &config, 7);
    let out = tempfile::tempdir()?;
    model.save_adapter("new", out.path())?;
    model.load_adapter("again", out.path())?;
    let Targets::Names(names) = &model.adapter_config("again")?.targets else {
        return Err("not names".into());
    };
    assert_eq!(names.len(), 12);
    assert!(
        names.contains(&"encoder.layer.1.attention.self.query".to_string()),
        "{names:?}"
    );
    assert_eq!(
        model.adapter_config("again")?.task.as_deref(),
        Some("FEATURE_EXTRACTION")
    );
    Ok(())
}
