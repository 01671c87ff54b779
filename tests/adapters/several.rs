//! Several adapters on one base.

use crate::support::*;
use candle_core::Tensor;
use fp8::models::{AdapterConfig, CausalLm, GenerationOptions, Model, Targets, generate};
use fp8::{Fp8Layer, Fp8Module, Visitor};
use std::ops::ControlFlow;

/// Logits of the whole row, and the tokens that generation with a cache takes.
fn results(model: &Model, ids: &Tensor) -> (Vec<f32>, Vec<Vec<u32>>) {
    let logits = values(&model.forward(ids).expect("logits"));
    let llama = model.llama().expect("a language model");
    let prompts = [vec![3, 4, 5], vec![7]];
    let options = GenerationOptions::default().with_max_new_tokens(8);
    let outputs = generate(
        llama,
        &prompts,
        &options,
        &mut |_| ControlFlow::Continue(()),
    );
    let tokens = outputs.expect("tokens").into_iter();
    (logits, tokens.map(|output| output.tokens).collect())
}

/// On a base in high precision and on one in FP8: each adapter gives what it gives alone, and none what the base gives.
#[test]
fn each_gives_what_it_gives_alone() -> Outcome {
    let plain = Base::new("llama");
    for base in [&plain, &plain.quantized()] {
        let names = ["llama.names", "llama.all"];
        let untouched = results(&base.open(), base.ids());
        let alone = names.map(|name| {
            let mut model = base.open();
            model.load_adapter(name, adapter_dir(name)).expect(name);
            results(&model, base.ids())
        });
        assert_ne!(alone[0].0, alone[1].0);
        assert_ne!(alone[0].0, untouched.0);
        let mut model = base.open();
        for name in names {
            model.load_adapter(name, adapter_dir(name))?;
        }
        assert_eq!(model.adapters(), names);
        for which in [1, 0, 1] {
            model.set_adapter(Some(names[which]))?;
            assert_eq!(model.active_adapter(), Some(names[which]));
            assert!(
                results(&model, base.ids()) == alone[which],
                "{}",
                names[which]
            );
        }
        model.set_adapter(None)?;
        assert!(results(&model, base.ids()) == untouched, "no adapter");
        // Without the active one, none is active.
        model.set_adapter(Some(names[0]))?;
        model.remove_adapter(names[0])?;
        assert_eq!(
            (model.adapters(), model.active_adapter()),
            (vec![names[1]], None)
        );
        assert!(results(&model, base.ids()) == untouched, "removed");
    }
    Ok(())
}

/// Rows of different lengths, with a cache, as each row without one.
#[test]
fn caches_hold_what_the_adapter_computes() -> Outcome {
    let base = Base::new("qwen3");
    let mut model = base.open();
    model.load_adapter("tuned", adapter_dir("qwen3.layers"))?;
    let llama = model.llama().ok_or("a language model")?;
    let row = base.ids().narrow(0, 0, 1)?;
    let all = model.forward(&row)?.squeeze(0)?;
    let mut cache = llama.new_cache(1, 16)?;
    for i in 0..row.dim(1)? {
        let last = llama.last_logits(&row.narrow(1, i, 1)?, &mut cache)?;
        assert_eq!(values(&last), values(&all.get(i)?), "token {i}");
    }
    Ok(())
}

#[test]
fn the_active_one_is_shown_beside_its_layers() -> Outcome {
    #[derive(Default)]
    struct Names(Vec<String>);
    impl Visitor for Names {
        fn layer(&mut self, layer: &dyn Fp8Layer) {
            self.0.extend(layer.path().map(String::from));
        }

        fn tensor(&mut self, path: Option<&str>, _: &Tensor) {
            self.0.extend(path.map(String::from));
        }
    }
    let names = |model: &Model| {
        let mut names = Names::default();
        model.visit(&mut names);
        names.0
    };
    let base = Base::new("llama");
    let mut model = base.open();
    let before = names(&model);
    let config = AdapterConfig::new(2).with_targets(Targets::names(["k_proj"]));
    add_random(&mut model, "one", &config, 1);
    let shown = names(&model);
    let place = shown
        .iter()
        .position(|name| name == "model.layers.1.self_attn.k_proj");
    let place = place.ok_or("the layer")?;
    assert_eq!(
        shown[place + 1..place + 3],
        ["lora_A", "lora_B"].map(|own| format!("model.layers.1.self_attn.k_proj.{own}.weight"))
    );
    assert_eq!(shown.len(), before.len() + 4);
    model.set_adapter(None)?;
    assert_eq!(names(&model), before);
    Ok(())
}
