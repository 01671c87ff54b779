//! A directory of any family: a safetensors file, and a configuration under one of its possible names.

use candle_core::{DType, Device};
use fp8::load::{Checkpoint, OpenOptions};
use fp8::nn;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::HashMap;

/// Layers with more weights are not built.
const LARGE: usize = 1 << 16;

const CONFIGS: [&str; 3] = ["config.json", "hf_quant_config.json", "params.json"];

/// The input: a byte that says where the configuration is, whether there is a second one like it (bit 6) and whether scales may be missing (bit 7),
/// two bytes with its length, the configuration, the file.
pub fn open(data: &[u8]) -> Option<Checkpoint> {
    let (&[place, low, high], rest) = data.split_first_chunk::<3>()?;
    let length = usize::from(u16::from_le_bytes([low, high])).min(rest.len());
    let (config, file) = rest.split_at(length);
    let dir = super::scratch().join("families");
    std::fs::create_dir_all(&dir).unwrap();
    for name in CONFIGS {
        let _ = std::fs::remove_file(dir.join(name));
    }
    if !config.is_empty() {
        let name = CONFIGS[usize::from(place & 0x3F) % CONFIGS.len()];
        let second = (place & 0x40 != 0).then_some(CONFIGS[1]);
        for name in [Some(name), second].into_iter().flatten() {
            std::fs::write(dir.join(name), config).unwrap();
        }
    }
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    let options = OpenOptions::new().with_allow_unscaled(place & 0x80 != 0);
    Checkpoint::open_dir_with(&dir, &options).ok()
}

pub fn run(data: &[u8]) {
    let Some(checkpoint) = open(data) else {
        return;
    };
    let cpu = Device::Cpu;
    let names = checkpoint.other_names();
    for name in &names {
        let read = checkpoint.tensor(name, &cpu);
        if let (Ok(tensor), Some(shape)) = (read, checkpoint.shape(name)) {
            assert_eq!(tensor.dims(), shape, "{name}");
        }
    }
    let mut layers = vec![];
    for path in checkpoint.layer_paths() {
        let shape = match path.as_str() {
            "" => checkpoint.shape("weight"),
            path => checkpoint.shape(&format!("{path}.weight")),
        };
        let &[n, k] = shape.unwrap() else {
            panic!("{path}: {shape:?}")
        };
        let Ok(layer) = checkpoint.stored_layer(&path, &cpu) else {
            continue;
        };
        assert_eq!(layer.codes.dims(), [n, k]);
        if n.max(1).saturating_mul(k.max(1)) < LARGE {
            let value = layer.codes.dequantize(DType::F32).unwrap();
            let value = value.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(value.iter().all(|x| !x.is_nan()), "{path}");
            layers.push((path, n, k, value));
        }
    }
    let Ok(vb) = checkpoint.var_builder(DType::F32, &cpu) else {
        return;
    };
    for name in &names {
        let _ = vb.get_unchecked(name);
    }
    for (path, n, k, value) in layers {
        // Both ways to read a layer give the same.
        let at = match path.as_str() {
            "" => vb.clone(),
            path => vb.pp(path),
        };
        let layer = nn::linear_no_bias(k, n, at).unwrap_or_else(|e| panic!("{path} {n} {k}: {e}"));
        let weight = layer.weight().unwrap().flatten_all().unwrap();
        assert_eq!(weight.to_vec1::<f32>().unwrap(), value, "{path}");
    }
}

type Tensor<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

fn seed(place: u8, config: Value, tensors: &[Tensor<'_>], metadata: &[(&str, String)]) -> Vec<u8> {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (
            *name,
            TensorView::new(*dtype, shape.to_vec(), data).unwrap(),
        )
    });
    let metadata: HashMap<String, String> = metadata
        .iter()
        .map(|(key, value)| (key.to_string(), value.clone()))
        .collect();
    let file = safetensors::serialize(views, Some(metadata)).unwrap();
    let config = match config {
        Value::Null => vec![],
        config => config.to_string().into_bytes(),
    };
    let length = (config.len() as u16).to_le_bytes();
    [&[place], &length[..], &config, &file].concat()
}

