//! Intel's flow line by line: calibrate or train, save weights and FP8 state without an optimizer, load, evaluate.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_core::ScaleRounding;
use fp8_recipes::checkpoint::{load_fp8_state, save_fp8_state};
use fp8_recipes::config::{DelayedFormat, DelayedScaling, Recipe};
use fp8_recipes::{
    Autocast, Error, FilesError, Fp8Module, PrepareOptions, Role, load, nn, prepare_fp8,
    save_calibrated, with_fp8,
};
use fp8_test_support::bits;
use std::path::Path;

const CPU: &Device = &Device::Cpu;
const FORMATS: [DelayedFormat; 3] = [
    DelayedFormat::Hybrid,
    DelayedFormat::E4m3,
    DelayedFormat::E5m2,
];

#[derive(Fp8Module)]
struct Net {
    up: nn::Linear,
    norm: nn::LayerNorm,
    down: nn::Linear,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> Self {
        Self {
            up: nn::linear(16, 32, vb.pp("up")).unwrap(),
            norm: nn::layer_norm(32, 1e-5, vb.pp("norm")).unwrap(),
            down: nn::linear_no_bias(32, 8, vb.pp("down")).unwrap(),
        }
    }

    /// Different weights each time.
    fn fresh() -> Self {
        let net = Self::new(VarBuilder::from_varmap(&VarMap::new(), DType::F32, CPU));
        prepare_fp8(&net, &PrepareOptions::default().with_amax_history_len(8)).unwrap();
        net
    }

    fn eval(&self, recipe: &DelayedScaling, x: &Tensor) -> Vec<u32> {
        let guard = Autocast::new(recipe.clone()).training(false);
        bits(&with_fp8(guard, || self.forward(x)).unwrap())
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down.forward(&self.norm.forward(&self.up.forward(x)?)?)
    }
}

/// Rows whose largest magnitude is `amax`.
fn input(amax: f32) -> Tensor {
    let values: Vec<f32> = (0..64)
        .map(|i| amax * ((i * 37 + 11) % 64 - 31) as f32 / 32.)
        .collect();
    Tensor::from_vec(values, (4, 16), CPU).unwrap()
}

/// Each batch in a guard of its own.
fn calibrate(net: &impl Module, recipe: impl Into<Recipe>) {
    let recipe = recipe.into();
    for amax in [1., 3., 2.] {
        let guard = Autocast::new(recipe.clone()).calibrating(true);
        with_fp8(guard, || net.forward(&input(amax))).unwrap();
    }
}

/// quant_scale, dequant_scale and history.
fn slot(layer: &nn::Linear, role: Role) -> (f32, f32, Vec<f32>) {
    let state = layer.fp8_state().unwrap();
    let now = state.slot(role).unwrap().tensors().unwrap();
    let one = |x: Tensor| x.to_vec1::<f32>().unwrap()[0];
    let history = now.amax_history.to_vec1().unwrap();
    (one(now.quant_scale), one(now.dequant_scale), history)
}

/// As `amax_and_scale_update` of `intel_extension_for_pytorch.quantization.fp8` leaves them: the amaxes 1, 3 and 2 give
/// `2^floor(log2(448 / 3)) = 128` in E4M3 and `2^floor(log2(57344 / 3)) = 16384` in E5M2.
#[test]
fn calibration_follows_the_rule_of_the_recipe() {
    for (format, margin, scale) in [
        (DelayedFormat::Hybrid, 0, 128.),
        (DelayedFormat::E4m3, 0, 128.),
        (DelayedFormat::E4m3, 2, 32.),
        (DelayedFormat::E5m2, 0, 16384.),
    ] {
        let net = Net::fresh();
        let recipe = DelayedScaling::ipex().with_format(format);
        calibrate(&net, recipe.with_margin(margin).with_amax_history_len(8));
        let (quant, dequant, history) = slot(&net.up, Role::Input);
        assert_eq!((quant, dequant), (scale, 1. / scale), "{format} {margin}");
        assert_eq!(history, [2., 3., 1., 0., 0., 0., 0., 0.], "newest first");
        let weight = net.up.weight().unwrap().abs().unwrap();
        let amax = weight.flatten_all().unwrap().max(0).unwrap();
        let amax = amax.to_scalar::<f32>().unwrap();
        let (.., history) = slot(&net.up, Role::Weight);
        assert_eq!(history, [amax, amax, amax, 0., 0., 0., 0., 0.]);
    }
    // Exact scales: 448 / 3, as the reciprocal of what a file holds.
    let net = Net::fresh();
    calibrate(&net, DelayedScaling::default());
    let (quant, dequant, _) = slot(&net.up, Role::Input);
    assert_eq!(dequant, 1. / (448. / 3.));
    assert_eq!(quant, 1. / dequant);
    // Recipes without a history: amax / MAX.
    let net = Net::fresh();
    calibrate(&net, "tensorwise".parse::<Recipe>().unwrap());
    let (quant, dequant, history) = slot(&net.up, Role::Input);
    assert_eq!((quant, dequant), (1. / (3. / 448.), 3. / 448.));
    assert_eq!(history, [0.; 8]);
}

