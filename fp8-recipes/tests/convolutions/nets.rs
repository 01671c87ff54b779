//! Convolutions of `nn` outside and inside of guards.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::{Recipe, RecipeName, SkipReason};
use fp8_recipes::nn::{self, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d};
use fp8_recipes::{
    Autocast, Fp8Module, PrepareOptions, fp8_autocast, prepare_fp8, save_calibrated,
};
use fp8_test_support::{bits, normal, sqnr};
use std::collections::HashMap;

#[derive(Fp8Module)]
struct Net {
    line: Conv1d,
    back: ConvTranspose1d,
    stem: Conv2d,
    grouped: Conv2d,
    up: ConvTranspose2d,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let conv = candle_nn::Conv2dConfig {
            padding: 1,
            stride: 2,
            ..Default::default()
        };
        let grouped = candle_nn::Conv2dConfig {
            groups: 2,
            dilation: 2,
            padding: 2,
            ..Default::default()
        };
        let line = candle_nn::Conv1dConfig {
            padding: 1,
            ..Default::default()
        };
        let up = candle_nn::ConvTranspose2dConfig {
            stride: 2,
            output_padding: 1,
            padding: 1,
            ..Default::default()
        };
        Ok(Self {
            line: nn::conv1d(16, 32, 3, line, vb.pp("line"))?,
            back: nn::conv_transpose1d_no_bias(32, 16, 2, Default::default(), vb.pp("back"))?,
            stem: nn::conv2d(3, 32, 3, conv, vb.pp("stem"))?,
            grouped: nn::conv2d_no_bias(32, 32, 3, grouped, vb.pp("grouped"))?,
            up: nn::conv_transpose2d(32, 16, 3, up, vb.pp("up"))?,
        })
    }

    /// The results of all layers.
    fn forward(&self, image: &Tensor, line: &Tensor) -> Result<[Tensor; 2]> {
        let maps = self
            .up
            .forward(&self.grouped.forward(&self.stem.forward(image)?)?)?;
        Ok([maps, self.back.forward(&self.line.forward(line)?)?])
    }
}

/// Standard normal values.
fn values(seed: usize, dims: &[usize]) -> Tensor {
    normal(seed as u64, dims).to_device(&Device::Cpu).unwrap()
}

fn net() -> (VarMap, Net) {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let net = Net::new(vb).unwrap();
    // Not at random, so that every run computes the same.
    for (name, var) in vars.data().lock().unwrap().iter() {
        let seed = name.bytes().map(usize::from).sum();
        var.set(&(values(seed, var.dims()) * 0.1).unwrap()).unwrap();
    }
    (vars, net)
}

fn inputs() -> (Tensor, Tensor) {
    (values(1, &[4, 3, 13, 13]), values(2, &[4, 16, 21]))
}

/// Output and gradients of all variables, by name.
fn step(vars: &VarMap, net: &Net) -> HashMap<String, Tensor> {
    let (image, line) = inputs();
    let [maps, lines] = net.forward(&image, &line).unwrap();
    let loss =
        (maps.sqr().unwrap().sum_all().unwrap() + lines.sqr().unwrap().sum_all().unwrap()).unwrap();
    let grads = loss.backward().unwrap();
    let mut results = HashMap::from([
        ("maps".to_string(), maps.detach()),
        ("lines".to_string(), lines.detach()),
    ]);
    for (name, var) in vars.data().lock().unwrap().iter() {
        let var: &Var = var;
        let grad = grads
            .get(var)
            .unwrap_or_else(|| panic!("no gradient of {name}"));
        results.insert(name.clone(), grad.clone());
    }
    results
}

const NAMES: [RecipeName; 3] = [
    RecipeName::Tensorwise,
    RecipeName::Rowwise,
    RecipeName::Delayed,
];

