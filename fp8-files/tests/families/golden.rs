//! Small models written by the families' own libraries: weights load equal to the bit, from one file and from two.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use fp8_core::Granularity;
use fp8_files::load::{Checkpoint, FamilyName, Inputs, OpenOptions};
use fp8_recipes::nn::{self, InputScaling};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Whether the layers of a folder scale inputs as expected.
type Input = fn(&InputScaling) -> bool;

struct Folder {
    name: &'static str,
    family: FamilyName,
    granularity: fn(usize, usize) -> Granularity,
    input: Input,
}

fn blocks(_: usize, _: usize) -> Granularity {
    let (rows, cols) = (128, 128);
    Granularity::Blockwise { rows, cols }
}

const STATIC: Input = |input| matches!(input, InputScaling::Static(scale) if scale.dims() == [1]);
const NONE: Input = |input| matches!(input, InputScaling::None);
const TOKEN: Input = |input| {
    matches!(
        input,
        InputScaling::DynamicPerToken {
            power_of_two: false,
            amax_bound: None
        }
    )
};
const TENSOR: Input = |input| {
    matches!(
        input,
        InputScaling::DynamicPerTensor {
            power_of_two: false,
            amax_bound: None
        }
    )
};
const GROUPS: Input = |input| {
    matches!(
        input,
        InputScaling::DynamicPerGroup {
            size: 128,
            power_of_two: false
        }
    )
};

fn folders() -> [Folder; 10] {
    let tensor = |_, _| Granularity::Tensorwise;
    let row = |_, _| Granularity::Rowwise;
    let folder = |name, family, granularity, input| Folder {
        name,
        family,
        granularity,
        input,
    };
    [
        folder(
            "ct_static_tensor",
            FamilyName::COMPRESSED_TENSORS,
            tensor,
            STATIC,
        ),
        folder(
            "ct_channel_token_bf16",
            FamilyName::COMPRESSED_TENSORS,
            row,
            TOKEN,
        ),
        folder(
            "ct_block128",
            FamilyName::COMPRESSED_TENSORS,
            blocks,
            GROUPS,
        ),
        folder("modelopt_fp8_kv", FamilyName::MODEL_OPT, tensor, STATIC),
        folder("modelopt_pb_wo", FamilyName::MODEL_OPT, blocks, NONE),
        folder("hf_block_f32", FamilyName::FP8_BLOCKS, blocks, GROUPS),
        folder(
            "hf_per_tensor_static",
            FamilyName::HF_PER_TENSOR,
            tensor,
            STATIC,
        ),
        folder("autofp8_static", FamilyName::AUTO_FP8, tensor, STATIC),
        folder("torchao_row", FamilyName::TORCHAO, row, TOKEN),
        folder("torchao_tensor", FamilyName::TORCHAO, tensor, TENSOR),
    ]
}