/// The file holds the scales with which the calibrated model computes, and gives the same bits.
#[test]
fn an_export_holds_the_scales_of_the_rule() {
    for rounding in [ScaleRounding::Exact, ScaleRounding::PowerOfTwo] {
        for margin in [0, 1] {
            let net = Net::fresh();
            let recipe = DelayedScaling::default().with_margin(margin);
            let recipe = recipe.with_scale_rounding(rounding);
            calibrate(&net, recipe.clone());
            let dir = tempfile::tempdir().unwrap();
            let report = save_calibrated(&net, dir.path()).unwrap();
            let file = load::Checkpoint::open(&[&report.model]).unwrap();
            for (layer, path) in [(&net.up, "up"), (&net.down, "down")] {
                for (role, name) in [(Role::Input, "input_scale"), (Role::Weight, "weight_scale")] {
                    let stored = file.tensor(&format!("{path}.{name}"), CPU).unwrap();
                    assert_eq!(stored.to_vec1::<f32>().unwrap(), [slot(layer, role).1]);
                }
            }
            let vb = load::var_builder(&[&report.model], DType::F32, CPU).unwrap();
            let served = Net::new(vb).forward(&input(2.5)).unwrap();
            assert_eq!(
                bits(&served),
                net.eval(&recipe, &input(2.5)),
                "{rounding} {margin}"
            );
        }
    }
}

fn train(net: &Net, recipe: &DelayedScaling) {
    for amax in [1., 3., 2.] {
        let loss = with_fp8(recipe.clone(), || net.forward(&input(amax))).unwrap();
        let grads = loss.sqr().unwrap().mean_all().unwrap().backward().unwrap();
        let weight = net.up.weight().unwrap();
        let step = (grads.get(&weight).unwrap() * 0.1).unwrap();
        let var = candle_core::Var::from_tensor(&weight).unwrap();
        var.set(&(&weight - step).unwrap()).unwrap();
    }
}

#[test]
fn every_format_evaluates_to_the_same_bits_after_loading() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for format in FORMATS {
        let recipe = DelayedScaling::ipex().with_format(format);
        for trains in [true, false] {
            let net = Net::fresh();
            match trains {
                true => train(&net, &recipe),
                false => calibrate(&net, recipe.clone()),
            }
            save_fp8_state(&path, &net).unwrap();
            // Into variables.
            let loaded = Net::fresh();
            assert_ne!(
                loaded.eval(&recipe, &input(2.)),
                net.eval(&recipe, &input(2.))
            );
            load_fp8_state(&path, &loaded).unwrap();
            for other in FORMATS {
                // Also in formats for which the scales were not made.
                let recipe = DelayedScaling::ipex().with_format(other);
                let (here, there) = (
                    net.eval(&recipe, &input(2.)),
                    loaded.eval(&recipe, &input(2.)),
                );
                assert_eq!(here, there, "{format} {other} trains: {trains}");
            }
            for role in [Role::Input, Role::Weight, Role::GradOutput] {
                assert_eq!(slot(&loaded.down, role), slot(&net.down, role));
            }
            // Into a model that candle has built from the same file.
            let built = built_from(&path);
            load_fp8_state(&path, &built).unwrap();
            assert_eq!(
                built.eval(&recipe, &input(2.)),
                net.eval(&recipe, &input(2.))
            );
            // Training goes on alike.
            train(&net, &recipe);
            train(&loaded, &recipe);
            assert_eq!(
                loaded.eval(&recipe, &input(2.)),
                net.eval(&recipe, &input(2.))
            );
        }
    }
}

/// A model without variables.
fn built_from(path: &Path) -> Net {
    let file = candle_core::safetensors::load(path, CPU).unwrap();
    let net = Net::new(VarBuilder::from_tensors(file, DType::F32, CPU));
    prepare_fp8(&net, &PrepareOptions::default()).unwrap();
    net
}

#[test]
fn what_does_not_fit_is_named_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (
        dir.path().join("a.safetensors"),
        dir.path().join("b.safetensors"),
    );
    let recipe = DelayedScaling::ipex();
    let net = Net::fresh();
    calibrate(&net, recipe.clone());
    save_fp8_state(&path, &net).unwrap();
    let before = |net: &Net| (net.eval(&recipe, &input(2.)), slot(&net.up, Role::Input));
    let refused = |net: &Net, words: &[&str]| {
        let kept = before(net);
        let error = load_fp8_state(&path, net).unwrap_err();
        assert!(
            matches!(
                error,
                Error::TrainingCheckpoint(fp8_recipes::TrainingCheckpointError::Mismatch { .. })
            ),
            "{error}"
        );
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert_eq!(before(net), kept);
    };
    // Not prepared in the same way.
    let fewer = Net::fresh();
    prepare_fp8(&fewer, &PrepareOptions::default().with_off("down").unwrap()).unwrap();
    refused(&fewer, &["down.", "missing here"]);
    let own = PrepareOptions::default().with_recipe("down", "rowwise".parse::<Recipe>().unwrap());
    let recipes = Net::fresh();
    prepare_fp8(&recipes, &own.unwrap()).unwrap();
    refused(&recipes, &["`down`", "rowwise"]);
    // Other values in a model that has no variables.
    save_fp8_state(&other, &Net::fresh()).unwrap();
    refused(&built_from(&other), &["`down.weight`", "not a variable"]);
    // Codes are not a high-precision weight.
    let report = save_calibrated(&net, dir.path()).unwrap();
    let vb = load::var_builder(&[&report.model], DType::F32, CPU).unwrap();
    let error = save_fp8_state(&other, &Net::new(vb)).unwrap_err();
    assert!(
        matches!(&error, Error::Files(FilesError::NotExportable { path, .. }) if path == "up"),
        "{error}"
    );
}
