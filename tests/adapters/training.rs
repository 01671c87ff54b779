//! Gradients of adapters, on bases in high precision and in FP8.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use fp8::models::{AdapterConfig, Error, Model, ModelOptions, Targets, open};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{RecipeName, check_gradients, prepare_fp8, with_fp8};
use std::collections::BTreeMap;

fn loss(model: &Model, ids: &Tensor) -> Tensor {
    let logits = model.forward(ids).expect("outputs");
    logits.sqr().and_then(|x| x.mean_all()).expect("a loss")
}

/// Each family, on a base in high precision and in FP8: every matrix gets a gradient, the base gets none.
#[test]
fn they_reach_every_adapter_and_not_the_base() -> Outcome {
    for family in ["llama", "qwen2", "phi3", "bert"] {
        let plain = Base::new(family);
        for base in [&plain, &plain.quantized()] {
            let mut model = base.open();
            let vars = add_random(&mut model, "new", &AdapterConfig::new(2), 3);
            let store = fp8::backward(&loss(&model, base.ids()))?;
            assert_eq!(check_gradients(&vars, &store), [""; 0], "{family}");
            for var in vars.all_vars() {
                let gradient = store.get(&var).ok_or("a gradient")?;
                let sum = gradient.abs()?.sum_all()?.to_scalar::<f32>()?;
                assert!(sum.is_finite() && sum > 0., "{family}: {sum}");
            }
        }
    }
    Ok(())
}

/// A base of variables, as one that was trained just before: only the adapter's matrices get gradients.
#[test]
fn variables_of_the_base_are_frozen() -> Outcome {
    for family in ["llama", "mixtral", "qwen3", "bert"] {
        let base = Base::new(family);
        let checkpoint = fp8::load::Checkpoint::open_dir(base.dir.path())?;
        let config = fp8::models::config_of(&checkpoint, base.dir.path())?;
        let own = VarMap::new();
        let vb = VarBuilder::from_varmap(&own, DType::F32, &Device::Cpu);
        let mut model = Model::new(&config, vb)?;
        let before = fp8::backward(&loss(&model, base.ids()))?;
        let tracked = |store: &candle_core::backprop::GradStore, vars: &VarMap| {
            let vars = vars.all_vars();
            vars.iter().filter(|var| store.get(var).is_some()).count()
        };
        assert!(tracked(&before, &own) >= 20, "{family}");
        let targets = match family {
            "bert" => Targets::names(["query"]),
            _ => Targets::names(["q_proj"]),
        };
        let config = AdapterConfig::new(2).with_targets(targets);
        let vars = add_random(&mut model, "new", &config, 3);
        let after = fp8::backward(&loss(&model, base.ids()))?;
        assert_eq!(
            (tracked(&after, &own), tracked(&after, &vars)),
            (0, 4),
            "{family}"
        );
    }
    Ok(())
}

/// The gradient of A and B is the slope of the loss, through the codes of an FP8 base whose inputs are not cast.
#[test]
fn they_are_the_slopes_of_the_loss() -> Outcome {
    let base = Base::new("llama").quantized();
    let inputs = fp8::load::OpenOptions::new().with_inputs(fp8::load::Inputs::WeightOnly);
    let mut model = open(
        base.dir.path(),
        &ModelOptions::new().with_checkpoint(inputs),
    )?;
    let vars = add_random(&mut model, "new", &AdapterConfig::new(2), 3);
    let store = fp8::backward(&loss(&model, base.ids()))?;
    // Along the gradient's signs, the slope is the sum of all magnitudes, far above what roundings of the loss add to a difference
    // quotient.
    let (mut slope, step) = (0f64, 1e-3);
    let mut all = vec![];
    for var in vars.all_vars() {
        let gradient = store.get(&var).ok_or("a gradient")?;
        let direction = gradient.sign()?;
        let part = (gradient * &direction)?.sum_all()?.to_scalar::<f32>()?;
        slope += f64::from(part);
        let value = var.as_tensor().copy()?;
        all.push((var, value, direction));
    }
    let at = |shift: f64| -> candle_core::Result<f64> {
        for (var, value, direction) in &all {
            var.set(&(value + (direction * shift)?)?)?;
        }
        Ok(f64::from(loss(&model, base.ids()).to_scalar::<f32>()?))
    };
    let measured = (at(step)? - at(-step)?) / (2. * step);
    // A loss in f32, a mean of sums, is off by some of its last places; the cube of the step is smaller than that.
    let rounding = 8. * f64::from(f32::EPSILON) * at(0.)? / step;
    assert!(rounding < 0.01 * slope, "{rounding} and {slope}");
    let bound = 0.01 * slope;
    assert!((measured - slope).abs() < bound, "{measured} and {slope}");
    Ok(())
}

