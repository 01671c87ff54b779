//! Input scales, scales of caches, codes.

use super::{Case, case};
use crate::families::*;
use crate::support::*;
use fp8_files::audit::Fault::*;

const Q: &str = "model.layers.1.self_attn.q_proj.weight";
const Q_INPUT: &str = "model.layers.1.self_attn.q_proj.input_scale";
const K_CACHE: &str = "model.layers.1.self_attn.k_scale";

/// Quantizes all layers anew, to codes up to `largest`, after a factor for the values.
fn again(model: &mut Model, largest: f32) {
    for (seed, (path, n, k)) in layers().into_iter().enumerate() {
        model.requantize(
            &path,
            "weight_scale",
            &weight(seed, n, k),
            k,
            Scheme::Channel,
            largest,
        );
    }
}

pub fn cases() -> Vec<Case> {
    vec![
        case(
            "input scales are inverted",
            statics,
            |m| m.numbers("input_scale", |_, x| 1. / x),
            InputScalesImplausible,
            Q_INPUT,
        ),
        case(
            "input scales were divided twice",
            autofp8,
            |m| m.numbers("input_scale", |_, x| x / 448.),
            InputScalesImplausible,
            Q_INPUT,
        ),
        case(
            "input scales were left at 1",
            autofp8,
            |m| m.numbers("input_scale", |_, _| 1.),
            InputScalesOne,
            Q_INPUT,
        ),
        case(
            "q has another input scale than k and v",
            statics,
            |m| m.numbers(Q_INPUT, |_, x| x / 2.),
            InputScalesDiffer,
            Q_INPUT,
        ),
        case(
            "scales of a cache have other names",
            statics,
            |m| {
                for at in 0..LAYERS {
                    let attention = format!("model.layers.{at}.self_attn");
                    m.rename(
                        &format!("{attention}.k_scale"),
                        &format!("{attention}.key_cache_scale"),
                    );
                    m.rename(
                        &format!("{attention}.v_scale"),
                        &format!("{attention}.value_cache_scale"),
                    );
                }
            },
            KvScaleUnknown,
            "model.layers.1.self_attn.key_cache_scale",
        ),
        case(
            "scales of a cache are 1",
            modelopt,
            |m| {
                m.numbers("k_scale", |_, _| 1.);
                m.numbers("v_scale", |_, _| 1.);
            },
            KvScalesOne,
            K_CACHE,
        ),
        case(
            "a cache is declared, but has no scales",
            statics,
            |m| {
                m.tensors
                    .retain(|name, _| !name.contains("k_scale") && !name.contains("v_scale"))
            },
            KvScalesMissing,
            "kv_cache_scheme",
        ),
        case(
            "ModelOpt's cache has no scales",
            modelopt,
            |m| {
                m.tensors
                    .retain(|name, _| !name.contains("k_scale") && !name.contains("v_scale"))
            },
            KvScalesMissing,
            "kv_cache_quant_algo",
        ),
        case(
            "one layer's cache has no scale",
            statics,
            |m| {
                m.remove(K_CACHE);
            },
            KvScalesPartial,
            K_CACHE,
        ),
        case(
            "a scale of a cache has two values",
            statics,
            |m| {
                m.set(
                    "model.layers.1.self_attn.k_proj.k_scale",
                    floats(&[], &[0.5]),
                )
            },
            KvScaleConflict,
            K_CACHE,
        ),
        case(
            "codes are NaN",
            channels,
            |m| m.get(Q).data[77] = 0x7F,
            NanCodes,
            Q,
        ),
        case(
            "codes of MI300",
            autofp8,
            |m| {
                // Their largest magnitude is 0x7F, and 0x80 does not occur.
                for (path, ..) in layers() {
                    let codes = &mut m.get(&format!("{path}.weight")).data;
                    codes
                        .iter_mut()
                        .filter(|code| **code & 0x7F == 0x7E)
                        .for_each(|code| *code |= 1);
                    codes
                        .iter_mut()
                        .filter(|code| **code == 0x80)
                        .for_each(|code| *code = 0);
                }
            },
            FnuzCodes,
            Q,
        ),
        case(
            "weights were clipped",
            channels,
            |m| {
                let codes = &mut m.get(Q).data;
                codes
                    .iter_mut()
                    .filter(|code| **code & 0x7F > 0x70)
                    .for_each(|code| *code = *code & 0x80 | 0x7E);
            },
            SaturatedCodes,
            Q,
        ),
        case(
            "codes reach 240 only",
            channels,
            |m| again(m, 240.),
            UnusedRange,
            Q,
        ),
        case(
            "a weight is a hole",
            statics,
            |m| m.get(Q).data.fill(0),
            ZeroWeights,
            Q,
        ),
        case(
            "a norm is NaN",
            channels,
            |m| {
                let mut ones = [1.; HIDDEN];
                ones[3] = f32::NAN;
                m.set("model.norm.weight", bf16(&[HIDDEN], &ones));
            },
            ValuesNotFinite,
            "model.norm.weight",
        ),
    ]
}
