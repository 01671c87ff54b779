//! Numbers of scales, and codes.

use super::{Case, case};
use crate::families::*;
use crate::support::*;
use fp8_files::audit::Fault::*;
use safetensors::Dtype;
use serde_json::json;

const Q_PATH: &str = "model.layers.1.self_attn.q_proj";
const Q_SCALE: &str = "model.layers.1.self_attn.q_proj.weight_scale";
const Q_BLOCKS: &str = "model.layers.1.self_attn.q_proj.weight_scale_inv";
const Q_INPUT: &str = "model.layers.1.self_attn.q_proj.input_scale";
const K_CACHE: &str = "model.layers.1.self_attn.k_scale";

/// Rounds scales up to powers of two, with the codes of the new scales.
fn powers(model: &mut Model) {
    for (seed, (path, n, k)) in layers().into_iter().enumerate() {
        let (mut codes, scales, shape) = quantize(&weight(seed, n, k), k, Scheme::Block, 448.);
        let up: Vec<f32> = scales
            .iter()
            .map(|scale| scale.log2().ceil().exp2())
            .collect();
        for (at, code) in codes.iter_mut().enumerate() {
            let index = at / k / 64 * shape[1] + at % k / 64;
            let value = weight_value(*code) * scales[index] / up[index];
            *code = fp8_core::Cast::new(fp8_core::Format::E4M3).encode(value, 0);
        }
        model.get(&format!("{path}.weight")).data = codes;
        model.set(&format!("{path}.weight_scale_inv"), floats(&shape, &up));
    }
    model.quantization()["scale_fmt"] = json!("ue8m0");
}

fn weight_value(code: u8) -> f32 {
    fp8_core::Format::E4M3.decode(code)
}

fn ue8m0() -> Model {
    let mut model = blocks();
    powers(&mut model);
    model
}

