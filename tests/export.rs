//! Calibration, the FP8 inference file, loading it, and what goes wrong on the way.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::candle::Fp8Tensor;
use fp8::core::{Contraction, Granularity};
use fp8::recipes::atomic::FileError;
use fp8::recipes::checkpoint::{TrainingMeta, quantized_tensors, save_training};
use fp8::recipes::config::{DelayedFormat, Fp8LinearConfig, LayerFilter, Recipe, RecipeName};
use fp8::recipes::load::{Checkpoint, var_builder};
use fp8::recipes::nn::{self, InputScaling, Linear, Parameter};
use fp8::recipes::optim::{AdamW, AdamWConfig};
use fp8::recipes::{Autocast, Error, Fp8Module, Role, fp8_autocast, prepare_fp8, save_calibrated};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "common/recipes.rs"]
mod common;
use common::{
    assert_close, assert_differ, assert_same, assert_text, delayed, device, fill, flat, of,
    prepare, skipped_on_cuda, tensor,
};

const VOCAB: usize = 24;
const WIDTH: usize = 16;
const HIDDEN: usize = 40;

#[derive(Fp8Module)]
struct Block {
    fc1: Linear,
    fc2: Linear,
}

#[derive(Fp8Module)]
struct Net {
    embed: nn::Embedding,
    blocks: Vec<Block>,
    norm: nn::LayerNorm,
    scale: Parameter,
    head: Linear,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let block = |i: usize| {
            let vb = vb.pp("blocks").pp(i);
            Ok(Block {
                fc1: nn::linear(WIDTH, HIDDEN, vb.pp("fc1"))?,
                fc2: nn::linear_no_bias(HIDDEN, WIDTH, vb.pp("fc2"))?,
            })
        };
        Ok(Self {
            embed: nn::embedding(VOCAB, WIDTH, vb.pp("embed"))?,
            blocks: (0..2).map(block).collect::<candle_core::Result<_>>()?,
            norm: nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            scale: Parameter::new("scale", vb.get(WIDTH, "scale")?),
            head: nn::linear(WIDTH, VOCAB, vb.pp("head"))?,
        })
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.blocks
            .iter()
            .flat_map(|block| [&block.fc1, &block.fc2])
    }
}

impl Module for Net {
    fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let mut h = self
            .embed
            .forward(ids)?
            .broadcast_mul(self.scale.tensor())?;
        for block in &self.blocks {
            h = (&h + block.fc2.forward(&block.fc1.forward(&h)?.gelu_erf()?)?)?;
        }
        self.head.forward(&self.norm.forward(&h)?)
    }
}

/// A net whose layers, except the head, are prepared.
fn prepared() -> (VarMap, Net) {
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, 7);
    let report = prepare_fp8(&net, &LayerFilter::new().skip_paths(["head"]).into()).unwrap();
    assert_eq!(report.converted(), 4, "{report}");
    (vars, net)
}

fn ids(seed: u32) -> Tensor {
    let ids: Vec<u32> = (0..12).map(|i| (i * 7 + seed * 5) % VOCAB as u32).collect();
    Tensor::from_vec(ids, (2, 6), &device()).unwrap()
}

fn calibrate(net: &dyn Module, recipe: impl Into<Recipe>) {
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true)).unwrap();
    for seed in 0..3 {
        net.forward(&ids(seed)).unwrap();
    }
    guard.close().unwrap();
}

/// A net calibrated with `recipe`.
fn calibrated(recipe: impl Into<Recipe>) -> (VarMap, Net) {
    let (vars, net) = prepared();
    calibrate(&net, recipe);
    (vars, net)
}

/// Forward in an evaluation guard.
fn eval(net: &dyn Module, recipe: impl Into<Recipe>, ids: &Tensor) -> Tensor {
    let guard = fp8_autocast(Autocast::new(recipe).training(false)).unwrap();
    let y = net.forward(ids).unwrap();
    guard.close().unwrap();
    y
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn candle_var_builder(path: &Path, dtype: DType) -> VarBuilder<'static> {
    // SAFETY: nothing changes the file while the test reads it.
    unsafe { VarBuilder::from_mmaped_safetensors(&[path], dtype, &device()) }.unwrap()
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Dtype and shape of each tensor of a file, read by the safetensors crate.
fn contents(path: &Path) -> BTreeMap<String, (Dtype, Vec<usize>)> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let describe =
        |(name, view): (String, TensorView<'_>)| (name, (view.dtype(), view.shape().to_vec()));
    file.tensors().into_iter().map(describe).collect()
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

// ---- save and load ---------------------------------------------------------------------------

#[test]
fn the_loaded_model_computes_what_the_calibrated_one_does() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let ours = Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
    let candles = Net::new(candle_var_builder(&report.model, DType::F32)).unwrap();
    for seed in 0..4 {
        let ids = ids(seed);
        let expected = eval(&net, delayed(16), &ids);
        assert_differ(
            "FP8 is not the plain model",
            &expected,
            &net.forward(&ids).unwrap(),
        );
        assert_close("but near it", &expected, &net.forward(&ids).unwrap(), 0.1);
        for (name, loaded) in [("our VarBuilder", &ours), ("candle's VarBuilder", &candles)] {
            let case = format!("{name}, batch {seed}");
            assert_same(&case, &loaded.forward(&ids).unwrap(), &expected);
            // What is loaded in FP8 computes in FP8 whatever the recipe of a guard.
            for (recipe_name, recipe) in common::recipes() {
                assert_same(
                    &format!("{case}, {recipe_name}"),
                    &eval(loaded, recipe, &ids),
                    &expected,
                );
            }
        }
    }
}

#[test]
fn a_disabled_guard_multiplies_by_the_dequantized_weight() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let loaded = Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
    let x = tensor(1, &[3, WIDTH]);
    let layer = &loaded.blocks[0].fc1;
    let weight = layer
        .static_weight()
        .unwrap()
        .codes()
        .dequantize(DType::F32)
        .unwrap();
    let plain = candle_nn::Linear::new(weight, layer.bias().cloned())
        .forward(&x)
        .unwrap();
    let fp8 = layer.forward(&x).unwrap();
    let _guard = fp8_autocast(Autocast::disabled()).unwrap();
    assert_same("disabled", &layer.forward(&x).unwrap(), &plain);
    assert_differ("without a guard", &fp8, &plain);
}

