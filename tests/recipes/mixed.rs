//! A model of three kinds of layers: the first rowwise, the last in high precision, the rest as the guard says.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::checkpoint::{TrainingMeta, resume_training, save_training};
use fp8::config::{DelayedFormat, DelayedScaling};
use fp8::load::{Checkpoint, var_builder};
use fp8::nn::{Linear, linear};
use fp8::optim::{AdamW, AdamWConfig};
use fp8::{
    Autocast, Error, ExportOptions, Fp8Module, PrepareOptions, RecipeName, check_gradients,
    fp8_autocast, prepare_fp8, save_calibrated_with, with_fp8,
};
use fp8_test_support::{assert_differ, assert_same, device, fill, flat, tensor};
use serde_json::Value;

const SIZES: [usize; 5] = [48, 64, 96, 64, 32];

#[derive(Fp8Module)]
struct Stack {
    layers: Vec<Linear>,
}

impl Stack {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let layers = SIZES.windows(2).enumerate();
        let layers = layers.map(|(i, size)| linear(size[0], size[1], vb.pp(format!("layers.{i}"))));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (last, first) = self.layers.split_last().unwrap();
        let hidden = first
            .iter()
            .try_fold(x.clone(), |x, layer| layer.forward(&x)?.relu())?;
        last.forward(&hidden)
    }
}

fn options() -> PrepareOptions {
    PrepareOptions::default()
        .with_recipe("layers.0", RecipeName::Rowwise)
        .unwrap()
        .with_off("layers.3")
        .unwrap()
}

fn mixed(seed: u64) -> (VarMap, Stack) {
    let vars = VarMap::new();
    let model = Stack::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, seed);
    let report = prepare_fp8(&model, &options()).unwrap();
    assert_eq!((report.converted(), report.skipped()), (3, 1), "{report}");
    assert!(report.unmatched.is_empty(), "{report}");
    let text = report.to_string();
    assert!(text.contains("fp8 (always rowwise)"), "{text}");
    assert!(text.contains("high precision: `layers.3` is off"), "{text}");
    (vars, model)
}

fn x(seed: u64) -> Tensor {
    tensor(seed, &[12, SIZES[0]])
}

fn eval(model: &Stack, recipe: RecipeName, x: &Tensor) -> Tensor {
    let autocast = Autocast::new(recipe).training(false);
    with_fp8(autocast, || model.forward(x)).unwrap()
}

/// One training step. Returns the loss before it.
fn step(model: &Stack, vars: &VarMap, optimizer: &mut AdamW, seed: u64) -> f32 {
    let y = with_fp8(RecipeName::Delayed, || model.forward(&x(seed))).unwrap();
    let loss = y.sqr().unwrap().mean_all().unwrap();
    let grads = loss.backward().unwrap();
    assert!(check_gradients(vars, &grads).is_empty());
    let _ = optimizer.apply(&grads).unwrap();
    flat(&loss)[0]
}

fn optimizer(vars: &VarMap) -> AdamW {
    AdamW::from_varmap(vars, AdamWConfig::default()).unwrap()
}

#[test]
fn each_layer_computes_by_its_own_recipe_in_training_and_evaluation() {
    let (vars, model) = mixed(1);
    let (x, hidden) = (x(2), tensor(3, &[12, SIZES[3]]));
    // Under any guard the first layer equals the same layer of a model without recipes of its own.
    let (plain_vars, plain) = {
        let vars = VarMap::new();
        let model = Stack::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
        fill(&vars, 1);
        prepare_fp8(&model, &PrepareOptions::default()).unwrap();
        (vars, model)
    };
    drop((vars, plain_vars));
    for training in [true, false] {
        let run = |layer: &Linear, recipe, x: &Tensor| {
            let autocast = Autocast::new(recipe).training(training);
            with_fp8(autocast, || layer.forward(x)).unwrap()
        };
        let rowwise = run(&plain.layers[0], RecipeName::Rowwise, &x);
        for guard in [
            RecipeName::Delayed,
            RecipeName::Tensorwise,
            RecipeName::Mxfp8,
        ] {
            let case = format!("{guard}, training: {training}");
            assert_same(&case, &run(&model.layers[0], guard, &x), &rowwise);
            let off = run(&model.layers[3], guard, &hidden);
            assert_same(&case, &off, &model.layers[3].forward(&hidden).unwrap());
        }
        let tensorwise = run(&plain.layers[0], RecipeName::Tensorwise, &x);
        assert_differ("the recipes differ", &tensorwise, &rowwise);
        // A disabled guard is high precision for every layer.
        let disabled = with_fp8(Autocast::disabled(), || model.forward(&x)).unwrap();
        assert_same("disabled", &disabled, &model.forward(&x).unwrap());
    }
}