pub fn cases() -> Vec<Case> {
    vec![
        case(
            "a scale is NaN",
            channels,
            |m| m.numbers(Q_SCALE, |at, x| if at == 5 { f32::NAN } else { x }),
            ScaleNotFinite,
            Q_SCALE,
        ),
        case(
            "a scale is infinite",
            blocks,
            |m| m.numbers(Q_BLOCKS, |at, x| if at == 1 { f32::INFINITY } else { x }),
            ScaleNotFinite,
            Q_BLOCKS,
        ),
        case(
            "an exponent byte is 255",
            microscaled,
            |m| m.get(Q_SCALE).data[3] = 255,
            ScaleNotFinite,
            Q_SCALE,
        ),
        case(
            "an input scale is NaN",
            statics,
            |m| m.numbers(Q_INPUT, |_, _| f32::NAN),
            ScaleNotFinite,
            Q_INPUT,
        ),
        case(
            "a scale of a cache is infinite",
            statics,
            |m| m.numbers(K_CACHE, |_, _| f32::INFINITY),
            ScaleNotFinite,
            K_CACHE,
        ),
        case(
            "a scale is negative",
            channels,
            |m| m.numbers(Q_SCALE, |at, x| if at == 5 { -x } else { x }),
            ScaleNegative,
            Q_SCALE,
        ),
        case(
            "a scale is 0",
            channels,
            |m| m.numbers(Q_SCALE, |at, x| if at == 5 { 0. } else { x }),
            ScaleZero,
            Q_SCALE,
        ),
        case(
            "an input scale is 0",
            autofp8,
            |m| m.numbers(Q_INPUT, |_, _| 0.),
            ScaleZero,
            Q_INPUT,
        )
        .also(&[InputScalesDiffer]),
        case(
            "a scale is subnormal",
            channels,
            |m| m.numbers(Q_SCALE, |at, x| if at == 5 { 1e-40 } else { x }),
            ScaleTiny,
            Q_SCALE,
        ),
        case(
            "scales were left at 1",
            autofp8,
            |m| m.numbers("weight_scale", |_, _| 1.),
            ScalesOne,
            Q_SCALE,
        ),
        case(
            "one scale was left at 1",
            statics,
            |m| m.numbers(Q_SCALE, |_, _| 1.),
            ScalesOne,
            Q_SCALE,
        ),
        case(
            "scales of weights are inverted",
            autofp8,
            |m| m.numbers("weight_scale", |_, x| 1. / x),
            ScalesInverted,
            Q_SCALE,
        ),
        case(
            "scales of channels are inverted",
            channels,
            |m| m.numbers("weight_scale", |_, x| 1. / x),
            ScalesInverted,
            Q_SCALE,
        ),
        case(
            "scales of blocks are inverted",
            blocks,
            |m| m.numbers("weight_scale_inv", |_, x| 1. / x),
            ScalesInverted,
            Q_BLOCKS,
        ),
        case(
            "one scale is inverted",
            modelopt,
            |m| m.numbers(Q_SCALE, |_, x| 1. / x),
            ScalesInverted,
            Q_SCALE,
        ),
        case(
            "inverted, and only scales are read",
            statics,
            |m| {
                m.numbers("weight_scale", |_, x| 1. / x);
                m.options = m.options.with_codes(fp8_files::audit::Codes::None);
            },
            ScalesInverted,
            Q_SCALE,
        ),
        case(
            "scales are amaxes",
            channels,
            |m| m.numbers("weight_scale", |_, x| x * 448.),
            ScalesTooLarge,
            Q_SCALE,
        ),
        case(
            "scales are amaxes of FNUZ",
            blocks,
            |m| m.numbers("weight_scale_inv", |_, x| x * 240.),
            ScalesTooLarge,
            Q_BLOCKS,
        ),
        case(
            "one scale is an amax",
            statics,
            |m| m.numbers(Q_SCALE, |_, x| x * 448.),
            ScalesTooLarge,
            Q_SCALE,
        ),
        case(
            "scales were divided twice",
            statics,
            |m| m.numbers("weight_scale", |_, x| x / 448.),
            ScalesTooSmall,
            Q_SCALE,
        ),
        case(
            "one scale was divided twice by 240",
            channels,
            |m| m.numbers(Q_SCALE, |_, x| x / 240.),
            ScalesTooSmall,
            Q_SCALE,
        ),
        case(
            "scales are something else",
            fbgemm,
            |m| m.numbers("weight_scale", |_, x| x * 1e12),
            ScalesImplausible,
            Q_SCALE,
        ),
        case(
            "one channel is far from the others",
            channels,
            |m| m.numbers(Q_SCALE, |at, x| if at == 9 { x * 448. } else { x }),
            ScaleOutlier,
            Q_SCALE,
        ),
        case(
            "one scale is far from the others",
            channels,
            |m| m.numbers(Q_SCALE, |_, x| x * 3e9),
            ScaleOutlier,
            Q_SCALE,
        ),
        case(
            "exponent bytes became floats",
            microscaled,
            |m| {
                for (path, ..) in layers() {
                    let entry = m.get(&format!("{path}.weight_scale"));
                    let values: Vec<f32> = entry.data.iter().map(|byte| f32::from(*byte)).collect();
                    *entry = floats(&entry.shape.clone(), &values);
                }
            },
            E8m0AsFloat,
            Q_SCALE,
        ),
        case(
            "exponents of blocks became floats",
            ue8m0,
            |m| m.numbers("weight_scale_inv", |_, x| x.log2() + 127.),
            E8m0AsFloat,
            Q_BLOCKS,
        )
        .also(&[NotPowersOfTwo]),
        case(
            "ue8m0 with any scales",
            blocks,
            |m| m.quantization()["scale_fmt"] = json!("ue8m0"),
            NotPowersOfTwo,
            Q_BLOCKS,
        ),
        case(
            "a scale is a byte of U8 where numbers are declared",
            channels,
            |m| {
                let bytes = Entry {
                    dtype: Dtype::U8,
                    shape: vec![HIDDEN, 1],
                    data: vec![119; HIDDEN],
                };
                m.set(Q_SCALE, bytes);
            },
            ScaleDtype,
            Q_SCALE,
        ),
        case(
            "weights of one layer are far larger",
            statics,
            |m| {
                let values: Vec<f32> = weight(7, HIDDEN, HIDDEN).iter().map(|x| x * 3e4).collect();
                m.requantize(
                    Q_PATH,
                    "weight_scale",
                    &values,
                    HIDDEN,
                    Scheme::Tensor,
                    448.,
                );
            },
            ScaleOutlier,
            Q_SCALE,
        ),
    ]
}
