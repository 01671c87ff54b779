//! What the configuration says.

use super::{Case, case};
use crate::families::*;
use crate::support::*;
use fp8_files::audit::Fault::*;
use serde_json::{Value, json};
use std::fs;

const Q: &str = "model.layers.1.self_attn.q_proj.weight";
const GATE: &str = "model.layers.1.mlp.gate_proj.weight";

/// Puts the weight of a layer back into high precision.
fn dequantized(model: &mut Model, path: &str, scale: &str) {
    let at = layers()
        .iter()
        .position(|(known, ..)| known == path)
        .unwrap();
    let (_, n, k) = layers()[at];
    model.set(&format!("{path}.weight"), bf16(&[n, k], &weight(at, n, k)));
    model.remove(&format!("{path}.{scale}"));
}

/// Adds ModelOpt's own file.
fn second(model: &mut Model, quantization: Value) {
    let text = json!({ "quantization": quantization }).to_string();
    model.then(move |dir| fs::write(dir.join("hf_quant_config.json"), &text).unwrap());
}

/// Gives `algo` to the layer of [`GATE`], and FP8 to all others.
fn mixture(algo: &str) -> Value {
    let listed = layers().into_iter().map(|(path, ..)| {
        let is_gate = GATE.starts_with(&path);
        let algo = if is_gate { algo } else { "FP8" };
        (path, json!({ "quant_algo": algo }))
    });
    Value::Object(listed.collect())
}

