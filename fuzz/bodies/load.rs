//! A safetensors file with a configuration beside it.

use candle_core::{DType, Device, Module, Tensor};
use fp8::load::Checkpoint;
use fp8::nn;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// No products with larger tensors: the input is small, but a shape with a 0 in it can have any other size.
const LARGE: usize = 1 << 16;

/// The input: two bytes with the length of the configuration, the configuration, the file.
pub fn run(data: &[u8]) {
    let Some((length, rest)) = data.split_first_chunk::<2>() else {
        return;
    };
    let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
    let (config, file) = rest.split_at(length);
    let dir = super::scratch();
    let (config_path, path) = (dir.join("config.json"), dir.join("model.safetensors"));
    let _ = std::fs::remove_file(&config_path);
    if !config.is_empty() {
        std::fs::write(config_path, config).unwrap();
    }
    std::fs::write(&path, file).unwrap();
    let Ok(checkpoint) = Checkpoint::open(&[&path]) else {
        return;
    };
    let cpu = Device::Cpu;
    let mut layers = vec![];
    for name in checkpoint.names() {
        let _ = checkpoint.tensor(name, &cpu);
        let shape = checkpoint.shape(name).unwrap_or_default();
        if let (Some(layer), &[n, k]) = (name.strip_suffix(".weight"), shape)
            && n.max(1).saturating_mul(k.max(1)) < LARGE
        {
            layers.push((layer.to_string(), n, k));
        }
    }
    let names: Vec<String> = checkpoint.names().iter().map(|n| n.to_string()).collect();
    let Ok(vb) = checkpoint.var_builder(DType::F32, &cpu) else {
        return;
    };
    for name in &names {
        let _ = vb.get_unchecked(name);
    }
    for (path, n, k) in layers {
        let Ok(layer) = nn::linear_no_bias(k, n, vb.pp(&path)) else {
            continue;
        };
        // Sums over nothing are up to the layers, not the loader.
        if n > 0 && k > 0 {
            let x = Tensor::ones((2, k), DType::F32, &cpu).unwrap();
            let _ = layer.forward(&x).map(|y| y.to_vec2::<f32>().unwrap());
        }
        let weight = layer.weight().unwrap();
        if layer.static_weight().is_some() {
            assert_eq!(weight.dims(), [n, k]);
        }
    }
}

fn file(scale: (Dtype, &[usize], &[u8]), input: bool) -> Vec<u8> {
    let codes: Vec<u8> = (0..2 * 32).map(|i| (i * 5 % 120) as u8).collect();
    let one = 0.02f32.to_le_bytes();
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let mut views = vec![
        ("a.weight", view(Dtype::F8_E4M3, &[2, 32], &codes)),
        ("a.weight_scale", view(scale.0, scale.1, scale.2)),
        ("b.weight", view(Dtype::F32, &[1, 1], &one)),
        ("b.bias", view(Dtype::BF16, &[2], &one)),
    ];
    if input {
        views.push(("a.input_scale", view(Dtype::F32, &[1], &one)));
    }
    let metadata = [
        ("format".into(), "pt".into()),
        ("c".into(), "b.bias".into()),
    ];
    safetensors::serialize(views, Some(metadata.into())).unwrap()
}

pub fn seeds() -> Vec<Vec<u8>> {
    let scale = [0.01f32.to_le_bytes(), 0.03f32.to_le_bytes()].concat();
    let one = |input| file((Dtype::F32, &[1], &scale[..4]), input);
    let rows = || file((Dtype::F32, &[2, 1], &scale), false);
    let bytes = || file((Dtype::U8, &[2, 1], &[120, 121]), false);
    let args = |strategy: &str, dynamic: bool, group: Option<u32>| {
        json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy,
               "dynamic": dynamic, "group_size": group})
    };
    let with = |weights: Value, inputs: Value| {
        json!({"quantization_config": {"quant_method": "compressed-tensors",
            "format": "mixed-precision", "quantization_status": "compressed",
            "config_groups": {"g": {"targets": ["Linear", "re:a.*"], "weights": weights,
                                    "input_activations": inputs}},
            "ignore": ["b", "re:^(?!a)"]}})
    };
    let mx = |dynamic| {
        let mut args = args("group", dynamic, Some(32));
        args["scale_dtype"] = json!("torch.uint8");
        args
    };
    let mut block = args("block", false, None);
    block["block_structure"] = json!([1, 32]);
    let fp8 = |more: Value| {
        json!({"quantization_config": {"quant_method": "fp8",
        "activation_scheme": "dynamic", "weight_block_size": more}})
    };
    let cases = [
        (Value::Null, one(true)),
        (Value::Null, rows()),
        (with(args("tensor", false, None), Value::Null), one(false)),
        (
            with(args("tensor", false, None), args("tensor", false, None)),
            one(true),
        ),
        (
            with(args("channel", false, None), args("token", true, None)),
            rows(),
        ),
        (with(block, args("group", true, Some(16))), rows()),
        (with(mx(false), mx(true)), bytes()),
        (fp8(Value::Null), one(false)),
        (fp8(json!([1, 128])), rows()),
    ];
    let seed = |(config, file): (Value, Vec<u8>)| {
        let config = match config {
            Value::Null => vec![],
            config => config.to_string().into_bytes(),
        };
        let length = (config.len() as u16).to_le_bytes();
        [&length[..], &config, &file].concat()
    };
    cases.into_iter().map(seed).collect()
}
