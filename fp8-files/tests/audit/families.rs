//! The same small model in several families, without a fault.

use crate::support::*;
use serde_json::{Value, json};

/// compressed-tensors: a scale for each channel, inputs per token.
pub fn channels() -> Model {
    let config = compressed(
        "float-quantized",
        json!("channel"),
        json!({ "strategy": "token", "dynamic": true }),
    );
    Model::quantized(Scheme::Channel, "weight_scale", config)
}

/// compressed-tensors: one scale for a weight, static inputs, a cache in FP8.
pub fn statics() -> Model {
    let inputs = json!({ "strategy": "tensor", "dynamic": false });
    let mut config = compressed("float-quantized", json!("tensor"), inputs);
    config["kv_cache_scheme"] = json!({ "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true, "dynamic": false });
    Model::quantized(Scheme::Tensor, "weight_scale", config)
        .with_inputs("input_scale")
        .with_cache()
}

/// compressed-tensors: microscaling.
pub fn microscaled() -> Model {
    let mx = |dynamic| json!({ "strategy": "group", "group_size": 32, "dynamic": dynamic, "scale_dtype": "torch.uint8" });
    let mut config = compressed("mxfp8-quantized", json!("group"), mx(true));
    let weights = &mut config["config_groups"]["group_0"]["weights"];
    weights["group_size"] = json!(32);
    weights["scale_dtype"] = json!("torch.uint8");
    Model::quantized(Scheme::Mx, "weight_scale", config)
}

fn compressed(format: &str, strategy: Value, mut inputs: Value) -> Value {
    for (key, value) in [
        ("num_bits", json!(8)),
        ("type", json!("float")),
        ("symmetric", json!(true)),
    ] {
        inputs[key] = value;
    }
    let weights = json!({ "num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true, "dynamic": false });
    json!({
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights, "input_activations": inputs } },
        "ignore": ["lm_head"],
    })
}

/// DeepSeek's and Qwen's blocks.
pub fn blocks() -> Model {
    let config = json!({
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    });
    Model::quantized(Scheme::Block, "weight_scale_inv", config)
}

/// AutoFP8: one scale for a weight, static inputs.
pub fn autofp8() -> Model {
    let config = json!({ "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"] });
    Model::quantized(Scheme::Tensor, "weight_scale", config).with_inputs("input_scale")
}

/// ModelOpt, with a cache in FP8.
pub fn modelopt() -> Model {
    let config = json!({
        "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"],
        "producer": { "name": "modelopt" },
    });
    Model::quantized(Scheme::Tensor, "weight_scale", config)
        .with_inputs("input_scale")
        .with_cache()
}

/// FBGEMM: a scale for each channel, inputs per token with a bound.
pub fn fbgemm() -> Model {
    let config = json!({ "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"] });
    Model::quantized(Scheme::Channel, "weight_scale", config)
}

/// A mixture of four experts in blocks.
pub fn experts() -> Model {
    let mut model = blocks();
    model.config["num_experts"] = json!(4);
    let own = "weight_scale_inv";
    for at in 0..LAYERS {
        for expert in 0..4 {
            for (name, n, k) in [
                ("gate_proj", INNER, HIDDEN),
                ("up_proj", INNER, HIDDEN),
                ("down_proj", HIDDEN, INNER),
            ] {
                let path = format!("model.layers.{at}.mlp.experts.{expert}.{name}");
                model.requantize(
                    &path,
                    own,
                    &weight(200 + 12 * at + expert, n, k),
                    k,
                    Scheme::Block,
                    448.,
                );
            }
        }
        for name in ["gate_proj", "up_proj", "down_proj"] {
            for end in ["weight", own] {
                model.remove(&format!("model.layers.{at}.mlp.{name}.{end}"));
            }
        }
        let router = bf16(&[4, HIDDEN], &weight(300 + at, 4, HIDDEN));
        model.set(&format!("model.layers.{at}.mlp.gate.weight"), router);
    }
    model
}

/// A family's name and model.
type Named = (&'static str, fn() -> Model);

/// All families, without a fault.
pub fn all() -> [Named; 9] {
    [
        ("plain", Model::plain),
        ("channels", channels),
        ("statics", statics),
        ("microscaled", microscaled),
        ("blocks", blocks),
        ("autofp8", autofp8),
        ("modelopt", modelopt),
        ("fbgemm", fbgemm),
        ("experts", experts),
    ]
}