#[test]
fn a_static_recipe_and_a_dynamic_one_export_static_scales_too() {
    let static_cast = fp8::recipes::config::CastConfig::static_tensorwise();
    let static_config = Fp8LinearConfig::default()
        .with_input(static_cast)
        .with_weight(static_cast);
    for (name, recipe) in [
        ("static", Recipe::from(static_config.clone())),
        ("tensorwise", RecipeName::Tensorwise.into()),
        ("delayed", RecipeName::Delayed.into()),
    ] {
        let (_vars, net) = calibrated(recipe);
        let dir = dir();
        let report = save_calibrated(&net, dir.path()).unwrap();
        let loaded =
            Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
        // The scales of the calibration, in memory and loaded.
        let expected = eval(&net, static_config.clone(), &ids(1));
        assert_same(name, &loaded.forward(&ids(1)).unwrap(), &expected);
    }
}

#[test]
fn rowwise_exports_a_scale_per_channel_and_scales_inputs_per_token() {
    let (_vars, net) = calibrated(RecipeName::Rowwise);
    let state = net.blocks[0].fc1.fp8_state().unwrap();
    let casts = state.calibration().unwrap();
    assert_eq!(casts.weight.granularity, Granularity::Rowwise);
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let tensors = contents(&report.model);
    assert_eq!(
        tensors["blocks.1.fc1.weight"],
        (Dtype::F8_E4M3, vec![HIDDEN, WIDTH])
    );
    assert_eq!(
        tensors["blocks.1.fc1.weight_scale"],
        (Dtype::F32, vec![HIDDEN, 1])
    );
    assert_eq!(
        tensors["blocks.0.fc2.weight_scale"],
        (Dtype::F32, vec![WIDTH, 1])
    );
    let input_scales: Vec<_> = tensors
        .keys()
        .filter(|n| n.contains("input_scale"))
        .collect();
    assert_eq!(input_scales, Vec::<&String>::new());
    let group = &json_of(&report.config)["quantization_config"]["config_groups"]["group_0"];
    assert_eq!(group["weights"]["strategy"], "channel");
    assert_eq!(group["input_activations"]["strategy"], "token");
    assert_eq!(group["input_activations"]["dynamic"], true);

    // A file of exact scales: the recipe's own are floored to powers of two.
    let exact = Fp8LinearConfig::from_recipe_name(RecipeName::Rowwise)
        .with_round_scales_to_power_of_two(false);
    let expected = eval(&net, exact, &ids(2));
    for vb in [
        var_builder(&[&report.model], DType::F32, &device()).unwrap(),
        candle_var_builder(&report.model, DType::F32),
    ] {
        let loaded = Net::new(vb).unwrap();
        let weight = loaded.blocks[0].fc1.static_weight().unwrap();
        assert!(matches!(
            weight.input_scaling(),
            InputScaling::DynamicPerToken
        ));
        assert_eq!(weight.codes().granularity(), Granularity::Rowwise);
        assert_same("rowwise", &loaded.forward(&ids(2)).unwrap(), &expected);
    }
}

#[test]
fn the_file_holds_what_compressed_tensors_prescribes() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    fs::write(
        dir.path().join("config.json"),
        r#"{"model_type": "net", "hidden_size": 16, "quantization_config": {"old": true}, "z": [1]}"#,
    )
    .unwrap();
    let report = save_calibrated(&net, dir.path()).unwrap();
    assert_eq!(report.model, dir.path().join("model.safetensors"));
    assert_eq!(report.config, dir.path().join("config.json"));
    assert_eq!(names_in(dir.path()), ["config.json", "model.safetensors"]);
    let layers = [
        "blocks.0.fc1",
        "blocks.0.fc2",
        "blocks.1.fc1",
        "blocks.1.fc2",
    ];
    assert_eq!(
        (report.quantized.as_slice(), report.ignored.as_slice()),
        (&layers.map(String::from)[..], &["head".to_string()][..])
    );

    let mut expected: BTreeMap<String, (Dtype, Vec<usize>)> = BTreeMap::new();
    let mut put = |name: &str, dtype, shape: &[usize]| {
        expected.insert(name.to_string(), (dtype, shape.to_vec()));
    };
    for i in 0..2 {
        put(
            &format!("blocks.{i}.fc1.weight"),
            Dtype::F8_E4M3,
            &[HIDDEN, WIDTH],
        );
        put(&format!("blocks.{i}.fc1.bias"), Dtype::F32, &[HIDDEN]);
        put(
            &format!("blocks.{i}.fc2.weight"),
            Dtype::F8_E4M3,
            &[WIDTH, HIDDEN],
        );
        for layer in ["fc1", "fc2"] {
            for scale in ["weight_scale", "input_scale"] {
                put(&format!("blocks.{i}.{layer}.{scale}"), Dtype::F32, &[1]);
            }
        }
    }
    put("embed.weight", Dtype::F32, &[VOCAB, WIDTH]);
    put("norm.weight", Dtype::F32, &[WIDTH]);
    put("norm.bias", Dtype::F32, &[WIDTH]);
    put("scale", Dtype::F32, &[WIDTH]);
    put("head.weight", Dtype::F32, &[VOCAB, WIDTH]);
    put("head.bias", Dtype::F32, &[VOCAB]);
    assert_eq!(contents(&report.model), expected);

    let config = json_of(&report.config);
    for (key, value) in [
        ("model_type", json!("net")),
        ("hidden_size", json!(16)),
        ("z", json!([1])),
    ] {
        assert_eq!(config[key], value, "{key} is kept");
    }
    let quantization = &config["quantization_config"];
    let args = |strategy: &str| {
        json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy,
               "dynamic": false, "group_size": null})
    };
    for (pointer, value) in [
        ("/quant_method", json!("compressed-tensors")),
        ("/format", json!("float-quantized")),
        ("/quantization_status", json!("compressed")),
        ("/ignore", json!(["head"])),
        ("/kv_cache_scheme", Value::Null),
        ("/config_groups/group_0/targets", json!(["Linear"])),
        ("/config_groups/group_0/weights", args("tensor")),
        ("/config_groups/group_0/input_activations", args("tensor")),
        ("/config_groups/group_0/output_activations", Value::Null),
    ] {
        assert_eq!(quantization.pointer(pointer), Some(&value), "{pointer}");
    }
    assert_eq!(
        quantization.get("old"),
        None,
        "the old quantization_config is replaced"
    );
}

