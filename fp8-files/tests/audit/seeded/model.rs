//! The model as a whole: layers, experts, the head.

use super::{Case, case};
use crate::families::*;
use crate::support::*;
use fp8_files::audit::Fault::*;
use serde_json::json;

const HEAD: &str = "lm_head.weight";

/// Makes the head FP8.
fn quantize_head(model: &mut Model, own: &str, scheme: Scheme) {
    model.requantize(
        "lm_head",
        own,
        &weight(101, 64, HIDDEN),
        HIDDEN,
        scheme,
        448.,
    );
}

fn tied() -> Model {
    let mut model = channels();
    model.config["tie_word_embeddings"] = json!(true);
    model.remove(HEAD);
    model
}

pub fn cases() -> Vec<Case> {
    vec![
        case(
            "fewer layers than declared",
            channels,
            |m| m.config["num_hidden_layers"] = json!(5),
            LayersMissing,
            "model.layers.4",
        ),
        case(
            "2^63 layers are declared",
            blocks,
            |m| m.config["num_hidden_layers"] = json!(1u64 << 63),
            LayersMissing,
            "model.layers.3",
        ),
        case(
            "an expert is missing",
            experts,
            |m| {
                m.tensors
                    .retain(|name, _| !name.contains("layers.1.mlp.experts.3"))
            },
            LayersMissing,
            "model.layers.1.mlp.experts.3",
        ),
        case(
            "a projection of an expert is missing",
            experts,
            |m| {
                m.tensors
                    .retain(|name, _| !name.contains("layers.1.mlp.experts.2.up_proj"))
            },
            LayerIncomplete,
            "model.layers.1.mlp.experts.2.up_proj.weight",
        ),
        case(
            "a norm is missing",
            channels,
            |m| {
                m.remove("model.layers.2.input_layernorm.weight");
            },
            LayerIncomplete,
            "model.layers.2.input_layernorm.weight",
        ),
        case(
            "the configuration of a larger model",
            statics,
            |m| m.config["hidden_size"] = json!(256),
            ConfigShape,
            "model.embed_tokens.weight",
        ),
        case(
            "the head is missing",
            channels,
            |m| {
                m.remove(HEAD);
            },
            HeadMissing,
            HEAD,
        ),
        case(
            "a tied head is FP8",
            tied,
            |m| {
                quantize_head(m, "weight_scale", Scheme::Channel);
                m.quantization()["ignore"] = json!([]);
            },
            TiedHeadQuantized,
            HEAD,
        ),
        case(
            "a tied head differs from the embedding",
            tied,
            |m| m.set(HEAD, bf16(&[64, HIDDEN], &weight(5, 64, HIDDEN))),
            TiedHeadDiffers,
            HEAD,
        ),
        case(
            "the head is FP8 in AutoFP8",
            autofp8,
            |m| {
                quantize_head(m, "weight_scale", Scheme::Tensor);
                m.set("lm_head.input_scale", floats(&[], &[6. / 448.]));
                m.quantization()["ignored_layers"] = json!([]);
            },
            HeadQuantized,
            HEAD,
        ),
        case(
            "the head is FP8 in blocks",
            blocks,
            |m| {
                quantize_head(m, "weight_scale_inv", Scheme::Block);
                m.quantization()["modules_to_not_convert"] = json!([]);
            },
            HeadQuantized,
            HEAD,
        ),
    ]
}