pub fn cases() -> Vec<Case> {
    vec![
        case(
            "config.json is cut off",
            channels,
            |m| m.then(|dir| fs::write(dir.join("config.json"), "{\"a\": ").unwrap()),
            ConfigInvalid,
            "config.json",
        ),
        case(
            "an unknown method",
            channels,
            |m| m.quantization()["quant_method"] = json!("fp9"),
            ConfigUnsupported,
            "quantization_config.quant_method",
        ),
        case(
            "integers are declared",
            channels,
            |m| m.quantization()["config_groups"]["group_0"]["weights"]["type"] = json!("int"),
            ConfigUnsupported,
            "quantization_config.config_groups.group_0.weights.type",
        ),
        case(
            "two groups for a layer",
            channels,
            |m| {
                let mut group = m.quantization()["config_groups"]["group_0"].clone();
                group["weights"]["strategy"] = json!("tensor");
                m.quantization()["config_groups"]["group_1"] = group;
            },
            ConfigAmbiguous,
            "model.layers.1.self_attn.q_proj",
        ),
        case(
            "ModelOpt's files name other algorithms",
            modelopt,
            |m| {
                let algo = "FP8_PER_CHANNEL_PER_TOKEN";
                second(
                    m,
                    json!({ "quant_algo": algo, "exclude_modules": ["lm_head"] }),
                );
            },
            ConfigsDiffer,
            "quantization.quant_algo",
        ),
        case(
            "ModelOpt's files leave out other modules",
            modelopt,
            |m| {
                second(
                    m,
                    json!({ "quant_algo": "fp8", "exclude_modules": ["lm_head", "vision*"] }),
                )
            },
            ConfigsDiffer,
            "quantization.exclude_modules",
        ),
        case(
            "ModelOpt's files list layers differently",
            modelopt,
            |m| {
                m.quantization()["quant_algo"] = json!("MIXED_PRECISION");
                m.quantization()["quantized_layers"] = mixture("FP8");
                let listed = mixture("MXFP8");
                second(
                    m,
                    json!({ "quant_algo": "MIXED_PRECISION", "quantized_layers": listed }),
                );
            },
            ConfigsDiffer,
            "quantization.quantized_layers",
        ),
        case(
            "exclude_modules of the file that lists a mixture is misspelt",
            modelopt,
            |m| {
                m.quantization()["quant_algo"] = json!("MIXED_PRECISION");
                m.quantization()["ignore"] = json!(null);
                let excluded = json!(["lm_head", "model.layers.1.self_atn"]);
                second(
                    m,
                    json!({ "quant_algo": "MIXED_PRECISION", "quantized_layers": mixture("FP8"), "exclude_modules": excluded }),
                );
            },
            IgnoreMatchesNothing,
            "model.layers.1.self_atn",
        ),
        case(
            "compressed-tensors for DeepSeek's names",
            blocks,
            |m| *m.quantization() = channels().quantization().clone(),
            ConfigOfOther,
            "quantization_config",
        )
        .also(&[ScaleSpelling]),
        case(
            "no configuration",
            channels,
            |m| m.config["quantization_config"] = json!(null),
            ConfigMissing,
            "config.json",
        ),
        case(
            "FP8 is declared of a model in high precision",
            Model::plain,
            |m| m.config["quantization_config"] = channels().quantization().clone(),
            ConfigWithoutFp8,
            "quantization_config",
        ),
        case(
            "modules_to_not_convert names a quantized layer",
            blocks,
            |m| {
                m.quantization()["modules_to_not_convert"] =
                    json!(["lm_head", "model.layers.1.self_attn.q_proj"])
            },
            IgnoredLayerQuantized,
            Q,
        ),
        case(
            "ignored_layers names a quantized layer",
            autofp8,
            |m| {
                m.quantization()["ignored_layers"] =
                    json!(["lm_head", "model.layers.1.mlp.gate_proj"])
            },
            IgnoredLayerQuantized,
            GATE,
        ),
        case(
            "a pattern ignores a quantized layer",
            channels,
            |m| m.quantization()["ignore"] = json!(["lm_head", "re:.*layers.1.*q_proj"]),
            IgnoredLayerQuantized,
            Q,
        ),
        case(
            "modules_to_not_convert has a wrong prefix",
            blocks,
            |m| {
                m.quantization()["modules_to_not_convert"] =
                    json!(["lm_head", "transformer.layers.1.self_atn"])
            },
            IgnoreMatchesNothing,
            "transformer.layers.1.self_atn",
        ),
        case(
            "ignore is misspelt",
            channels,
            |m| {
                dequantized(m, "model.layers.1.mlp.down_proj", "weight_scale");
                m.quantization()["ignore"] = json!(["lm_head", "model.layers.1.mlp.downproj"]);
            },
            IgnoreMatchesNothing,
            "model.layers.1.mlp.downproj",
        )
        .also(&[LayerNotQuantized]),
        case(
            "exclude_modules has a fused name",
            modelopt,
            |m| {
                m.quantization()["ignore"] = json!(["lm_head", "model.layers.1.self_attn.qkv_proj"])
            },
            IgnoreFusedName,
            "model.layers.1.self_attn.qkv_proj",
        ),
        case(
            "ignored_layers has a fused name",
            autofp8,
            |m| {
                m.quantization()["ignored_layers"] =
                    json!(["lm_head", "model.layers.1.mlp.gate_up_proj"])
            },
            IgnoreFusedName,
            "model.layers.1.mlp.gate_up_proj",
        ),
        case(
            "a target names nothing",
            channels,
            |m| {
                m.quantization()["config_groups"]["group_0"]["targets"] =
                    json!(["Linear", "model.layers.9.mlp.gate_proj"])
            },
            TargetMatchesNothing,
            "model.layers.9.mlp.gate_proj",
        ),
        case(
            "a layer is not quantized",
            channels,
            |m| dequantized(m, "model.layers.1.mlp.down_proj", "weight_scale"),
            LayerNotQuantized,
            "model.layers.1.mlp.down_proj.weight",
        ),
        case(
            "one of q, k and v is not quantized",
            channels,
            |m| {
                dequantized(m, "model.layers.1.self_attn.q_proj", "weight_scale");
                m.quantization()["ignore"] = json!(["lm_head", "model.layers.1.self_attn.q_proj"]);
            },
            FusedPartlyQuantized,
            Q,
        ),
    ]
}
