//! Angles of rotary position embeddings, with the scalings that Llama-like models use.

use crate::models::error::Result;
use candle_core::{DType, Device, Tensor};
use std::f64::consts::PI;

/// How frequencies are scaled for contexts longer than in training.
///
/// ```
/// use fp8::models::{RopeConfig, RopeScaling};
/// // Four times the context length of the training.
/// let rope = RopeConfig::new(10_000., 64).with_scaling(RopeScaling::Linear { factor: 4. });
/// assert_ne!(rope.scaling, RopeScaling::None);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Positions are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// The base grows with the length of the sequence (dynamic NTK).
    Dynamic {
        /// The factor.
        factor: f64,
        /// Up to this many tokens nothing changes.
        original: usize,
    },
    /// Low frequencies are divided, high ones kept, those between interpolated (Llama 3.1).
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high frequencies.
        high: f64,
        /// Context length in training.
        original: usize,
    },
    /// Like Llama 3's, with a ramp over dimensions and a temperature on cosines and sines (YaRN, arXiv:2309.00071).
    Yarn {
        /// What low frequencies are divided by.
        factor: f64,
        /// Context length in training.
        original: usize,
        /// Rotations at which the ramp begins.
        beta_fast: f64,
        /// Rotations at which the ramp ends.
        beta_slow: f64,
        /// What cosines and sines are multiplied by.
        attention_factor: f64,
        /// Whether to round the ends of the ramp to whole dimensions.
        truncate: bool,
    },
    /// One factor per frequency, with a second set for contexts longer than in training (Phi-3's longrope).
    LongRope {
        /// Factors up to `original` tokens.
        short: Vec<f64>,
        /// Factors beyond.
        long: Vec<f64>,
        /// Context length in training.
        original: usize,
        /// What cosines and sines are multiplied by.
        attention_factor: f64,
    },
}

/// Rotary position embedding of a model.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Number of features of a head that are rotated; even.
    pub dim: usize,
    /// Scaling for long contexts.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// Frequencies without scaling.
    pub fn new(theta: f64, dim: usize) -> Self {
        Self {
            theta,
            dim,
            scaling: RopeScaling::None,
        }
    }

    /// The same with another scaling.
    pub fn with_scaling(self, scaling: RopeScaling) -> Self {
        Self { scaling, ..self }
    }

    /// Frequencies in radians per token, and the factor on cosines and sines, for a sequence of `total` tokens.
    fn frequencies(&self, total: usize) -> (Vec<f32>, f32) {
        // In f32, as the models were trained.
        let plain = |theta: f64| {
            let exponent = |i: usize| 2. * i as f64 / self.dim as f64;
            (0..self.dim / 2).map(move |i| f64::from((1. / theta.powf(exponent(i))) as f32))
        };
        let scaled = |scale: &dyn Fn(usize, f64) -> f64| -> Vec<f32> {
            let plain = plain(self.theta).enumerate();
            plain.map(|(i, f)| scale(i, f) as f32).collect()
        };
        match &self.scaling {
            RopeScaling::None => (scaled(&|_, f| f), 1.),
            RopeScaling::Linear { factor } => (scaled(&|_, f| f / factor), 1.),
            RopeScaling::Dynamic { factor, original } => {
                let length = total.max(*original) as f64 / *original as f64;
                let exponent = self.dim as f64 / (self.dim as f64 - 2.).max(1.);
                let theta = self.theta * (factor * length - (factor - 1.)).powf(exponent);
                (plain(theta).map(|f| f as f32).collect(), 1.)
            }
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                let original = *original as f64;
                let scale = |_, f: f64| {
                    let wavelength = 2. * PI / f;
                    if wavelength < original / high {
                        f
                    } else if wavelength > original / low {
                        f / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1. - smooth) * f / factor + smooth * f
                    }
                };
                (scaled(&scale), 1.)
            }
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => {
                let dim_of = |rotations: f64| {
                    self.dim as f64 * (*original as f64 / (rotations * 2. * PI)).ln()
                        / (2. * self.theta.ln())
                };
                let (mut low, mut high) = (dim_of(*beta_fast), dim_of(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, high) = (low.max(0.), high.min(self.dim as f64 - 1.));
                let width = if high == low { 0.001 } else { high - low };
                let scale = |i, f| {
                    let ramp = ((i as f64 - low) / width).clamp(0., 1.);
                    f / factor * ramp + f * (1. - ramp)
                };
                (scaled(&scale), *attention_factor as f32)
            }
            RopeScaling::LongRope {
                short,
                long,
                original,
                attention_factor,
            } => {
                let factors = if total > *original { long } else { short };
                let scaled = plain(self.theta).zip(factors);
                let scaled = scaled.map(|(f, factor)| (f / factor) as f32);
                (scaled.collect(), *attention_factor as f32)
            }
        }
    }

    /// Cosines and sines of positions `first` to `first + tokens`, each `[tokens, dim / 2]`, for a sequence that is known to have `known`
    /// tokens or more.
    pub(crate) fn tables(
        &self,
        first: usize,
        tokens: usize,
        known: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<(Tensor, Tensor)> {
        let (frequencies, factor) = self.frequencies(known.max(first + tokens));
        let angles = (first..first + tokens)
            .flat_map(|t| frequencies.iter().map(move |f| f64::from(t as f32 * f)));
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles
            .map(|angle| (angle.cos() as f32 * factor, angle.sin() as f32 * factor))
            .unzip();
        let shape = (tokens, self.dim / 2);
        let table = |values| Tensor::from_vec(values, shape, device)?.to_dtype(dtype);
        Ok((table(cos)?, table(sin)?))
    }
}