#[test]
fn the_scales_are_amax_over_448_and_other_tensors_are_unchanged() {
    if skipped_on_cuda("candle 0.11 casts nothing to or from F8E4M3 there") {
        return;
    }
    let (vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path().join("any name.safetensors")).unwrap();
    assert_eq!(
        names_in(dir.path()),
        ["any name.safetensors", "config.json"]
    );
    let file = Checkpoint::open(&[&report.model]).unwrap();
    let vars = vars.data().lock().unwrap();
    let amax = |x: &Tensor| flat(x).into_iter().fold(0f32, |max, x| max.max(x.abs()));
    for layer in net.linears() {
        let path = layer.path().unwrap();
        let scale = flat(
            &file
                .tensor(&format!("{path}.weight_scale"), &device())
                .unwrap(),
        )[0];
        assert_eq!(
            scale,
            amax(&layer.weight().unwrap()) / 448.,
            "{path}.weight_scale"
        );
        let state = layer.fp8_state().unwrap();
        let state = state.slot(Role::Input).unwrap().tensors().unwrap();
        let input = file
            .tensor(&format!("{path}.input_scale"), &device())
            .unwrap();
        assert_same(&format!("{path}.input_scale"), &input, &state.dequant_scale);
        let codes = file.tensor(&format!("{path}.weight"), &device()).unwrap();
        let largest = amax(&codes.to_dtype(DType::F32).unwrap());
        assert_eq!(largest, 448., "{path}: the largest code");
    }
    // The input of the first layer by hand: embedding times scale over the calibration batches.
    let mut first = 0f32;
    for seed in 0..3 {
        let x = net
            .embed
            .forward(&ids(seed))
            .unwrap()
            .broadcast_mul(net.scale.tensor())
            .unwrap();
        first = first.max(amax(&x));
    }
    let scale = flat(&file.tensor("blocks.0.fc1.input_scale", &device()).unwrap())[0];
    assert_eq!(scale, first / 448., "input_scale of the first layer");
    for name in [
        "embed.weight",
        "norm.bias",
        "scale",
        "head.weight",
        "blocks.1.fc1.bias",
    ] {
        assert_same(
            name,
            &file.tensor(name, &device()).unwrap(),
            vars[name].as_tensor(),
        );
    }
}

#[test]
fn a_loaded_layer_holds_one_byte_per_weight() {
    for (recipe, scales) in [(RecipeName::Delayed, 1), (RecipeName::Rowwise, HIDDEN)] {
        let (_vars, net) = calibrated(recipe);
        let dir = dir();
        let report = save_calibrated(&net, dir.path()).unwrap();
        for vb in [
            var_builder(&[&report.model], DType::F32, &device()).unwrap(),
            candle_var_builder(&report.model, DType::F32),
        ] {
            let mut loaded = Net::new(vb).unwrap();
            let layer = &loaded.blocks[0].fc1;
            // The form that kernels stream has its sizes padded to multiples of 32.
            let padded = HIDDEN.next_multiple_of(32) * WIDTH.next_multiple_of(32);
            let bytes = HIDDEN * WIDTH + 4 * scales..=padded + 4 * scales;
            assert!(bytes.contains(&layer.weight_bytes()), "{recipe}");
            assert!(layer.static_weight().is_some(), "{recipe}: codes only");
            let value = layer.weight().unwrap();
            assert_eq!(
                value.dtype(),
                DType::F32,
                "{recipe}: the value, not the codes"
            );
            assert_close(
                &format!("{recipe}"),
                &value,
                &net.blocks[0].fc1.weight().unwrap(),
                0.04,
            );
            assert!(
                bytes.contains(&layer.weight_bytes()),
                "{recipe}: nothing is kept"
            );
            assert_eq!(layer.features(), (HIDDEN, WIDTH));
            assert_eq!(net.blocks[0].fc1.weight_bytes(), 4 * HIDDEN * WIDTH);
            assert_eq!(
                loaded.head.weight_bytes(),
                4 * VOCAB * WIDTH,
                "the head is f32"
            );
            let report = prepare(&mut loaded);
            assert_eq!((report.converted(), report.skipped()), (1, 4), "{report}");
            let reason = "the weight is FP8 already (static inference)";
            assert!(report.to_string().contains(reason), "{report}");
            assert_eq!(quantized_tensors(&loaded), 0);
        }
    }
}

#[test]
fn gradients_pass_through_a_loaded_layer() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let loaded = Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
    let layer = &loaded.blocks[0].fc1;
    let (x, go) = (common::var(3, &[5, WIDTH]), tensor(4, &[5, HIDDEN]));
    let y = layer.forward(&x).unwrap();
    let grads = (&y * &go).unwrap().sum_all().unwrap().backward().unwrap();
    let weight = layer
        .static_weight()
        .unwrap()
        .codes()
        .dequantize(DType::F32)
        .unwrap();
    assert_close(
        "grad_x",
        grads.get(&x).unwrap(),
        &go.matmul(&weight).unwrap(),
        1e-6,
    );
}

