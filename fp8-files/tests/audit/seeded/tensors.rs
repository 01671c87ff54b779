//! Names, shapes and dtypes of weights and scales.

use super::{Case, case};
use crate::families::*;
use crate::support::*;
use fp8_core::Format;
use fp8_files::audit::Fault::*;
use safetensors::Dtype;
use serde_json::json;

const Q: &str = "model.layers.1.self_attn.q_proj.weight";
const Q_SCALE: &str = "model.layers.1.self_attn.q_proj.weight_scale";
const Q_INPUT: &str = "model.layers.1.self_attn.q_proj.input_scale";
const DOWN: &str = "model.layers.1.mlp.down_proj.weight";
const DOWN_BLOCKS: &str = "model.layers.1.mlp.down_proj.weight_scale_inv";

/// The codes as numbers, which is what a loader gets that drops the scale.
fn as_values(model: &mut Model, name: &str) {
    let entry = model.get(name);
    let values: Vec<f32> = entry
        .data
        .iter()
        .map(|code| Format::E4M3.decode(*code))
        .collect();
    *entry = bf16(&entry.shape.clone(), &values);
}

pub fn cases() -> Vec<Case> {
    vec![
        case(
            "a layer of GPTQ",
            channels,
            |m| {
                let words = Entry {
                    dtype: Dtype::I32,
                    shape: vec![16, 16],
                    data: vec![1; 1024],
                };
                m.set("model.layers.1.extra.qweight", words);
            },
            ForeignFormat,
            "model.layers.1.extra.qweight",
        ),
        case(
            "FNUZ codes by their dtype",
            channels,
            |m| m.get(Q).dtype = Dtype::F8_E4M3FNUZ,
            ForeignFormat,
            Q,
        )
        .also(&[ScaleWithoutWeight]),
        case(
            "a scale is dropped",
            channels,
            |m| {
                m.remove(Q_SCALE);
            },
            ScaleMissing,
            Q,
        ),
        case(
            "all scales are dropped",
            statics,
            |m| m.tensors.retain(|name, _| !name.ends_with("weight_scale")),
            ScaleMissing,
            Q,
        ),
        case(
            "a scale has DeepSeek's name",
            channels,
            |m| m.rename(Q_SCALE, &Q_SCALE.replace("_scale", "_scale_inv")),
            ScaleSpelling,
            Q,
        ),
        case(
            "scales have ComfyUI's names",
            fbgemm,
            |m| {
                for (path, ..) in layers() {
                    m.rename(
                        &format!("{path}.weight_scale"),
                        &format!("{path}.scale_weight"),
                    );
                }
            },
            ScaleSpelling,
            Q,
        )
        .also(&[ConfigOfOther]),
        case(
            "a weight is dropped",
            channels,
            |m| {
                m.remove(Q);
            },
            ScaleWithoutWeight,
            Q_SCALE,
        )
        .also(&[LayerIncomplete]),
        case(
            "a weight is dequantized, its scale is left",
            channels,
            |m| m.set(Q, bf16(&[HIDDEN, HIDDEN], &weight(7, HIDDEN, HIDDEN))),
            ScaledWeightNotFp8,
            Q,
        )
        .also(&[LayerNotQuantized, FusedPartlyQuantized]),
        case(
            "codes are stored as U8",
            channels,
            |m| m.get(Q).dtype = Dtype::U8,
            CodesAsBytes,
            Q,
        ),
        case(
            "codes are stored as I8",
            blocks,
            |m| m.get(Q).dtype = Dtype::I8,
            CodesAsBytes,
            Q,
        ),
        case(
            "codes are stored as numbers beside their scale",
            channels,
            |m| as_values(m, Q),
            CodesAsValues,
            Q,
        )
        .also(&[LayerNotQuantized, FusedPartlyQuantized]),
        case(
            "codes are stored as numbers without scales",
            statics,
            |m| {
                for (path, ..) in layers() {
                    as_values(m, &format!("{path}.weight"));
                }
                m.tensors.retain(|name, _| !name.contains("_scale"));
                m.config["quantization_config"] = json!(null);
            },
            CodesAsValues,
            Q,
        ),
        case(
            "two spellings that the family knows",
            blocks,
            |m| {
                let scale = m.get(DOWN_BLOCKS).clone();
                m.set(&DOWN_BLOCKS.replace("_inv", ""), scale);
            },
            DuplicateSpelling,
            DOWN_BLOCKS,
        ),
        case(
            "two spellings of two families",
            channels,
            |m| {
                let scale = m.get(Q_SCALE).clone();
                m.set("model.layers.1.self_attn.q_proj.scale_weight", scale);
            },
            DuplicateSpelling,
            "model.layers.1.self_attn.q_proj.scale_weight",
        ),
        case(
            "a weight is E5M2",
            channels,
            |m| m.get(Q).dtype = Dtype::F8_E5M2,
            WeightDtype,
            Q,
        ),
        case(
            "a weight has three dimensions",
            channels,
            |m| m.get(Q).shape = vec![2, 64, HIDDEN],
            WeightShape,
            Q,
        ),
        case(
            "a scale is made of integers",
            channels,
            |m| m.get(Q_SCALE).dtype = Dtype::I32,
            ScaleDtype,
            Q_SCALE,
        ),
        case(
            "a scale for each channel where one is declared",
            statics,
            |m| m.set(Q_SCALE, floats(&[HIDDEN, 1], &[0.001; HIDDEN])),
            ScaleShape,
            Q_SCALE,
        ),
        case(
            "one scale where channels are declared",
            channels,
            |m| m.set(Q_SCALE, floats(&[1], &[0.001])),
            ScaleShape,
            Q_SCALE,
        ),
        case(
            "a row of scales is lost",
            channels,
            |m| m.set(Q_SCALE, floats(&[HIDDEN - 1, 1], &[0.001; HIDDEN - 1])),
            ScaleShape,
            Q_SCALE,
        ),
        case(
            "another block size is declared",
            blocks,
            |m| m.quantization()["weight_block_size"] = json!([32, 32]),
            ScaleShape,
            DOWN_BLOCKS,
        ),
        case(
            "a grid of blocks is transposed",
            blocks,
            |m| m.get(DOWN_BLOCKS).shape.reverse(),
            ScaleTransposed,
            DOWN_BLOCKS,
        ),
        case(
            "scales of channels lie in a row",
            fbgemm,
            |m| m.get(Q_SCALE).shape.reverse(),
            ScaleTransposed,
            Q_SCALE,
        ),
        case(
            "groups are transposed",
            microscaled,
            |m| m.get(Q_SCALE).shape.reverse(),
            ScaleTransposed,
            Q_SCALE,
        ),
        case(
            "a padded grid holds other blocks",
            blocks,
            |m| {
                let scales: Vec<f32> = (1..=8).map(|at| at as f32 * 1e-4).collect();
                m.set(DOWN_BLOCKS, floats(&[2, 4], &scales));
            },
            ScalePadding,
            DOWN_BLOCKS,
        ),
        case(
            "an input scale is dropped",
            statics,
            |m| {
                m.remove(Q_INPUT);
            },
            InputScaleMissing,
            Q_INPUT,
        ),
        case(
            "dynamic inputs have a scale",
            channels,
            |m| m.set(Q_INPUT, floats(&[], &[0.01])),
            InputScaleUnused,
            Q,
        ),
        case(
            "a zero point is 3",
            channels,
            |m| {
                let zero = Entry {
                    dtype: Dtype::I8,
                    shape: vec![1],
                    data: vec![3],
                };
                m.set("model.layers.1.self_attn.q_proj.weight_zero_point", zero);
            },
            ZeroPoint,
            "model.layers.1.self_attn.q_proj.weight_zero_point",
        ),
        case(
            "a scale with a name of its own",
            channels,
            |m| {
                m.set(
                    "model.layers.1.mlp.down_proj.smooth_scale",
                    floats(&[INNER], &[1.5; INNER]),
                )
            },
            UnknownScale,
            "model.layers.1.mlp.down_proj.smooth_scale",
        ),
        case(
            "a weight is missing in one layer",
            Model::plain,
            |m| {
                m.remove(DOWN);
            },
            LayerIncomplete,
            DOWN,
        ),
    ]
}