#[test]
fn named_recipes_compute_in_fp8_inside_a_guard_only() {
    for name in NAMES {
        let (vars, net) = net();
        let plain = step(&vars, &net);
        let report = prepare_fp8(&net, &PrepareOptions::default()).unwrap();
        assert_eq!(report.converted(), 5, "{report}");
        // The first step of delayed scaling casts with a scale of 1.
        for _ in 0..2 {
            let guard = fp8_autocast(Autocast::new(Recipe::from(name))).unwrap();
            step(&vars, &net);
            guard.close().unwrap();
        }
        let guard = fp8_autocast(Autocast::new(Recipe::from(name))).unwrap();
        let casted = step(&vars, &net);
        guard.close().unwrap();
        for (tensor, exact) in &plain {
            let db = sqnr(&casted[tensor], exact);
            // A layer has 28 dB on normal values, and 24 dB with gradients in E5M2. The noises of up to three layers add up, and
            // of as many backward.
            let floor = match tensor.contains('.') {
                true => 24. - 7.8,
                false => 28. - 4.8,
            };
            assert!(db >= floor, "{name} {tensor}: {db} dB");
            assert!(db < 60., "{name} {tensor}: {db} dB, which is not FP8");
        }
        for layer in ["stem", "grouped", "up", "line", "back"] {
            let state = match layer {
                "stem" => net.stem.fp8_state(),
                "grouped" => net.grouped.fp8_state(),
                "up" => net.up.fp8_state(),
                "line" => net.line.fp8_state(),
                _ => net.back.fp8_state(),
            };
            assert!(state.expect("state").quantized_tensors() > 0, "{layer}");
        }

        // Plain again, also in a disabled guard.
        let guard = fp8_autocast(Autocast::disabled()).unwrap();
        let disabled = step(&vars, &net);
        guard.close().unwrap();
        let outside = step(&vars, &net);
        for (tensor, exact) in &plain {
            assert_eq!(bits(&disabled[tensor]), bits(exact), "{tensor}");
            assert_eq!(bits(&outside[tensor]), bits(exact), "{tensor}");
        }
    }
}

#[test]
fn two_dimensions_are_bit_equal_to_candle_nn_outside_a_guard() {
    let (_vars, net) = net();
    let (image, _) = inputs();
    let stock = candle_nn::Conv2d::new(
        net.stem.weight().clone(),
        net.stem.bias().cloned(),
        *net.stem.config(),
    );
    let maps = net.stem.forward(&image).unwrap();
    assert_eq!(bits(&maps), bits(&stock.forward(&image).unwrap()));
    let stock = candle_nn::ConvTranspose2d::new(
        net.up.weight().clone(),
        net.up.bias().cloned(),
        *net.up.config(),
    );
    let (ours, theirs) = (
        net.up.forward(&maps).unwrap(),
        stock.forward(&maps).unwrap(),
    );
    assert_eq!(bits(&ours), bits(&theirs));
}

#[test]
fn calibrating_records_the_inputs_and_computes_in_high_precision() {
    let (_vars, net) = net();
    let (image, line) = inputs();
    let plain = net.forward(&image, &line).unwrap();
    prepare_fp8(&net, &PrepareOptions::default()).unwrap();
    let recipe = Recipe::from(RecipeName::Delayed);
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true)).unwrap();
    let calibrated = net.forward(&image, &line).unwrap();
    guard.close().unwrap();
    for (a, b) in plain.iter().zip(&calibrated) {
        assert_eq!(bits(a), bits(b));
    }
    let state = net.stem.fp8_state().expect("state");
    let slot = state.slot(fp8_candle::Role::Input).expect("a row");
    let amax = image.abs().unwrap().max_all().unwrap();
    assert_eq!(
        slot.calibrated_amax(),
        Some(amax.to_scalar::<f32>().unwrap())
    );
}