#[test]
fn a_model_loads_in_half_precision_too() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let expected = eval(&net, delayed(16), &ids(1));
    for vb in [
        var_builder(&[&report.model], DType::BF16, &device()).unwrap(),
        candle_var_builder(&report.model, DType::BF16),
    ] {
        let loaded = Net::new(vb).unwrap();
        let y = loaded.forward(&ids(1)).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        let scale = loaded.blocks[0]
            .fc1
            .static_weight()
            .unwrap()
            .codes()
            .dequant_scale()
            .dtype();
        assert_eq!(scale, DType::F32, "scales stay f32");
        assert_close("bf16", &y.to_dtype(DType::F32).unwrap(), &expected, 0.1);
    }
}

#[test]
fn a_stock_layer_gets_the_dequantized_weight_through_our_var_builder() {
    if skipped_on_cuda("candle 0.11 casts nothing to or from F8E4M3 there") {
        return;
    }
    for recipe in [RecipeName::Delayed, RecipeName::Rowwise] {
        let (_vars, net) = calibrated(recipe);
        let dir = dir();
        let report = save_calibrated(&net, dir.path()).unwrap();
        let vb = var_builder(&[&report.model], DType::F32, &device()).unwrap();
        let stock = candle_nn::linear(WIDTH, HIDDEN, vb.pp("blocks.0.fc1")).unwrap();
        let file = Checkpoint::open(&[&report.model]).unwrap();
        let codes = file.tensor("blocks.0.fc1.weight", &device()).unwrap();
        let scale = file.tensor("blocks.0.fc1.weight_scale", &device()).unwrap();
        let codes = codes.to_dtype(DType::F32).unwrap();
        let value = match recipe {
            RecipeName::Rowwise => codes.broadcast_mul(&scale).unwrap(),
            _ => codes
                .broadcast_mul(&scale.reshape((1, 1)).unwrap())
                .unwrap(),
        };
        assert_same(&format!("{recipe}"), stock.weight(), &value);
        assert_close(
            &format!("{recipe}"),
            stock.weight(),
            &net.blocks[0].fc1.weight().unwrap(),
            0.04,
        );
    }
}

#[test]
fn several_files_make_one_checkpoint_unless_they_share_a_name() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let report = save_calibrated(&net, dir.path()).unwrap();
    let whole = Checkpoint::open(&[&report.model]).unwrap();
    let paths = [
        dir.path().join("a.safetensors"),
        dir.path().join("b.safetensors"),
    ];
    let mut parts = [BTreeMap::new(), BTreeMap::new()];
    for (i, name) in whole.names().into_iter().enumerate() {
        parts[i % 2].insert(name.to_string(), whole.tensor(name, &device()).unwrap());
    }
    for (path, part) in paths.iter().zip(&parts) {
        fp8::recipes::atomic::write_safetensors_atomic(path, part, None).unwrap();
    }
    let loaded = Net::new(var_builder(&paths, DType::F32, &device()).unwrap()).unwrap();
    assert_same(
        "two files",
        &loaded.forward(&ids(1)).unwrap(),
        &eval(&net, delayed(16), &ids(1)),
    );
    let error = Checkpoint::open(&[&report.model, &paths[0]]).unwrap_err();
    assert_text(
        "twice",
        error,
        &["blocks.0.fc1", "model.safetensors", "a.safetensors"],
    );
}

// ---- tied weights ----------------------------------------------------------------------------

#[derive(Fp8Module)]
struct Tied {
    embed: nn::Embedding,
    fc: Linear,
    head: Linear,
}

#[test]
fn a_weight_tied_to_an_embedding_stays_in_high_precision() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let embed = nn::embedding(VOCAB, WIDTH, vb.pp("embed")).unwrap();
    let head = Linear::new(embed.embeddings().clone(), None).with_path("head");
    let fc = nn::linear_no_bias(WIDTH, WIDTH, vb.pp("fc")).unwrap();
    fill(&vars, 9);
    let mut model = Tied { embed, fc, head };
    let report = prepare(&mut model);
    assert_eq!((report.converted(), report.skipped()), (1, 1), "{report}");
    let reason = "its weight is `embed.weight` too, which stays in high precision";
    assert!(report.to_string().contains(reason), "{report}");
    let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
    let h = model
        .fc
        .forward(&model.embed.forward(&ids(0)).unwrap())
        .unwrap();
    model.head.forward(&h).unwrap();
    guard.close().unwrap();
    let dir = dir();
    let report = save_calibrated(&model, dir.path()).unwrap();
    assert_eq!(
        (report.quantized, report.ignored),
        (vec!["fc".into()], vec!["head".into()])
    );
    let tensors = contents(&report.model);
    let high_precision = (Dtype::F32, vec![VOCAB, WIDTH]);
    assert_eq!(tensors["embed.weight"], high_precision);
    let head: Vec<_> = tensors.keys().filter(|n| n.starts_with("head")).collect();
    assert_eq!(head, Vec::<&String>::new(), "stored once");
    assert_eq!(
        json_of(&report.config)["quantization_config"]["ignore"],
        json!(["head"])
    );
}

#[test]
fn two_linears_with_one_weight_are_both_exported() {
    if skipped_on_cuda("candle 0.11 casts nothing to or from F8E4M3 there") {
        return;
    }
    let weight = common::var(5, &[WIDTH, WIDTH]);
    let layer = |path: &str| Linear::new(weight.as_tensor().clone(), None).with_path(path);
    let mut model = (layer("a"), vec![layer("b"), layer("b")]);
    assert_eq!(prepare(&mut model).converted(), 3);
    let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
    model.0.forward(&tensor(6, &[2, WIDTH])).unwrap();
    model.1[0]
        .forward(&(tensor(6, &[2, WIDTH]) * 2.).unwrap())
        .unwrap();
    guard.close().unwrap();
    let dir = dir();
    let report = save_calibrated(&model, dir.path()).unwrap();
    assert_eq!(report.quantized, ["a", "b"], "the same layer twice is one");
    let file = Checkpoint::open(&[&report.model]).unwrap();
    let value = |name: &str| {
        flat(
            &file
                .tensor(name, &device())
                .unwrap()
                .to_dtype(DType::F32)
                .unwrap(),
        )
    };
    assert_eq!(value("a.weight"), value("b.weight"));
    assert_eq!(
        value("a.input_scale")[0] * 2.,
        value("b.input_scale")[0],
        "inputs of their own"
    );
}