pub fn seeds() -> Vec<Vec<u8>> {
    let codes = |len: usize| (0..len).map(|i| (i * 5 % 120) as u8).collect::<Vec<u8>>();
    let f32s = |len: usize| {
        (0..len)
            .flat_map(|i| (0.01 * (i + 1) as f32).to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let bytes = |len: usize| (0..len).map(|i| 118 + (i % 7) as u8).collect::<Vec<u8>>();
    let weight = |name| (name, Dtype::F8_E4M3, &[4, 32][..], codes(128));
    let float =
        |name, shape: &'static [usize]| (name, Dtype::F32, shape, f32s(shape.iter().product()));
    let mx = |name, dtype| (name, dtype, &[4, 1][..], bytes(4));
    let quantized = |config: Value| json!({"quantization_config": config});
    let fp8 = |kind: &str, block: Value, more: Value| {
        quantized(
            json!({"quant_method": "fp8", "activation_scheme": kind, "weight_block_size": block,
            "scale_fmt": more, "modules_to_not_convert": ["lm_head", "re*"]}),
        )
    };
    let quark = json!({"quant_method": "quark", "exclude": ["*head"], "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0},
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_token", "is_dynamic": true}}});
    let mixed = json!({"quantization": {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["b*"],
        "quantized_layers": {"a": {"quant_algo": "fp8_pb_wo"}}}});
    let described = json!({"_type": "Float8Tensor", "_data": {"block_size": [1, 32], "act_quant_kwargs":
        {"_data": {"granularity": {"_type": "PerRow"}, "hp_value_ub": 100.0}}}});
    let comfy = json!({"layers": {"a": {"format": "mxfp8"}, "b": {"format": "float8_e4m3fn"}}});
    let mistral = json!({"n_heads": 2, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}});
    let q = "layers.0.attention.wq";
    let names = [
        format!("{q}.weight"),
        format!("{q}.qscale_weight"),
        format!("{q}.qscale_act"),
    ];
    vec![
        seed(
            0,
            fp8("static", Value::Null, Value::Null),
            &[
                weight("a.weight"),
                float("a.weight_scale", &[]),
                float("a.input_scale", &[1]),
                float("s.self_attn.kv_scale", &[]),
            ],
            &[],
        ),
        seed(
            0,
            fp8("dynamic", json!([2, 16]), json!("ue8m0")),
            &[weight("a.weight"), float("a.weight_scale_inv", &[2, 2])],
            &[],
        ),
        seed(
            0,
            fp8("dynamic", json!([2, 16]), Value::Null),
            &[
                weight("a.weight"),
                ("a.scale", Dtype::F8_E8M0, &[4, 2], bytes(8)),
            ],
            &[],
        ),
        seed(
            0,
            quantized(json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 12.0})),
            &[weight("a.weight"), float("a.weight_scale", &[4, 1])],
            &[],
        ),
        seed(
            0,
            quantized(quark),
            &[
                weight("a.weight"),
                float("a.weight_scale", &[4]),
                float("m.self_attn.k_proj.output_scale", &[]),
            ],
            &[],
        ),
        seed(
            1,
            mixed,
            &[
                weight("a.weight"),
                float("a.weight_scale", &[1, 1, 1, 1]),
                float("b.weight", &[2, 2]),
            ],
            &[],
        ),
        seed(
            0,
            json!({"quantization": {"group_size": 32, "bits": 8, "mode": "mxfp8", "b": false}}),
            &[
                ("a.weight", Dtype::U32, &[4, 8], codes(128)),
                mx("a.scales", Dtype::U8),
            ],
            &[],
        ),
        seed(
            0,
            Value::Null,
            &[weight("a._weight_qdata"), float("a._weight_scale", &[4, 1])],
            &[
                ("tensor_names", "[\"a.weight\"]".into()),
                ("a.weight", described.to_string()),
            ],
        ),
        seed(
            0,
            Value::Null,
            &[
                weight("p.a.weight"),
                ("p.a.weight_scale", Dtype::F8_E8M0, &[128, 4], bytes(512)),
                weight("b.weight"),
                float("b.weight_scale", &[]),
            ],
            &[("_quantization_metadata", comfy.to_string())],
        ),
        seed(
            0,
            Value::Null,
            &[
                weight("a.weight"),
                float("a.scale_weight", &[4, 2, 1]),
                float("a.scale_input", &[]),
                float("scaled_fp8", &[0]),
            ],
            &[],
        ),
        seed(
            2,
            mistral,
            &[
                (&names[0], Dtype::F8_E4M3, &[4, 32], codes(128)),
                (&names[1], Dtype::F32, &[4], f32s(4)),
                (&names[2], Dtype::F32, &[], f32s(1)),
                float("tok_embeddings.weight", &[2]),
            ],
            &[],
        ),
        seed(
            0,
            Value::Null,
            &[weight("weight"), float("weight_scale", &[4, 1])],
            &[],
        ),
        seed(
            0x80,
            Value::Null,
            &[
                weight("a.weight"),
                ("c.weight", Dtype::F8_E5M2, &[3], codes(3)),
                ("n", Dtype::F8_E4M3, &[2], codes(2)),
            ],
            &[],
        ),
    ]
}