/// The tensors, metadata and configurations of a folder. Two folders are others with different names and configuration.
struct Files {
    tensors: Vec<Entry>,
    metadata: HashMap<String, String>,
    configs: Vec<(&'static str, String)>,
    expected: HashMap<String, Tensor>,
}

fn files(name: &str) -> Files {
    let respelled = match name {
        "hf_per_tensor_static" => Some((
            json!({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": null,
                   "modules_to_not_convert": ["lm_head"]}),
            ("weight_scale_inv", "activation_scale"),
        )),
        "autofp8_static" => Some((
            json!({"quant_method": "fp8", "activation_scheme": "static",
                   "ignored_layers": ["lm_head"]}),
            ("weight_scale", "input_scale"),
        )),
        _ => None,
    };
    let dir = golden(if respelled.is_some() {
        "ct_static_tensor"
    } else {
        name
    });
    let (mut tensors, metadata) = read(&dir.join("model.safetensors"));
    let mut config: Value =
        serde_json::from_str(&fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
    if let Some((quantization, (weight_scale, input_scale))) = respelled {
        config["quantization_config"] = quantization;
        for tensor in &mut tensors {
            let (path, own) = tensor.name.rsplit_once('.').unwrap();
            let own = match own {
                "weight_scale" => weight_scale,
                "input_scale" => input_scale,
                _ => continue,
            };
            tensor.name = format!("{path}.{own}");
            tensor.shape.clear();
        }
    }
    let mut configs = vec![("config.json", config.to_string())];
    if let Ok(text) = fs::read_to_string(dir.join("hf_quant_config.json")) {
        configs.push(("hf_quant_config.json", text));
    }
    let expected = candle_core::safetensors::load(dir.join("expected.safetensors"), &Device::Cpu);
    Files {
        tensors,
        metadata,
        configs,
        expected: expected.unwrap(),
    }
}

impl Files {
    /// The first rows of each quantized weight, by path.
    fn weights(&self) -> BTreeMap<&str, &Tensor> {
        let names = self.expected.iter();
        names
            .filter_map(|(name, value)| Some((name.strip_suffix(".dequant")?, value)))
            .collect()
    }

    /// A directory with the configurations and, if `whole`, the tensors in one file; else in two.
    fn write(&self, whole: bool) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in &self.configs {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let (tensors, metadata) = (&self.tensors, self.metadata.clone());
        let name = "model.safetensors";
        match whole {
            true => write(&dir.path().join(name), tensors, Some(metadata)),
            false => split(dir.path(), tensors, metadata, name),
        }
        dir
    }
}

fn check(folder: &Folder, dir: &Path, files: &Files, case: &str) {
    let open = || Checkpoint::open_dir(dir).unwrap_or_else(|error| panic!("{case}: {error}"));
    let checkpoint = open();
    assert_eq!(checkpoint.family(), folder.family, "{case}");
    let expected = files.weights();
    assert_eq!(
        checkpoint.layer_paths(),
        expected.keys().copied().collect::<Vec<_>>(),
        "{case}"
    );
    assert_eq!(
        checkpoint.config().unwrap()["model_type"],
        "llama",
        "{case}"
    );
    for (path, rows) in &expected {
        let case = format!("{case}: {path}");
        let layer = checkpoint.stored_layer(path, &Device::Cpu).unwrap();
        assert!((folder.input)(&layer.input), "{case}: {:?}", layer.input);
        let &[n, k] = layer.codes.dims() else {
            panic!("{case}")
        };
        assert_eq!(
            layer.codes.granularity(),
            (folder.granularity)(n, k),
            "{case}"
        );
        assert_eq!(layer.codes.dequant_scale().dtype(), DType::F32);
        let value = layer.codes.dequantize(DType::F32).unwrap();
        assert_eq!(bits(&value.narrow(0, 0, 8).unwrap()), bits(rows), "{case}");
        // FP8 layers get the same codes and scales, stock layers the value.
        let vb = open().var_builder(DType::F32, &Device::Cpu).unwrap();
        let ours = nn::linear_no_bias(k, n, vb.pp(path)).unwrap();
        assert_eq!(bits(&ours.weight().unwrap()), bits(&value), "{case}");
        assert!(
            (folder.input)(ours.static_weight().unwrap().input_scaling()),
            "{case}"
        );
        let stock = candle_nn::linear_no_bias(k, n, vb.pp(path)).unwrap();
        assert_eq!(bits(stock.weight()), bits(&value), "{case}");
    }
    let others = checkpoint.other_names();
    for name in [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ] {
        assert!(others.contains(&name.to_string()), "{case}: {name}");
    }
    let is_scale = |name: &&String| name.contains("scale");
    let scales: Vec<&String> = others.iter().filter(is_scale).collect();
    let caches = [
        "0.self_attn.k",
        "0.self_attn.v",
        "1.self_attn.k",
        "1.self_attn.v",
    ]
    .map(|name| format!("model.layers.{name}_scale"));
    match folder.name {
        "modelopt_fp8_kv" => {
            assert_eq!(scales, caches.iter().collect::<Vec<_>>());
            for name in &caches {
                let scale = checkpoint.tensor(name, &Device::Cpu).unwrap();
                assert_eq!((scale.dims(), scale.dtype()), (&[1][..], DType::F32));
                let (path, own) = name.rsplit_once('.').unwrap();
                let stored = format!("{path}.{}_proj.{own}", &own[..1]);
                let stored = checkpoint.tensor(&stored, &Device::Cpu).unwrap();
                assert_eq!(bits(&stored), bits(&scale));
            }
        }
        _ => assert!(scales.is_empty(), "{case}: {scales:?}"),
    }
}

#[test]
fn values_are_equal_to_the_bit_in_every_family() {
    for folder in folders() {
        let files = files(folder.name);
        let dir = files.write(true);
        check(&folder, dir.path(), &files, folder.name);
    }
}

#[test]
fn a_weight_and_its_scale_may_be_in_different_files() {
    for folder in folders() {
        let files = files(folder.name);
        let dir = files.write(false);
        // A file that the index does not name is ignored.
        let stray = [floats("model.norm.weight", &[1], &[7.])];
        write(&dir.path().join("model-00003.safetensors"), &stray, None);
        check(
            &folder,
            dir.path(),
            &files,
            &format!("{} in two files", folder.name),
        );
    }
}

#[test]
fn inputs_may_be_overruled() {
    for folder in folders() {
        let dir = files(folder.name).write(true);
        for (inputs, fits) in [(Inputs::WeightOnly, NONE), (Inputs::Groups(128), GROUPS)] {
            let options = OpenOptions::new().with_inputs(inputs);
            let checkpoint = Checkpoint::open_dir_with(dir.path(), &options).unwrap();
            let path = "model.layers.0.mlp.up_proj";
            let layer = checkpoint.stored_layer(path, &Device::Cpu).unwrap();
            assert!(fits(&layer.input), "{}: {:?}", folder.name, layer.input);
            let vb = checkpoint.var_builder(DType::F32, &Device::Cpu).unwrap();
            let &[n, k] = layer.codes.dims() else {
                panic!()
            };
            let layer = nn::linear_no_bias(k, n, vb.pp(path)).unwrap();
            assert!(fits(layer.static_weight().unwrap().input_scaling()));
        }
    }
}