// ---- calibration that went wrong -------------------------------------------------------------

#[test]
fn saving_without_calibration_names_the_layer() {
    let dir = dir();
    let save = |net: &Net| save_calibrated(net, dir.path()).unwrap_err();

    let (_vars, fresh) = prepared();
    let error = save(&fresh);
    assert!(
        matches!(&error, Error::NotCalibrated { path } if path == "blocks.0.fc1"),
        "{error:?}"
    );
    assert_text("no guard", error, &["`blocks.0.fc1`", "calibrating guard"]);

    // A guard without a batch.
    fp8_autocast(Autocast::new(delayed(4)).calibrating(true))
        .unwrap()
        .close()
        .unwrap();
    assert_text(
        "no batch",
        save(&fresh),
        &["`blocks.0.fc1`", "at least one batch"],
    );

    // An empty batch is no batch.
    {
        let _guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
        fresh.blocks[0]
            .fc1
            .forward(&tensor(1, &[0, WIDTH]))
            .unwrap();
    }
    assert_text("empty batch", save(&fresh), &["`blocks.0.fc1`"]);

    // Only some layers saw it.
    {
        let _guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
        for layer in [&fresh.blocks[0].fc1, &fresh.blocks[1].fc1] {
            layer.forward(&tensor(1, &[2, WIDTH])).unwrap();
        }
    }
    assert_text("a branch not run", save(&fresh), &["`blocks.0.fc2`"]);

    // Training is no calibration.
    let (_vars, trained) = prepared();
    drop(eval(&trained, delayed(4), &ids(0)));
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        trained.forward(&ids(0)).unwrap();
    }
    assert_text(
        "trained",
        save(&trained),
        &["`blocks.0.fc1`", "not calibrated"],
    );

    let vars = VarMap::new();
    let plain = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    calibrate(&plain, delayed(4));
    assert!(matches!(save(&plain), Error::NothingToExport));
    assert_text("nothing prepared", save(&plain), &["nothing to export"]);
    assert_eq!(
        names_in(dir.path()),
        Vec::<String>::new(),
        "nothing was written"
    );
}

#[test]
fn nan_activations_while_calibrating_are_an_error_that_names_the_layer() {
    for bad in [f32::NAN, f32::INFINITY] {
        let (_vars, net) = prepared();
        let guard = fp8_autocast(Autocast::new(delayed(4)).calibrating(true)).unwrap();
        net.forward(&ids(0)).unwrap();
        let mut x = vec![0.5; WIDTH];
        x[3] = bad;
        net.blocks[1].fc1.forward(&of(&x, &[1, WIDTH])).unwrap();
        net.forward(&ids(1)).unwrap();
        assert_text("close", guard.close().unwrap_err(), &["blocks.1.fc1.input"]);
        let dir = dir();
        let error = save_calibrated(&net, dir.path()).unwrap_err();
        assert_text(
            &bad.to_string(),
            error,
            &["`blocks.1.fc1`", "not calibrated"],
        );
        // A good calibration afterwards is as if it had not been.
        calibrate(&net, delayed(4));
        let (_vars, control) = calibrated(delayed(4));
        save_calibrated(&net, dir.path()).unwrap();
        let expected = eval(&control, delayed(4), &ids(2));
        assert_same(
            "after a good one",
            &eval(&net, delayed(4), &ids(2)),
            &expected,
        );
    }
}

#[test]
fn training_after_a_calibration_asks_for_another() {
    let (vars, net) = calibrated(delayed(4));
    let dir = dir();
    {
        let _guard = fp8_autocast(delayed(4)).unwrap();
        net.forward(&ids(0)).unwrap();
    }
    let error = save_calibrated(&net, dir.path()).unwrap_err();
    assert_text(
        "trained since",
        error,
        &["`blocks.0.fc1`", "not calibrated"],
    );
    // What the earlier calibration saw is forgotten: here, larger weights and inputs.
    for var in vars.all_vars() {
        var.set(&(var.as_tensor() * 0.5).unwrap()).unwrap();
    }
    calibrate(&net, delayed(4));
    save_calibrated(&net, dir.path()).unwrap();
    let file = Checkpoint::open(&[dir.path().join("model.safetensors")]).unwrap();
    let amax = flat(&net.blocks[0].fc1.weight().unwrap())
        .into_iter()
        .fold(0f32, |max, x| max.max(x.abs()));
    let scale = flat(&file.tensor("blocks.0.fc1.weight_scale", &device()).unwrap())[0];
    assert_eq!(scale, amax / 448., "the scale of the weight as it is now");
}

#[test]
fn tensors_without_a_name_or_with_one_name_are_refused() {
    let dir = dir();
    let mut layer = Linear::new(tensor(1, &[3, 4]), None).with_path("fc");
    prepare(&mut layer);
    {
        let _guard = fp8_autocast(Autocast::default().calibrating(true)).unwrap();
        layer.forward(&tensor(2, &[2, 4])).unwrap();
    }
    let unnamed = Linear::new(tensor(3, &[5, 4]), None);
    let error = save_calibrated(&(layer.clone(), unnamed), dir.path()).unwrap_err();
    assert_text("no path", error, &["[5, 4]", "no path"]);
    let parameter = |seed| Parameter::new("scale", tensor(seed, &[4]));
    let model = (layer.clone(), vec![parameter(4), parameter(5)]);
    let error = save_calibrated(&model, dir.path()).unwrap_err();
    assert_text("one name", error, &["`scale`", "two different tensors"]);
    let other = Linear::new(tensor(6, &[3, 4]), None).with_path("fc");
    let error = save_calibrated(&(layer, other), dir.path()).unwrap_err();
    assert_text("one path", error, &["`fc.weight`"]);
    assert_eq!(names_in(dir.path()), Vec::<String>::new());
}

// ---- bad files -------------------------------------------------------------------------------

