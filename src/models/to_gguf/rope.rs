//! Rotary positions in the file: entries of the metadata, and tables of factors.

use super::described::Described;
use super::keys::Keys;
use super::names::Architecture;
use crate::models::error::{Error, Result};
use crate::models::layers::{RopeConfig, RopeScaling};
use candle_core::quantized::gguf_file::Value;
use std::f64::consts::TAU;

/// The entries for a model with heads of `head_dim` features.
pub(super) fn entries(model: &Described<'_>, rope: &RopeConfig, keys: &mut Keys) -> Result<()> {
    keys.float("rope.freq_base", rope.theta);
    keys.count("rope.dimension_count", rope.dim);
    match &rope.scaling {
        RopeScaling::None | RopeScaling::Llama3 { .. } => {}
        RopeScaling::Linear { factor } => {
            keys.set("rope.scaling.type", Value::String("linear".into()));
            keys.float("rope.scaling.factor", *factor);
        }
        RopeScaling::Yarn {
            factor,
            original,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate,
        } => {
            // llama.cpp derives it from the factor.
            let usual = if *factor > 1. {
                0.1 * factor.ln() + 1.
            } else {
                1.
            };
            if (attention_factor / usual - 1.).abs() > 1e-6 {
                return Err(unsupported(
                    model,
                    "attention_factor",
                    attention_factor,
                    &format!("{usual}"),
                ));
            }
            if !truncate {
                return Err(unsupported(model, "truncate", "false", "true"));
            }
            keys.set("rope.scaling.type", Value::String("yarn".into()));
            keys.float("rope.scaling.factor", *factor);
            keys.count("rope.scaling.original_context_length", *original);
            if (*beta_fast, *beta_slow) != (32., 1.) {
                keys.float("rope.scaling.yarn_beta_fast", *beta_fast);
                keys.float("rope.scaling.yarn_beta_slow", *beta_slow);
            }
        }
        RopeScaling::LongRope {
            original,
            attention_factor,
            ..
        } => {
            keys.count("rope.scaling.original_context_length", *original);
            keys.float("rope.scaling.attn_factor", *attention_factor);
        }
        RopeScaling::Dynamic { .. } => {
            let expected = "linear, yarn, llama3 or longrope";
            return Err(unsupported(model, "rope_type", "dynamic", expected));
        }
    }
    Ok(())
}

fn unsupported(
    model: &Described<'_>,
    key: &str,
    value: impl std::fmt::Display,
    expected: &str,
) -> Error {
    model.unsupported(&format!("rope_parameters.{key}"), value, expected)
}

/// The tables of factors that frequencies are divided by.
pub(super) fn tables(
    model: &Described<'_>,
    rope: &RopeConfig,
) -> Result<Vec<(&'static str, Vec<f32>)>> {
    match &rope.scaling {
        RopeScaling::Llama3 {
            factor,
            low,
            high,
            original,
        } => {
            if model.architecture != Architecture::Llama {
                return Err(unsupported(
                    model,
                    "rope_type",
                    "llama3",
                    "a type of this architecture",
                ));
            }
            let of = |i: usize| {
                let wavelength = TAU * rope.theta.powf((2 * i) as f64 / rope.dim as f64);
                let smooth = (*original as f64 / wavelength - low) / (high - low);
                let smooth = smooth.clamp(0., 1.);
                (1. / ((1. - smooth) / factor + smooth)) as f32
            };
            Ok(vec![(
                "rope_freqs.weight",
                (0..rope.dim / 2).map(of).collect(),
            )])
        }
        RopeScaling::LongRope { short, long, .. } => {
            if model.architecture != Architecture::Phi3 {
                return Err(unsupported(
                    model,
                    "rope_type",
                    "longrope",
                    "a type of this architecture",
                ));
            }
            let table = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect();
            Ok(vec![
                ("rope_factors_long.weight", table(long)),
                ("rope_factors_short.weight", table(short)),
            ])
        }
        _ => Ok(vec![]),
    }
}