#[test]
fn an_export_keeps_convolutions_in_high_precision() {
    let (vars, net) = net();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let model = (net, nn::linear(16, 16, vb.pp("head")).unwrap());
    prepare_fp8(&model, &PrepareOptions::default()).unwrap();
    let recipe = Recipe::from(RecipeName::Delayed);
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true)).unwrap();
    let (image, line) = inputs();
    model.0.forward(&image, &line).unwrap();
    model.1.forward(&values(3, &[5, 16])).unwrap();
    guard.close().unwrap();

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let report = save_calibrated(&model, &path).unwrap();
    assert_eq!(report.quantized, ["head"]);
    let file = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let vars = vars.data().lock().unwrap();
    let convolutions = vars.iter().filter(|(name, _)| !name.starts_with("head"));
    let mut count = 0;
    for (name, var) in convolutions {
        let stored = file.tensor(name).unwrap();
        let values = bits(var);
        let expected: Vec<u8> = values.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        assert_eq!(stored.data(), expected, "{name}");
        count += 1;
    }
    assert_eq!(count, 8);
}

#[test]
fn clones_share_state_and_renamed_layers_do_not() {
    let (_vars, net) = net();
    prepare_fp8(&net, &PrepareOptions::default()).unwrap();
    assert!(net.stem.clone().fp8_state().is_some());
    assert!(net.stem.clone().with_path("other").fp8_state().is_none());
}

#[test]
fn what_does_not_fit_is_an_error_that_names_the_layer() {
    let (_vars, net) = net();
    prepare_fp8(&net, &PrepareOptions::default()).unwrap();
    let guard = fp8_autocast(Autocast::new(Recipe::from(RecipeName::Tensorwise))).unwrap();
    let error = net.stem.try_forward(&values(1, &[1, 4, 8, 8])).unwrap_err();
    drop(guard);
    let message = error.to_string();
    assert!(
        message.contains("`stem`") && message.contains("4 channels"),
        "{message}"
    );
}

#[test]
fn a_layer_without_a_path_is_skipped() {
    let conv = Conv2d::new(values(1, &[4, 3, 3, 3]), None, Default::default());
    let report = prepare_fp8(&conv, &PrepareOptions::default()).unwrap();
    assert_eq!(report.converted(), 0);
    let skipped = format!("{report:?}");
    assert!(
        skipped.contains(&format!("{:?}", SkipReason::NoPath)),
        "{skipped}"
    );
}

/// A weight changed between the passes: the gradients are those of the values that the forward pass has used, or there are none.
#[test]
fn a_changed_weight_gives_no_other_gradients() {
    let (image, line) = inputs();
    for name in [
        "tensorwise",
        "rowwise",
        "rowwise_with_gw_hp",
        "delayed",
        "current",
        "blockwise",
        "mxfp8",
    ] {
        let (vars, net) = net();
        let options = PrepareOptions::default().with_convolutions(true);
        prepare_fp8(&net, &options).unwrap();
        let guard = fp8_autocast(name).unwrap();
        let (image, line) = (
            Var::from_tensor(&image).unwrap(),
            Var::from_tensor(&line).unwrap(),
        );
        let [maps, lines] = net.forward(&image, &line).unwrap();
        guard.close().unwrap();
        let loss = (maps.sqr().unwrap().sum_all().unwrap()
            + lines.sqr().unwrap().sum_all().unwrap())
        .unwrap();
        let grads = || fp8_candle::wide::backward(&loss);
        let first = grads().unwrap();
        let all = vars.data().lock().unwrap().clone();
        let mut refused = 0;
        for (path, var) in &all {
            let before = var.as_tensor().copy().unwrap();
            var.set(&before.affine(1.5, 0.1).unwrap()).unwrap();
            match grads() {
                Err(fp8_candle::Error::ChangedValues { op, .. }) => {
                    assert!(path.starts_with(&op), "{name}: {op} for {path}");
                    refused += 1;
                }
                Err(error) => panic!("{name}, {path}: {error}"),
                Ok(grads) => {
                    for (other, var) in &all {
                        let grad = |grads: &candle_core::backprop::GradStore| {
                            bits(grads.get(var).unwrap())
                        };
                        assert_eq!(grad(&grads), grad(&first), "{name}: {other} after {path}");
                    }
                }
            }
            var.set(&before).unwrap();
        }
        if ["rowwise", "mxfp8"].contains(&name) {
            assert_eq!(refused, 5, "{name}");
        }
    }
}