/// A safetensors file of these tensors.
fn write(path: &Path, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (
            *name,
            TensorView::new(*dtype, shape.to_vec(), data).unwrap(),
        )
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The codes 0, 1, .. with the largest magnitude 448 among them.
fn codes(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| if i == 1 { 0x7E } else { (i * 5 % 120) as u8 })
        .collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Builds `fc`, `[4, 6]`, from a file through both VarBuilders; the errors' texts.
fn build(path: &Path) -> [Result<Linear, String>; 2] {
    let layer = |vb: VarBuilder<'_>| {
        nn::linear_no_bias(6, 4, vb.pp("fc")).map_err(|error| error.to_string())
    };
    let ours = match var_builder(&[path], DType::F32, &device()) {
        Ok(vb) => layer(vb),
        Err(error) => Err(error.to_string()),
    };
    [ours, layer(candle_var_builder(path, DType::F32))]
}

#[test]
fn a_hand_made_file_loads_through_both_var_builders() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let codes = codes(24);
    let shapes: [(&[usize], usize); 5] =
        [(&[1], 1), (&[], 1), (&[1, 1], 1), (&[4, 1], 4), (&[4], 4)];
    for (shape, scales) in shapes {
        let scale: Vec<f32> = (1..=scales).map(|i| i as f32 * 0.01).collect();
        write(
            &path,
            &[
                ("fc.weight", Dtype::F8_E4M3, &[4, 6], &codes),
                ("fc.weight_scale", Dtype::F32, shape, &f32s(&scale)),
                ("fc.input_scale", Dtype::F32, &[], &f32s(&[0.02])),
            ],
        );
        let value = Fp8Tensor::from_parts(
            Tensor::from_slice(&codes, (4, 6), &device()).unwrap(),
            fp8::core::Format::E4M3,
            if scales == 1 {
                Granularity::Tensorwise
            } else {
                Granularity::Rowwise
            },
            Contraction::Cols,
            of(&scale, &[scales]),
        )
        .unwrap()
        .dequantize(DType::F32)
        .unwrap();
        for (name, layer) in ["ours", "candle's"].iter().zip(build(&path)) {
            let layer = layer.unwrap();
            let weight = layer.static_weight().unwrap();
            let case = format!("{name}, scale {shape:?}");
            assert_same(
                &case,
                &weight.codes().dequantize(DType::F32).unwrap(),
                &value,
            );
            let InputScaling::Static(input) = weight.input_scaling() else {
                panic!("{case}: the input scale is static");
            };
            assert_eq!(
                (flat(input), input.dims()),
                (vec![0.02], &[1][..]),
                "{case}"
            );
        }
    }
}

#[test]
fn fp8_tensors_that_do_not_fit_together_are_typed_errors() {
    if skipped_on_cuda("candle 0.11 casts nothing to or from F8E4M3 there") {
        return;
    }
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    let codes = codes(24);
    let (floats, scale) = (f32s(&common::values(1, 24)), f32s(&[0.01]));
    let three = f32s(&[1., 2., 3.]);
    let weight: (&str, Dtype, &[usize], &[u8]) = ("fc.weight", Dtype::F8_E4M3, &[4, 6], &codes);
    let one: (&str, Dtype, &[usize], &[u8]) = ("fc.weight_scale", Dtype::F32, &[1], &scale);
    type Entry<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);
    let cases: [(&str, Vec<Entry<'_>>, &[&str]); 6] = [
        (
            "no scale",
            vec![weight],
            &["`fc.weight`", "fc.weight_scale"],
        ),
        (
            "f32 beside a scale",
            vec![("fc.weight", Dtype::F32, &[4, 6], &floats), one],
            &["`fc.weight`", "F8_E4M3"],
        ),
        (
            "three scales for four rows",
            vec![weight, ("fc.weight_scale", Dtype::F32, &[3, 1], &three)],
            &["`fc.weight_scale`", "[3, 1]", "[4, 1]"],
        ),
        (
            "three input scales",
            vec![weight, one, ("fc.input_scale", Dtype::F32, &[3], &three)],
            &["`fc.input_scale`", "[3]", "one element"],
        ),
        (
            "another shape",
            vec![("fc.weight", Dtype::F8_E4M3, &[6, 4], &codes), one],
            &["fc.weight", "[6, 4]", "[4, 6]"],
        ),
        ("no weight", vec![one], &["fc.weight"]),
    ];
    for (case, tensors, parts) in cases {
        write(&path, &tensors);
        for (name, layer) in ["ours", "candle's"].iter().zip(build(&path)) {
            let error = layer.expect_err(&format!("{case}, {name}"));
            assert_text(&format!("{case}, {name}"), error, parts);
        }
    }
    // What our VarBuilder refuses at once.
    write(&path, &[weight]);
    let error = Checkpoint::open(&[&path]).unwrap_err();
    assert!(
        matches!(&error, Error::MissingScale { tensor, missing }
            if tensor == "fc.weight" && missing == "fc.weight_scale"),
        "{error:?}"
    );
    write(&path, &[("fc.weight", Dtype::F32, &[4, 6], &floats), one]);
    let error = Checkpoint::open(&[&path]).unwrap_err();
    assert!(
        matches!(&error, Error::TensorDType { tensor, .. } if tensor == "fc.weight"),
        "{error:?}"
    );
    write(
        &path,
        &[weight, ("fc.weight_scale", Dtype::I32, &[1], &scale)],
    );
    assert_text(
        "an integer scale",
        Checkpoint::open(&[&path]).unwrap_err(),
        &["`fc.weight_scale`", "I32", "F32"],
    );
    let e5m2: Entry<'_> = ("fc.weight", Dtype::F8_E5M2, &[4, 6], &codes);
    write(&path, &[e5m2, one]);
    assert_text(
        "E5M2",
        Checkpoint::open(&[&path]).unwrap_err(),
        &["`fc.weight`", "F8_E5M2"],
    );
}