#[test]
fn it_trains_and_only_delayed_layers_keep_histories() {
    let (vars, model) = mixed(4);
    let mut optimizer = optimizer(&vars);
    let losses: Vec<f32> = (0..20)
        .map(|_| step(&model, &vars, &mut optimizer, 5))
        .collect();
    assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
    for (i, layer) in model.layers[..3].iter().enumerate() {
        let state = layer.fp8_state().unwrap();
        for (role, slot) in state.slots() {
            let history = flat(&slot.tensors().unwrap().amax_history);
            let recorded = history.iter().any(|&amax| amax != 0.);
            assert_eq!(recorded, i != 0, "layer {i}, {role:?}");
        }
    }
    assert!(model.layers[3].fp8_state().is_none());
}

#[test]
fn calibrated_and_loaded_it_gives_the_logits_in_memory_to_the_bit() {
    let (vars, model) = mixed(6);
    let mut optimizer = optimizer(&vars);
    for seed in 0..5 {
        step(&model, &vars, &mut optimizer, seed);
    }
    let guard = fp8_autocast(Autocast::new(RecipeName::Delayed).calibrating(true)).unwrap();
    for seed in 0..4 {
        model.forward(&x(seed)).unwrap();
    }
    guard.close().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let recipes_own = ExportOptions::new().with_power_of_two_inputs(true);
    let report = save_calibrated_with(&model, dir.path(), &recipes_own).unwrap();
    assert_eq!(report.quantized, ["layers.0", "layers.1", "layers.2"]);
    assert_eq!(report.ignored, ["layers.3"]);
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(&report.config).unwrap()).unwrap();
    let groups = &config["quantization_config"]["config_groups"];
    let strategies = ["group_0", "group_1"].map(|group| {
        let group = &groups[group];
        let of = |what: &str| group[what]["strategy"].as_str().unwrap().to_string();
        (
            of("weights"),
            of("input_activations"),
            group["targets"].to_string(),
        )
    });
    let text = |a: &str, b: &str, c: &str| (a.to_string(), b.to_string(), c.to_string());
    let expected = [
        text("channel", "token", r#"["layers.0"]"#),
        text("tensor", "tensor", r#"["layers.1","layers.2"]"#),
    ];
    assert_eq!(strategies, expected);

    let served = Stack::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
    let held: Vec<bool> = served
        .layers
        .iter()
        .map(|l| l.static_weight().is_some())
        .collect();
    assert_eq!(held, [true, true, true, false]);
    for seed in [7, 8] {
        let expected = eval(&model, RecipeName::Delayed, &x(seed));
        assert_same("served", &served.forward(&x(seed)).unwrap(), &expected);
    }
    // A loaded layer is written unchanged, with the same input scales.
    let again = tempfile::tempdir().unwrap();
    let copy = save_calibrated_with(&served, again.path(), &recipes_own).unwrap();
    let (first, second) = (
        Checkpoint::open(&[&report.model]),
        Checkpoint::open(&[&copy.model]),
    );
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first.names(), second.names());
    let key = "fp8_power_of_two_inputs";
    assert_eq!(first.metadata(key), Some(r#"["layers.0"]"#));
    assert_eq!(second.metadata(key), first.metadata(key));
}

#[test]
fn the_training_checkpoint_holds_the_recipes_and_wants_them_back() {
    let (vars, model) = mixed(9);
    let mut before = optimizer(&vars);
    for seed in 0..3 {
        step(&model, &vars, &mut before, seed);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let recipe = RecipeName::Delayed.into();
    let meta = TrainingMeta {
        step: 3,
        recipe: Some(recipe),
        random: Value::Null,
        extra: Value::Null,
    };
    save_training(&path, &model, &vars, &before, &meta).unwrap();
    let expected: Vec<f32> = (3..6)
        .map(|seed| step(&model, &vars, &mut before, seed))
        .collect();

    let recipe = RecipeName::Delayed.into();
    let (vars, model) = mixed(10);
    let mut after = optimizer(&vars);
    resume_training(&path, &model, &vars, &mut after, Some(&recipe)).unwrap();
    let got: Vec<f32> = (3..6)
        .map(|seed| step(&model, &vars, &mut after, seed))
        .collect();
    assert_eq!(got, expected, "losses to the bit");

    // Another recipe for a layer than the one it was trained with.
    prepare_fp8(
        &model,
        &options()
            .with_recipe("layers.0", RecipeName::Tensorwise)
            .unwrap(),
    )
    .unwrap();
    let error = resume_training(&path, &model, &vars, &mut after, Some(&recipe)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TrainingCheckpoint(fp8::TrainingCheckpointError::Mismatch { .. })
        ),
        "{error}"
    );
    let text = error.to_string();
    for part in ["layer `layers.0`", "rowwise there", "tensorwise here"] {
        assert!(text.contains(part), "{text}");
    }
}

/// The amaxes that a layer's input has recorded, newest first.
fn history(layer: &Linear) -> Vec<f32> {
    let state = layer.fp8_state().unwrap();
    let (_, slot) = &state.slots()[0];
    flat(&slot.tensors().unwrap().amax_history)
}

#[test]
fn an_evaluation_inside_of_a_training_guard_takes_no_step_from_a_layer_of_its_own_recipe() {
    let (_vars, model) = mixed(11);
    let own = DelayedScaling::default().with_amax_history_len(16);
    let options = PrepareOptions::default()
        .with_recipe("layers.*", own)
        .unwrap();
    prepare_fp8(&model, &options).unwrap();
    let guard = fp8_autocast(RecipeName::Delayed).unwrap();
    eval(&model, RecipeName::Delayed, &x(1));
    model.forward(&x(2)).unwrap();
    guard.close().unwrap();
    for layer in &model.layers {
        assert!(history(layer)[0] > 0., "the training pass has recorded");
    }
}

#[test]
fn layers_that_a_step_does_not_use_keep_their_own_rule() {
    let (_vars, model) = mixed(12);
    let own = DelayedScaling::default()
        .with_amax_history_len(2)
        .with_format(DelayedFormat::E5m2);
    let options = PrepareOptions::default()
        .with_recipe("layers.0", own)
        .unwrap()
        .with_recipe("layers.1", RecipeName::Rowwise)
        .unwrap();
    prepare_fp8(&model, &options).unwrap();
    let pass = |layers: &[usize], seed| {
        let guard = fp8_autocast(RecipeName::Delayed).unwrap();
        for &i in layers {
            let layer = &model.layers[i];
            layer.forward(&tensor(seed, &[4, SIZES[i]])).unwrap();
        }
        guard.close().unwrap();
    };
    for seed in 0..5 {
        pass(&[0, 1, 2, 3], seed);
    }
    let state = |i: usize| {
        let layer = model.layers[i].fp8_state().unwrap();
        let tensors = layer.slots()[0].1.tensors().unwrap();
        (history(&model.layers[i]), flat(&tensors.quant_scale))
    };
    let before = [0, 1, 2, 3].map(state);
    assert_eq!(before[3].0.iter().filter(|&&amax| amax > 0.).count(), 5);
    assert!(
        before[1].0.iter().all(|&amax| amax == 0.),
        "rowwise keeps none"
    );
    // First only the layer with the short window and the other format is used, then only one that follows the guard.
    pass(&[0], 9);
    assert_eq!([1, 2, 3].map(state)[..], before[1..]);
    let before = [0, 1, 2].map(state);
    pass(&[3], 10);
    assert_eq!([0, 1, 2].map(state), before);
}