/// Under a recipe the products of a base in high precision are cast, and the matrices of the adapter are not.
#[test]
fn training_lowers_the_loss_and_leaves_the_base() -> Outcome {
    let plain = Base::new("llama");
    for base in [&plain, &plain.quantized()] {
        let mut model = base.open();
        let untouched = values(&model.forward(base.ids())?);
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let config = AdapterConfig::new(4).with_alpha(8.).with_dropout(0.1);
        model.add_adapter("new", &config, vb)?;
        // B is zero.
        assert_eq!(values(&model.forward(base.ids())?), untouched);
        prepare_fp8(&model, &Default::default())?;
        let settings = AdamWConfig {
            lr: 0.01,
            ..AdamWConfig::default()
        };
        let mut optimizer = AdamW::from_varmap(&vars, settings)?;
        let mut losses = vec![];
        for step in 0..8 {
            model.set_dropout_seed(Some(step));
            let loss = with_fp8(RecipeName::Rowwise, || {
                Ok::<_, candle_core::Error>(loss(&model, base.ids()))
            })?;
            losses.push(loss.to_scalar::<f32>()?);
            optimizer.step(&fp8::backward(&loss)?)?;
        }
        model.set_dropout_seed(None);
        assert!(losses[7] < losses[0] * 0.9, "{losses:?}");
        assert_ne!(values(&model.forward(base.ids())?), untouched);
        model.set_adapter(None)?;
        assert_eq!(values(&model.forward(base.ids())?), untouched);
    }
    Ok(())
}

#[test]
fn the_seed_decides_what_dropout_drops() -> Outcome {
    let base = Base::new("llama");
    let mut model = base.open();
    let config = AdapterConfig::new(4).with_dropout(0.5);
    add_random(&mut model, "new", &config, 3);
    let run = |model: &Model, seed| -> Result<Vec<f32>, Box<dyn std::error::Error>> {
        model.set_dropout_seed(seed);
        Ok(values(&model.forward(base.ids())?))
    };
    let evaluated = run(&model, None)?;
    let dropped = run(&model, Some(1))?;
    assert_ne!(dropped, evaluated);
    assert_ne!(dropped, run(&model, Some(2))?);
    assert_eq!(dropped, run(&model, Some(1))?);
    assert_eq!(evaluated, run(&model, None)?);
    Ok(())
}

/// An adapter that is loaded to train on has variables of PEFT's names, with the values of the file.
#[test]
fn a_loaded_adapter_trains_on() -> Outcome {
    let base = Base::new("llama");
    let mut model = base.open();
    let vars = VarMap::new();
    model.load_trainable_adapter("tuned", adapter_dir("llama.names"), &vars)?;
    let file = adapter_dir("llama.names").join("adapter_model.safetensors");
    let stored = candle_core::safetensors::load(file, &Device::Cpu)?;
    {
        let vars = vars.data().lock().map_err(|error| error.to_string())?;
        assert_eq!(vars.len(), stored.len());
        for (name, var) in vars.iter() {
            assert_eq!(values(var), values(&stored[name]), "{name}");
        }
    }
    let store = fp8::backward(&loss(&model, base.ids()))?;
    assert_eq!(check_gradients(&vars, &store), [""; 0]);
    Ok(())
}

/// Two adapters never share variables: training one would change the other, or lose it.
#[test]
fn each_adapter_has_variables_of_its_own() -> Outcome {
    fn assert_taken<T: std::fmt::Debug>(outcome: Result<T, Error>) {
        match outcome {
            Err(Error::AdapterVariable { name, variable }) => {
                assert_eq!(name, "second");
                assert!(variable.contains("layers.0."), "{variable}");
            }
            other => panic!("{other:?}"),
        }
    }
    let base = Base::new("llama");
    let mut model = base.open();
    let vars = VarMap::new();
    model.load_trainable_adapter("first", adapter_dir("llama.names"), &vars)?;
    let all = |vars: &VarMap| -> BTreeMap<String, Vec<f32>> {
        let vars = vars.data().lock().expect("not poisoned");
        let values_of = vars.iter().map(|(name, var)| (name.clone(), values(var)));
        values_of.collect()
    };
    let before = all(&vars);
    assert_taken(model.load_trainable_adapter("second", adapter_dir("llama.names"), &vars));
    let config = model.adapter_config("first")?.clone();
    let vb = || VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    assert_taken(model.add_adapter("second", &config, vb()));
    assert_eq!(all(&vars), before);
    assert_eq!(model.adapters(), ["first"]);
    // With a prefix they have names of their own.
    model.add_adapter("second", &config, vb().pp("second"))?;
    assert_eq!(all(&vars).len(), 2 * before.len());
    Ok(())
}