#[test]
fn missing_tensors_and_other_shapes_are_named() {
    let dir = dir();
    let path = dir.path().join("model.safetensors");
    write(
        &path,
        &[(
            "fc.weight",
            Dtype::F32,
            &[4, 6],
            &f32s(&common::values(1, 24)),
        )],
    );
    let vb = var_builder(&[&path], DType::F32, &device()).unwrap();
    let error = nn::linear(6, 4, vb.pp("fc")).unwrap_err();
    assert_text("bias", error, &["`fc.bias`", "model.safetensors"]);
    let error = nn::linear_no_bias(6, 4, vb.pp("fd")).unwrap_err();
    assert_text("other path", error, &["`fd.weight`", "model.safetensors"]);
    let error = nn::linear_no_bias(5, 4, vb.pp("fc")).unwrap_err();
    assert_text("other shape", error, &["`fc.weight`", "[4, 6]", "[4, 5]"]);
}

#[test]
fn files_that_are_no_whole_safetensors_files_are_refused() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    let good = save_calibrated(&net, dir.path().join("good.safetensors"))
        .unwrap()
        .model;
    let bytes = fs::read(&good).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let with_length = |length: u64| [&length.to_le_bytes()[..], &bytes[8..]].concat();
    let cases: [(&str, Vec<u8>, &str); 10] = [
        ("empty", vec![], "too few"),
        ("seven bytes", bytes[..7].to_vec(), "too few"),
        (
            "header cut",
            bytes[..8 + header / 2].to_vec(),
            "header claims",
        ),
        ("no data", bytes[..8 + header].to_vec(), "truncated"),
        (
            "one byte short",
            bytes[..bytes.len() - 1].to_vec(),
            "truncated",
        ),
        ("one byte more", [&bytes[..], &[0]].concat(), "too long"),
        (
            "appended twice",
            [&bytes[..], &bytes[..]].concat(),
            "too long",
        ),
        (
            "absurd header",
            with_length(u64::MAX),
            "18446744073709551615 bytes",
        ),
        (
            "header past the limit",
            with_length(1 << 40),
            "1099511627776 bytes",
        ),
        (
            "text",
            b"this is not a safetensors file at all\n".to_vec(),
            "header claims",
        ),
    ];
    for (case, content, reason) in cases {
        let path = dir.path().join("bad.safetensors");
        fs::write(&path, content).unwrap();
        let error = Checkpoint::open(&[&path]).unwrap_err();
        assert!(
            matches!(&error, Error::NotSafetensors { .. }),
            "{case}: {error:?}"
        );
        assert_text(
            case,
            error,
            &["bad.safetensors", "not a valid safetensors file", reason],
        );
    }
    // A header of the right length that is no JSON.
    let mut scrambled = bytes.clone();
    scrambled[8..8 + header].fill(b'x');
    let path = dir.path().join("bad.safetensors");
    fs::write(&path, scrambled).unwrap();
    let error = Checkpoint::open(&[&path]).unwrap_err();
    assert!(matches!(&error, Error::NotSafetensors { .. }), "{error:?}");

    for path in [
        dir.path().join("absent.safetensors"),
        dir.path().to_path_buf(),
    ] {
        let error = Checkpoint::open(&[&path]).unwrap_err();
        assert!(
            matches!(&error, Error::Read { path: p, .. } | Error::NotARegularFile { path: p, .. }
                if *p == path),
            "{error:?}"
        );
        assert_text(
            "unreadable",
            error,
            &["cannot read", &path.display().to_string()],
        );
    }
}

// ---- saving that fails -----------------------------------------------------------------------

/// Everything in a directory, byte for byte.
fn snapshot(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |name: String| (name.clone(), fs::read(dir.join(name)).unwrap());
    names_in(dir).into_iter().map(read).collect()
}

#[track_caller]
fn assert_unchanged(case: &str, dir: &Path, before: &BTreeMap<String, Vec<u8>>) {
    assert_eq!(
        names_in(dir),
        before.keys().cloned().collect::<Vec<_>>(),
        "{case}: files"
    );
    assert!(
        snapshot(dir) == *before,
        "{case}: the old files are not what they were"
    );
}

#[test]
fn a_config_that_cannot_be_merged_leaves_everything_as_it_was() {
    let (_vars, net) = calibrated(delayed(16));
    for content in ["[1, 2]", "\"text\"", "{\"open\": ", "", "null"] {
        let dir = dir();
        save_calibrated(&net, dir.path()).unwrap();
        fs::write(dir.path().join("config.json"), content).unwrap();
        let before = snapshot(dir.path());
        let error = save_calibrated(&net, dir.path()).unwrap_err();
        assert!(matches!(&error, Error::Json { .. }), "{content}: {error:?}");
        assert_text(content, error, &["config.json", "not valid"]);
        assert_unchanged(content, dir.path(), &before);
    }
    let dir = dir();
    fs::create_dir(dir.path().join("config.json")).unwrap();
    let error = save_calibrated(&net, dir.path()).unwrap_err();
    assert_text("a directory", error, &["config.json"]);
    assert_eq!(names_in(dir.path()), ["config.json"]);
}

#[test]
fn what_stands_in_the_way_of_a_directory_is_named() {
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    fs::write(dir.path().join("taken"), "").unwrap();
    let error = save_calibrated(&net, dir.path().join("taken/below/m.safetensors")).unwrap_err();
    assert!(
        matches!(&error, Error::Write(FileError::Io { .. })),
        "{error:?}"
    );
    assert_text("taken", error, &["taken", "make the directory"]);
    assert_eq!(names_in(dir.path()), ["taken"], "nothing was made");
    // Not a file either.
    let error = save_calibrated(&net, "/dev/full").unwrap_err();
    assert_text("a device", error, &["/dev/full", "not a directory"]);
}

/// A tensor in the middle of the file that cannot be written.
#[test]
fn an_error_in_the_middle_of_the_file_keeps_the_old_one() {
    let (vars, net) = calibrated(delayed(16));
    let dir = dir();
    save_calibrated(&net, dir.path()).unwrap();
    let before = snapshot(dir.path());
    drop(vars);
    let Ok(strange) = Tensor::from_raw_buffer(&[0; 16], DType::F6E2M3, &[16], &device()) else {
        println!("skipped: this candle makes no F6E2M3 tensors");
        return;
    };
    let model = (net, Parameter::new("strange", strange));
    let error = save_calibrated(&model, dir.path()).unwrap_err();
    assert!(
        matches!(&error, Error::Write(FileError::Tensor { .. })),
        "{error:?}"
    );
    assert_text("strange", error, &["`strange`", "model.safetensors"]);
    assert_unchanged("strange", dir.path(), &before);
}

/// Saves a larger model over the files in `dir` and expects an error of the system.
fn save_and_fail(case: &str, dir: &Path) {
    let before = snapshot(dir);
    let mut big = Linear::new(tensor(2, &[512, 512]), None).with_path("big");
    prepare(&mut big);
    {
        let _guard = fp8_autocast(Autocast::default().calibrating(true)).unwrap();
        big.forward(&tensor(3, &[2, 512])).unwrap();
    }
    let error = save_calibrated(&big, dir).unwrap_err();
    assert!(
        matches!(&error, Error::Write(FileError::Io { .. })),
        "{case}: {error:?}"
    );
    println!(
        "{case}: {}",
        assert_text(case, error, &["model.safetensors", "cannot"])
    );
    assert_unchanged(case, dir, &before);

    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device());
    let model = nn::linear(256, 256, vb.pp("fc")).unwrap();
    let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default()).unwrap();
    let meta = TrainingMeta {
        step: 1,
        recipe: None,
        random: Value::Null,
        extra: Value::Null,
    };
    let path = dir.join("model.safetensors");
    let error = save_training(&path, &model, &vars, &optimizer, &meta).unwrap_err();
    assert_text(case, error, &["model.safetensors", "cannot"]);
    assert_unchanged(case, dir, &before);
}

const LIMITED: &str = "FP8_TEST_LIMITED_DIRECTORY";

/// Run by [`a_write_that_the_system_cuts_off_keeps_the_old_file`] in a process of its own.
#[test]
fn child_under_a_file_size_limit() {
    if let Ok(dir) = std::env::var(LIMITED) {
        save_and_fail("file size limit", Path::new(&dir));
    }
}

#[test]
fn a_write_that_the_system_cuts_off_keeps_the_old_file() {
    if !cfg!(unix) {
        println!("skipped: needs a Unix shell to set a file size limit");
        return;
    }
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    save_calibrated(&net, dir.path()).unwrap();
    let before = snapshot(dir.path());
    // 64 blocks of 512 or 1024 bytes; without the trap the system would kill the process.
    let script = "trap '' XFSZ; ulimit -f 64 && exec \"$0\" \"$@\"";
    let output = Command::new("sh")
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "child_under_a_file_size_limit", "--nocapture"])
        .env(LIMITED, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
    assert!(
        text.contains("file size limit: "),
        "the child saved under the limit: {text}"
    );
    assert_unchanged("seen from outside", dir.path(), &before);
}

/// A small file system in memory, if this process may mount one.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let dir = dir();
        let mounted = mount(&["-t", "tmpfs", "-o", "size=128k", "tmpfs"], dir.path());
        mounted.then_some(Self(dir))
    }

    fn path(&self) -> PathBuf {
        self.0.path().to_path_buf()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output();
    }
}

fn mount(args: &[&str], dir: &Path) -> bool {
    let output = Command::new("mount").args(args).arg(dir).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn a_full_disk_and_a_read_only_one_keep_the_old_file() {
    let Some(disk) = SmallDisk::mount() else {
        println!("skipped: this process may not mount a small file system");
        return;
    };
    let (_vars, net) = calibrated(delayed(16));
    save_calibrated(&net, disk.path()).unwrap();
    save_and_fail("full disk", &disk.path());
    assert!(mount(&["-o", "remount,ro"], &disk.path()), "remount");
    save_and_fail("read-only", &disk.path());
}

#[test]
fn an_unwritable_directory_keeps_the_old_file() {
    use std::os::unix::fs::PermissionsExt;
    let (_vars, net) = calibrated(delayed(16));
    let dir = dir();
    save_calibrated(&net, dir.path()).unwrap();
    let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
    set(0o555);
    if fs::write(dir.path().join("probe"), "").is_ok() {
        println!("skipped: this process may write everywhere (root)");
    } else {
        save_and_fail("unwritable", dir.path());
    }
    set(0o755);
}

#[test]
fn saving_again_replaces_the_files() {
    let (vars, net) = calibrated(delayed(16));
    let dir = dir();
    save_calibrated(&net, dir.path()).unwrap();
    let before = snapshot(dir.path());
    save_calibrated(&net, dir.path()).unwrap();
    assert_unchanged("the same model", dir.path(), &before);
    fill(&vars, 8);
    calibrate(&net, delayed(16));
    save_calibrated(&net, dir.path()).unwrap();
    assert_eq!(names_in(dir.path()), ["config.json", "model.safetensors"]);
    assert!(snapshot(dir.path()) != before, "another model");
}

#[test]
fn a_loaded_model_is_exported_as_it_is() {
    for recipe in [Recipe::from(delayed(16)), "rowwise".parse().unwrap()] {
        let (_vars, net) = calibrated(recipe);
        let (first, second) = (dir(), dir());
        let report = save_calibrated(&net, first.path()).unwrap();
        let loaded =
            Net::new(var_builder(&[&report.model], DType::F32, &device()).unwrap()).unwrap();
        let again = save_calibrated(&loaded, second.path()).unwrap();
        assert_eq!(
            std::fs::read(&report.model).unwrap(),
            std::fs::read(&again.model).unwrap()
        );
        assert_eq!(report.quantized, again.quantized);
        assert_eq!(report.ignored, again.ignored);
    }
}

#[test]
fn inputs_calibrated_in_another_format_are_refused() {
    let recipe = delayed(16).with_format(DelayedFormat::E5m2);
    let (_vars, net) = calibrated(recipe);
    let error = save_calibrated(&net, dir().path()).unwrap_err();
    assert_text("E5M2 inputs", error, &["blocks.0.fc1", "e5m2", "e4m3"]);
}
